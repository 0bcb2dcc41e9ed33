"""Start-up and shutdown of an FFN instance (``afd ffn``)."""

import gc
import logging
import os
import signal
import threading
import time
from dataclasses import replace
from functools import partial
from types import FrameType

import torch

from afd.config.resolve import Resolved, region_options, replays, resolve
from afd.config.roles import RoleSpec
from afd.control.connect import client_for
from afd.control.ending import exit_if_refused, exit_now
from afd.control.messages import Members
from afd.control.moves import settled
from afd.devices import device_named
from afd.errors import PeerLost
from afd.host.affinity import bind_process
from afd.host.lent_cores_torch import LentCores
from afd.host.load_progress import loading
from afd.host.logs import PHASE, say_phase
from afd.metrics import at_scrape
from afd.metrics.role import RoleMetrics, Weights
from afd.metrics.server import serve_metrics
from afd.metrics.work import work_of
from afd.topology import PINNED_SPIN_US, FfnPlace
from afd.wire.streams_torch import runtime_of, synchronize, torch_device
from afd_comm import Region, VerbsOptions
from ffn_worker.allreduce.base import Collective
from ffn_worker.allreduce.selection import make_collective
from ffn_worker.call_watchdog import HungCallWatch
from ffn_worker.experts.build import load_ffn_model
from ffn_worker.experts.model import FfnModel
from ffn_worker.experts.shard import DTYPES
from ffn_worker.loop import FfnLoop
from ffn_worker.pool.links import MakeCollective, PoolLinks
from ffn_worker.rank import FfnRank

logger = logging.getLogger("afd.ffn")

_EXIT_GRACE_S = 2.0
"""How long a process may take to end by itself after a rank of its instance is gone, seconds."""


def set_gpu_environment(role: RoleSpec) -> None:
    """Sets the variables of this process that CUDA or HIP read at the first use of the GPU."""
    os.environ |= role.gpu_environment(os.environ)
    # CUDA's most hardware queues: a stream that sends answers should not share one with a stream
    # that waits for requests.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def run_ffn(role: RoleSpec) -> None:
    """Loads this rank's experts, joins the deployment and serves until SIGTERM or SIGINT.

    Raises:
        ConfigError, HandshakeRefused, DeadlineExceeded: the message names cause and remedy.
    """
    set_gpu_environment(role)
    bind_process(role.cpus, "ffn.cpus")
    torch.set_num_threads(role.threads)
    deployment = role.deployment
    resolved = resolve(deployment)
    metrics = RoleMetrics(
        "ffn", slots=resolved.slots.ffn_region_slots, max_depth=resolved.contract.max_depth
    )
    metrics.more += [at_scrape.threads, at_scrape.processor]
    if deployment.transport.verbs.ports:
        verbs_ports = deployment.transport.verbs.ffn_ports or deployment.transport.verbs.ports
        metrics.more.append(partial(at_scrape.rdma_ports, verbs_ports))
    metrics_url = ""
    if deployment.metrics.enabled:
        host = deployment.transport.host
        metrics_url = serve_metrics(metrics, host, role.metrics_port).url
    device = torch_device(deployment.ffn.device)
    runtime_of(device).enter(device)
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
    pool = PoolLinks(resolved, place, control)
    if role.cpus:
        region.set_spin_us(PINNED_SPIN_US)
        if pool.inbox is not None:
            pool.inbox.region.set_spin_us(PINNED_SPIN_US)
    try:
        say_phase(logger, "joining the control plane")
        generation = control.join(
            addresses=tuple(region.addresses),
            order_addresses=pool.addresses,
            api_url="",
            metrics_url=metrics_url,
            deadline_s=deployment.deadlines.start_s,
        )
        control.report_work(lambda: work_of(metrics))
        model = _load(role, resolved, metrics, control.members)
        if device_named(deployment.ffn.device).has_streams:
            say_phase(logger, "compiling kernels")
            _compile(model, resolved)
        pool.meet(_collective(resolved, place), deployment.deadlines.start_s)
        cores = LentCores(role.cpus, role.lent)
        loop = FfnLoop(FfnRank(resolved, region, control, model, pool, metrics, cores))
        _stop_on_signals(loop)
        if replays(deployment, resolved.family) and deployment.ffn.load != "dummy":
            loop.moves.warm_up()
        loop.moves.catch_up()
        control.on_change(lambda members: _on_members(loop, members))
        exit_if_refused(control, lambda reason: None if loop.stopping else exit_now(reason))
        deadlines = deployment.deadlines
        watch = HungCallWatch(
            loop.clock, limit_s=deadlines.stuck_s, first_limit_s=deadlines.start_s
        )
        watch.start(exit_now)
        if replays(deployment, resolved.family):
            say_phase(logger, "capturing graphs")
            loop.capture_graphs()
        gc.freeze()  # a collection of all that was loaded would take a tenth of a second of a step
        control.set_state("ready")
        metrics.ready = True
        logger.info(
            "%sready: generation %d, backend %s, %s weights",
            PHASE,
            generation,
            model.backend_name,
            model.banks.scheme.value,
        )
        with torch.inference_mode():
            loop.run()
        control.leave()
    except PeerLost as error:
        # The other ranks wait for this one to come back, and a normal exit takes seconds with
        # torch in the interpreter.
        control.close()
        exit_now(str(error))
    finally:
        control.close()
        pool.close()
        region.close()


