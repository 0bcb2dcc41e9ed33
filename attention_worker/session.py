"""Life of an attention instance inside a deployment: join, serve, leave."""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator

from torch import nn
from vllm.config import VllmConfig

from afd.control.client import ControlClient
from afd.control.connect import client_for
from afd.control.work import work_of
from afd.decode_steps import DecodeSteps
from afd.depth import AUTO, depth_of
from afd.errors import AfdError
from afd.metrics import RoleMetrics, Weights
from afd.metrics_server import MetricsServer, serve_metrics
from afd.resolve import Resolved, region_options, resolve
from afd.roles import RoleSpec, load_role
from afd.topology import PINNED_SPIN_US
from afd.wire.streams_torch import make_streams, torch_device
from afd_comm import Region, VerbsOptions
from attention_worker.graphs import StepGraphs
from attention_worker.remote import RemoteExperts
from attention_worker.stream import StreamExperts

logger = logging.getLogger("afd.attention")


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Say what went wrong in one line before vLLM wraps it in its own traceback."""
    try:
        yield
    except AfdError as error:
        print(f"afd: error: {error}", file=sys.stderr, flush=True)
        raise


class AttentionSession:
    """Membership, transport and metrics of this process, made from its role file."""

    def __init__(
        self,
        role: RoleSpec,
        resolved: Resolved,
        control: ControlClient,
        region: Region,
        remote: RemoteExperts,
        metrics: RoleMetrics,
        scraper: MetricsServer | None,
    ) -> None:
        self._role = role
        self._resolved = resolved
        self._control = control
        self._region = region
        self._metrics = metrics
        self._scraper = scraper
        self._configured = AUTO if role.deployment.pipeline.depth == "auto" else self.max_depth
        self.remote = remote

    @classmethod
    def join(cls) -> "AttentionSession":
        """Register with the control plane; a mismatch with the FFN instances is refused here.

        Raises:
            HandshakeRefused, DeadlineExceeded: see :class:`afd.control.client.ControlClient`.
        """
        role = load_role()
        deployment = role.deployment
        resolved = resolve(deployment)
        metrics = RoleMetrics(
            "attention",
            slots=resolved.slots.attention_region_slots,
            max_depth=resolved.contract.max_depth,
        )
        scraper = (
            serve_metrics(metrics, deployment.transport.host, role.metrics_port)
            if deployment.metrics.enabled
            else None
        )
        verbs = deployment.transport.verbs_keywords("attention")
        region = Region(
            resolved.slots.attention_region_slots,
            resolved.f2a.nbytes,
            name=role.id,
            **region_options(deployment, deployment.attention.device),
            verbs=VerbsOptions(**verbs) if verbs else None,
        )
        if role.cpus:
            region.set_spin_us(PINNED_SPIN_US)
        control = client_for(role, resolved.contract)
        metrics.decode_depths = lambda: control.members.depths
        generation = control.join(
            addresses=tuple(region.addresses),
            api_url=f"http://{deployment.attention.host}:{role.api_port}",
            metrics_url=scraper.url if scraper else "",
            deadline_s=deployment.deadlines.start_s,
        )
        control.report_work(lambda: work_of(metrics))
        remote = RemoteExperts(resolved, role.index, region, control, metrics)
        logger.info("%s joined as generation %d (pid %d)", role.id, generation, os.getpid())
        return cls(role, resolved, control, region, remote, metrics, scraper)

    def serve(self, model: nn.Module) -> None:
        """Attach the loaded model and wait for the FFN instances: vLLM's warm-up calls them."""
        self._metrics.weights_read_bytes[Weights.ATTENTION] = model.weight_bytes_read
        self._metrics.weights_held_bytes[Weights.ATTENTION] = model.weight_bytes_held
        logger.info(
            "attention weights: read %.1f MB, hold %.1f MB; no expert weights",
            model.weight_bytes_read / 1e6,
            model.weight_bytes_held / 1e6,
        )
        self.remote.connect(self._resolved.deployment.deadlines.start_s)
        model.attach(self.remote, self._resolved.model.moe_layers)
        self._control.set_state("ready")

    def graphs(self, model: nn.Module, config: VllmConfig) -> StepGraphs:
        """The attached model, with its decode steps replayed as graphs."""
        device = torch_device(self._resolved.deployment.attention.device)
        streams = make_streams(device)
        return StepGraphs(
            model,
            config,
            self.remote,
            StreamExperts(self._resolved, self._role.index, self._region, streams),
            self._region,
            streams,
            self._metrics,
            self._resolved.deployment.deadlines.ffn_s,
            self._resolved.deployment.metrics.stage_every,
            self._resolved.deployment.pipeline.lookahead,
        )

    @property
    def max_depth(self) -> int:
        return self._resolved.contract.max_depth

    def depth(self, rows: int, *, decode: bool) -> int:
        """Most micro-batches of a step of ``rows`` rows: the operator's run-time setting, else the
        configured one. decode: every request has one row; of other steps no depth is measured.
        """
        members = self._control.members
        wanted = self._configured if members.depth is None else members.depth
        if wanted == AUTO:
            return depth_of(members.depths, rows, self.max_depth) if decode else self.max_depth
        return min(wanted, self.max_depth)

    @property
    def steps(self) -> DecodeSteps:
        return self._metrics.decode_steps

    @property
    def min_rows(self) -> int:
        return self._resolved.deployment.pipeline.min_rows

    def close(self) -> None:
        """Say goodbye and free the transport; idempotent."""
        self._control.leave()
        self._control.close()
        self.remote.close()
        if self._scraper:
            self._scraper.close()
