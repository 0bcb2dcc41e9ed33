"""Start-up and shutdown of an FFN instance (``afd ffn``)."""

import logging
import os
import signal
import time
from types import FrameType

import torch

from afd.control.connect import client_for
from afd.metrics import RoleMetrics, Weights
from afd.metrics_server import serve_metrics
from afd.resolve import Resolved, region_options, resolve
from afd.roles import RoleSpec
from afd.topology import PINNED_SPIN_US
from afd.wire.streams_torch import torch_device
from afd_comm import Region, VerbsOptions
from ffn_worker.loop import FfnLoop
from ffn_worker.model import FfnModel, load_ffn_model

logger = logging.getLogger("afd.ffn")


def run_ffn(role: RoleSpec) -> None:
    """Load this instance's experts, join the deployment and serve until SIGTERM or SIGINT.

    Raises:
        ConfigError, HandshakeRefused, DeadlineExceeded: one sentence with cause and remedy.
    """
    os.environ |= role.gpu_environment(os.environ)  # before CUDA is first used
    torch.set_num_threads(role.threads)
    if role.cpus:
        os.sched_setaffinity(0, role.cpus)
    deployment = role.deployment
    resolved = resolve(deployment)
    metrics = RoleMetrics(
        "ffn", slots=resolved.slots.ffn_region_slots, max_depth=resolved.contract.max_depth
    )
    metrics_url = ""
    if deployment.metrics.enabled:
        host = deployment.transport.host
        metrics_url = serve_metrics(metrics, host, role.metrics_port).url
    device = torch_device(deployment.ffn.device)
    if device.type != "cpu":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device))  # the default one cannot be captured
    verbs = deployment.transport.verbs_keywords("ffn")
    region = Region(
        resolved.slots.ffn_region_slots,
        resolved.a2f.nbytes,
        name=role.id,
        **region_options(deployment, deployment.ffn.device),
        verbs=VerbsOptions(**verbs) if verbs else None,
    )
    if role.cpus:
        region.set_spin_us(PINNED_SPIN_US)
    control = client_for(role, resolved.contract)
    try:
        generation = control.join(
            addresses=tuple(region.addresses),
            api_url="",
            metrics_url=metrics_url,
            deadline_s=deployment.deadlines.start_s,
        )
        model = _load(role, resolved, metrics)
        loop = FfnLoop(resolved, role.index, region, control, model, metrics)
        _stop_on_signals(loop, region)
        control.on_change(lambda _: region.wake())
        control.set_state("ready")
        kept = f"backend {model.backend_name}, {model.scheme.value} weights"
        logger.info("ready: generation %d, %s", generation, kept)
        with torch.inference_mode():
            loop.run()
        control.leave()
    finally:
        control.close()
        region.close()


def _load(role: RoleSpec, resolved: Resolved, metrics: RoleMetrics) -> FfnModel:
    """This instance's experts, with progress in the log about every two seconds."""
    said = time.monotonic()

    def progress(done: int, total: int, nbytes: int) -> None:
        nonlocal said
        metrics.weights_read_bytes[Weights.EXPERT] = nbytes
        if done == total or time.monotonic() - said > 2.0:
            said = time.monotonic()
            logger.info("experts: %d of %d layers, %.1f MB read", done, total, nbytes / 1e6)

    model = load_ffn_model(
        resolved.deployment.model,
        resolved.family,
        resolved.model,
        instances=resolved.contract.ffn_instances,
        index=role.index,
        backend=resolved.deployment.ffn.backend,
        device=torch_device(resolved.deployment.ffn.device),
        progress=progress,
        weights=resolved.deployment.ffn.weights,
        dummy=resolved.deployment.ffn.load == "dummy",
    )
    metrics.weights_held_bytes[Weights.EXPERT] = model.weight_bytes
    return model


def _stop_on_signals(loop: FfnLoop, region: Region) -> None:
    def stop(_signum: int, _frame: FrameType | None) -> None:
        loop.stopping = True
        region.wake()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