def _load(role: RoleSpec, resolved: Resolved, metrics: RoleMetrics, members: Members) -> FfnModel:
    """Loads the experts that this rank holds now, and shows the progress."""
    attention = resolved.deployment.attention
    places = settled(members, resolved.placement, resolved.model.moe_layers)
    tables = tuple(table for _, table in places.values())
    with loading("experts", logger) as show:

        def progress(done: int, count: int, nbytes: int) -> None:
            metrics.weights_read_bytes[Weights.EXPERT] = nbytes
            show(nbytes, nbytes * count / done)  # layers are alike

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
            backend=resolved.deployment.ffn.backend,
            device=torch_device(resolved.deployment.ffn.device),
            # Readers wait for the disk most of the time.
            threads=min(8, 2 * len(os.sched_getaffinity(0))),
            progress=progress,
            weights=resolved.deployment.ffn.weights,
            dummy=resolved.deployment.ffn.load == "dummy",
            decode_rows=attention.max_num_seqs * attention.capacity,
        )
    metrics.weights_held_bytes[Weights.EXPERT] = model.weight_bytes
    if role.rank == 0:  # all ranks compute the same rows
        metrics.expert_rows = model.banks.expert_rows
    return model


def _compile(model: FfnModel, resolved: Resolved) -> None:
    """Compiles the kernels for batches of all sizes, so that no request waits for a compiler.

    A kernel takes seconds to compile. Most backends choose kernels by the power of two above the
    number of rows. Allocates as much memory as the largest batch needs.
    """
    began = time.monotonic()
    most = resolved.contract.capacity_rows * resolved.slots.attention_ranks
    for rows in sizes_up_to(most):
        model.warm_up(rows, resolved.a2f.tag)
    synchronize(model.device)
    logger.info("kernels compiled in %.1f s", time.monotonic() - began)


def sizes_up_to(most: int) -> list[int]:
    """Returns the powers of two below ``most``, and ``most``."""
    return [*(2**n for n in range((most - 1).bit_length())), most]


def _collective(resolved: Resolved, place: FfnPlace) -> MakeCollective:
    """Returns a function that connects this rank with the others of its instance."""
    ffn, deadlines = resolved.deployment.ffn, resolved.deployment.deadlines

    def make(address: str) -> Collective:
        return make_collective(
            ffn.reduce_backend,
            ffn.reduce,
            place.rank,
            place.tp,
            address,
            torch_device(ffn.device),
            dtype=DTYPES[resolved.model.dtype],
            # The control plane notices a rank that ended or stalls long before this deadline.
            deadline_s=deadlines.ffn_s / 2,
            start_s=deadlines.start_s,
        )

    return make


def _on_members(loop: FfnLoop, members: Members) -> None:
    """Handles a membership change, on the control client's thread.

    The loop ends by itself when a rank of this instance is gone, unless a sum or a stream waits
    for that rank forever. The timer ends the process then.
    """
    loop.wake()
    lost = loop.rank.pool.lost_rank(members)
    if lost is not None and not loop.stopping:
        timer = threading.Timer(_EXIT_GRACE_S, lambda: None if loop.stopping else exit_now(lost))
        timer.daemon = True
        timer.start()


def _stop_on_signals(loop: FfnLoop) -> None:
    def stop(_signum: int, _frame: FrameType | None) -> None:
        loop.stopping = True
        loop.wake()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
