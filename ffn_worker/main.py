"""Start-up and shutdown of an FFN instance (``afd ffn``)."""

import logging
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from types import FrameType
from typing import NoReturn

import torch

from afd.affinity import bind_process
from afd.control.connect import client_for
from afd.control.messages import Members
from afd.control.moves import settled
from afd.control.work import work_of
from afd.errors import PeerLost
from afd.metrics import RoleMetrics, Weights
from afd.metrics_server import serve_metrics
from afd.resolve import Resolved, region_options, resolve
from afd.roles import RoleSpec
from afd.topology import PINNED_SPIN_US, FfnPlace
from afd.wire.streams_torch import settle, torch_device
from afd_comm import Region, VerbsOptions
from ffn_worker.allreduce.base import Collective
from ffn_worker.allreduce.registry import make_collective
from ffn_worker.loader import DTYPES
from ffn_worker.loop import FfnLoop
from ffn_worker.model import FfnModel, load_ffn_model
from ffn_worker.ranks import MakeCollective, Ranks
from ffn_worker.stuck import CallWatch

logger = logging.getLogger("afd.ffn")

_STUCK_S = 2.0
"""How long a process may take to end by itself after a rank of its instance is lost, seconds."""


def run_ffn(role: RoleSpec) -> None:
    """Load this instance's experts, join the deployment and serve until SIGTERM or SIGINT.

    Raises:
        ConfigError, HandshakeRefused, DeadlineExceeded: one sentence with cause and remedy.
    """
    os.environ |= role.gpu_environment(os.environ)  # before CUDA is first used
    bind_process(role.cpus, "ffn.cpus")
    torch.set_num_threads(role.threads)
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
    control = client_for(role, resolved.contract)
    tp = resolved.contract.ffn_tp
    place = FfnPlace(role.index, role.rank, resolved.contract.ffn_instances, tp)
    ranks = Ranks(resolved, place, control)
    if role.cpus:
        region.set_spin_us(PINNED_SPIN_US)
        if ranks.box is not None:
            ranks.box.region.set_spin_us(PINNED_SPIN_US)
    try:
        generation = control.join(
            addresses=tuple(region.addresses),
            order_addresses=ranks.addresses,
            api_url="",
            metrics_url=metrics_url,
            deadline_s=deployment.deadlines.start_s,
        )
        control.report_work(lambda: work_of(metrics))
        model = _load(role, resolved, metrics, control.members)
        if model.device.type != "cpu":
            _compile(model, resolved)
        ranks.meet(_collective(resolved, place), deployment.deadlines.start_s)
        loop = FfnLoop(resolved, region, control, model, ranks, metrics)
        _stop_on_signals(loop)
        loop.moves.catch_up()
        control.on_change(lambda members: _follow(loop, ranks, members))
        deadlines = deployment.deadlines
        watch = CallWatch(loop.clock, stuck_s=deadlines.stuck_s, first_s=deadlines.start_s)
        watch.start(_end_now)
        control.set_state("ready")
        kept = f"backend {model.backend_name}, {model.scheme.value} weights"
        logger.info("ready: generation %d, %s", generation, kept)
        with torch.inference_mode():
            loop.run()
        control.leave()
    except PeerLost as error:
        # The other ranks wait for this one to come back, and taking an interpreter with torch in
        # it apart takes seconds.
        control.close()
        _end_now(str(error))
    finally:
        control.close()
        ranks.close()
        region.close()


def _load(role: RoleSpec, resolved: Resolved, metrics: RoleMetrics, members: Members) -> FfnModel:
    """This rank's experts by now, with progress in the log about every two seconds."""
    said = time.monotonic()

    def progress(done: int, total: int, nbytes: int) -> None:
        nonlocal said
        metrics.weights_read_bytes[Weights.EXPERT] = nbytes
        if done == total or time.monotonic() - said > 2.0:
            said = time.monotonic()
            logger.info("experts: %d of %d layers, %.1f MB read", done, total, nbytes / 1e6)

    places = settled(members, resolved.placement, resolved.model.moe_layers)
    tables = tuple(table for _, table in places.values())
    model = load_ffn_model(
        resolved.deployment.model,
        resolved.family,
        resolved.model,
        instances=resolved.contract.ffn_instances,
        index=role.index,
        tp=resolved.contract.ffn_tp,
        rank=role.rank,
        placement=replace(resolved.placement, tables=tables),
        banks={layer: bank for layer, (bank, _) in places.items()},
        shared_by_rows=resolved.shared_by_rows,
        movable=resolved.contract.movable,
        backend=resolved.deployment.ffn.backend,
        device=torch_device(resolved.deployment.ffn.device),
        progress=progress,
        weights=resolved.deployment.ffn.weights,
        dummy=resolved.deployment.ffn.load == "dummy",
    )
    metrics.weights_held_bytes[Weights.EXPERT] = model.weight_bytes
    if role.rank == 0:  # the others compute the same rows
        metrics.expert_rows = model.expert_rows
    return model


def _compile(model: FfnModel, resolved: Resolved) -> None:
    """Have the kernels compiled, seconds each, that batches of any size take: most backends choose
    by the power of two of the rows, and do it when a kernel is first called, where a request would
    wait for it. Takes the memory that the largest batch takes."""
    began = time.monotonic()
    most = resolved.contract.capacity_rows * resolved.deployment.attention.instances
    for rows in sizes_up_to(most):
        model.warm_up(rows, resolved.a2f.tag)
    settle(model.device)
    logger.info("kernels compiled in %.1f s", time.monotonic() - began)


def sizes_up_to(most: int) -> list[int]:
    """The powers of two below ``most``, and ``most``."""
    return [*(2**n for n in range((most - 1).bit_length())), most]


def _collective(resolved: Resolved, place: FfnPlace) -> MakeCollective:
    """How this rank adds up with the others of its instance, once their address is known."""
    ffn, deadlines = resolved.deployment.ffn, resolved.deployment.deadlines

    def make(address: str) -> Collective:
        return make_collective(
            "auto",
            ffn.reduce,
            place.rank,
            place.tp,
            address,
            torch_device(ffn.device),
            dtype=DTYPES[resolved.model.dtype],
            # The control plane notices one that ended or stands still long before.
            deadline_s=deadlines.ffn_s / 2,
            start_s=deadlines.start_s,
        )

    return make


def _follow(loop: FfnLoop, ranks: Ranks, members: Members) -> None:
    """A membership change, on the control client's thread.

    The loop ends by itself when a rank of this instance is lost, unless it is inside of a sum or
    behind a stream that waits for that rank for good.
    """
    loop.wake()
    lost = ranks.lost_rank(members)
    if lost is not None and not loop.stopping:
        timer = threading.Timer(_STUCK_S, lambda: None if loop.stopping else _end_now(lost))
        timer.daemon = True
        timer.start()


def _end_now(reason: str) -> NoReturn:
    print(f"afd: error: {reason}", file=sys.stderr, flush=True)
    os._exit(1)


def _stop_on_signals(loop: FfnLoop) -> None:
    def stop(_signum: int, _frame: FrameType | None) -> None:
        loop.stopping = True
        loop.wake()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
