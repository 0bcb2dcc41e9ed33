"""The life of an attention instance in a deployment: join, serve, leave. Imports no vLLM."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

from afd.config.resolve import Resolved, region_options, resolve
from afd.config.roles import RoleSpec, load_role
from afd.control.client import ControlClient
from afd.control.connect import client_for
from afd.control.ending import exit_if_refused
from afd.depth import AUTO, depth_of, prompt_depth
from afd.devices import device_named
from afd.errors import AfdError
from afd.host.lent_cores_torch import LentCores
from afd.host.logs import say_phase
from afd.metrics import at_scrape
from afd.metrics.decode_steps import DecodeSteps
from afd.metrics.role import RoleMetrics, Weights
from afd.metrics.server import MetricsServer, serve_metrics
from afd.metrics.work import work_of
from afd.models import Family
from afd.topology import PINNED_SPIN_US
from afd.wire.streams_torch import make_streams, runtime_of, torch_device
from afd_comm import Region, VerbsOptions
from attention_worker.draft_layer import DraftExperts
from attention_worker.fused import Wanted
from attention_worker.ranks import Ranks
from attention_worker.remote.host import RemoteExperts
from attention_worker.remote.launch_ahead import LaunchAhead
from attention_worker.remote.observer import ReplayObserver
from attention_worker.remote.replay_guard import ReplayGuard, ReplaySettings
from attention_worker.remote.stream import StreamExperts
from attention_worker.step_spans import StepRequests, StepSpans

if TYPE_CHECKING:
    from prometheus_client.core import Metric

logger = logging.getLogger("afd.attention")


class AttentionModel(Protocol):
    """The loaded model.

    See :func:`attention_worker.vllm_hooks.model.disaggregated` and
    :func:`attention_worker.vllm_hooks.split.split`.
    """

    weight_bytes_read: int
    weight_bytes_held: int

    def attach(self, remote: DraftExperts, moe_layers: tuple[int, ...]) -> None: ...


@contextlib.contextmanager
def reported() -> Iterator[None]:
    """Prints an error of ours in one line, before vLLM wraps it in its own traceback."""
    try:
        yield
    except AfdError as error:
        print(f"afd: error: {error}", file=sys.stderr, flush=True)
        raise


def _read_at_scrape(resolved: Resolved) -> list[Callable[[], Iterable[Metric]]]:
    deployment = resolved.deployment
    found: list[Callable[[], Iterable[Metric]]] = [at_scrape.threads, at_scrape.processor]
    if deployment.transport.verbs.ports:
        found.append(partial(at_scrape.rdma_ports, deployment.transport.verbs.ports))
    if deployment.pipeline.tpot_ms is not None:
        layers, depth = len(resolved.model.step_layers), resolved.contract.max_depth
        target_s = deployment.pipeline.tpot_ms / 1e3
        found.append(partial(at_scrape.budget, target_s, layers, depth))
    return found


class AttentionInstance:
    """Registration, transport and metrics of this process, made from its role file.

    Attributes:
        remote: the remote experts in host form.
        cores: of this rank and, while the experts wait, of the FFN instance.
        requests: notes which traced requests a step serves; None: steps are not traced.
    """

    def __init__(
        self,
        role: RoleSpec,
        resolved: Resolved,
        control: ControlClient,
        region: Region,
        metrics: RoleMetrics,
        scraper: MetricsServer | None,
        ranks: Ranks,
    ) -> None:
        """role: of this rank."""
        self._role = role
        self._ranks = ranks
        self._resolved = resolved
        self._control = control
        self._region = region
        self._metrics = metrics
        self._scraper = scraper
        self._configured = AUTO if role.deployment.depth == "auto" else self.max_depth
        self._experts_on_gpu = role.deployment.ffn.device != "cpu"
        self.cores = LentCores(role.cpus, role.lent)
        self.remote = RemoteExperts(resolved, role.number, region, control, metrics)
        attention, ahead = role.deployment.attention, role.deployment.pipeline.lookahead
        if ahead and attention.tp == 1 and device_named(attention.device).has_streams:
            device = torch_device(attention.device)
            enter = partial(runtime_of(device).enter, device)
            self.remote.launch_ahead(LaunchAhead(region, make_streams(device), enter))
        traced = role.deployment.metrics
        self.requests: StepRequests | None = None
        self._spans: StepSpans | None = None
        if traced.otlp is not None and traced.stage_every and not role.rank:
            self.requests = StepRequests()
            self._spans = StepSpans.start(traced.otlp, role.id, metrics, self.requests)

    @classmethod
    def join(cls, ranks: Ranks) -> AttentionInstance:
        """Registers with the control plane, which refuses a contract unlike the FFN instances'.

        Each rank is a member of its own, with its own slots. Rank 0 has the API, and reports.

        Raises:
            HandshakeRefused, DeadlineExceeded: see :class:`afd.control.client.ControlClient`.
        """
        role = replace(load_role(), rank=ranks.rank)
        deployment = role.deployment
        resolved = resolve(deployment)
        metrics = RoleMetrics(
            "attention",
            slots=resolved.slots.attention_region_slots,
            max_depth=resolved.contract.max_depth,
        )
        metrics.more = _read_at_scrape(resolved)
        scraper = (
            serve_metrics(metrics, deployment.transport.host, 0 if role.rank else role.metrics_port)
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
        say_phase(logger, "joining the control plane")
        generation = control.join(
            addresses=tuple(region.addresses),
            api_url="" if role.rank else f"http://{deployment.attention.host}:{role.api_port}",
            metrics_url=scraper.url if scraper else "",
            deadline_s=deployment.deadlines.start_s,
        )
        if not role.rank:
            control.report_work(lambda: work_of(metrics))
        exit_if_refused(control)
        instance = cls(role, resolved, control, region, metrics, scraper, ranks)
        logger.info("%s joined as generation %d (pid %d)", role.id, generation, os.getpid())
        say_phase(logger, "building the model")
        return instance

    def serve(self, model: AttentionModel, draft: AttentionModel | None = None) -> None:
        """Connects the loaded models and waits for the FFN instances: vLLM's warm-up calls them.

        draft: the model of the draft layers; None: there is none.

        Raises:
            DeadlineExceeded: names the FFN ranks that are not ready in ``deadlines.start_s``.
        """
        models = [model] if draft is None else [model, draft]
        read = sum(m.weight_bytes_read for m in models)
        held = sum(m.weight_bytes_held for m in models)
        self._metrics.weights_read_bytes[Weights.ATTENTION] = read
        self._metrics.weights_held_bytes[Weights.ATTENTION] = held
        logger.info(
            "attention weights: read %.1f MB, hold %.1f MB; no expert weights",
            read / 1e6,
            held / 1e6,
        )
        if self._resolved.family.split:
            logger.info(
                "%s runs split, at depth 1, so attention waits for every expert call: %s",
                self._resolved.model.architecture,
                self._resolved.family.split,
            )
        say_phase(logger, "connecting to the FFN instances")
        self.remote.connect(self._resolved.deployment.deadlines.start_s)
        shape, experts = self._resolved.model, self._ranks.experts(self.remote)
        model.attach(experts, shape.step_layers)
        if draft is not None:
            draft.attach(experts, shape.draft_layers)
        say_phase(logger, "finishing vLLM's start")
        self._control.set_state("ready")
        self._metrics.ready = True

    def stream_form(self) -> tuple[StreamExperts, ReplayGuard]:
        """Returns the remote experts in stream form, and the guard of the steps replayed with
        them."""
        deployment = self._resolved.deployment
        device = torch_device(deployment.attention.device)
        streams, runtime = make_streams(device), runtime_of(device)
        # Draft layers run, message by message, once the step has ended.
        lookahead = deployment.pipeline.lookahead and deployment.attention.speculation is None
        guard = ReplayGuard(
            ReplaySettings(deployment.deadlines.ffn_s, lookahead),
            self.remote,
            self._region,
            streams,
            ReplayObserver(self._metrics, deployment.metrics.stage_every, runtime.step_timer()),
            partial(runtime.enter, device),
        )
        number, slots = self._role.number, self.remote.expert_slots
        return StreamExperts(self._resolved, number, self._region, streams, slots), guard

    @property
    def rank(self) -> int:
        """Own number among the ranks of the instance."""
        return self._role.rank

    @property
    def family(self) -> Family:
        return self._resolved.family

    @property
    def wanted_fusion(self) -> Wanted:
        """What the deployment asks of the fused kernels (:mod:`attention_worker.fused`)."""
        resolved, attention = self._resolved, self._resolved.deployment.attention
        return Wanted(
            attention.fused,
            resolved.a2f.tag,
            resolved.model.hidden,
            self._ranks.count,
            scales_measured="--calculate-kv-scales" in attention.vllm_args,
        )

    @property
    def max_depth(self) -> int:
        return self._resolved.contract.max_depth

    def depth(self, rows: int, *, decode: bool) -> int:
        """Returns the largest number of micro-batches for a step of ``rows`` rows: on every rank
        that of rank 0, because the ranks hear of a change at different times.

        A depth that the operator has fixed at run time wins over the configured one. Otherwise
        steps with prompts follow :func:`afd.depth.prompt_depth` on GPUs and have one micro-batch
        where the sides lend each other cores, and with ``auto`` decode steps use the measured best
        depth.

        Args:
            decode: every request has one row, or one and its drafts.
        """
        members, most = self._control.members, self.max_depth
        wanted = self._configured if members.depth is None else members.depth
        if not decode and not members.depth:
            wanted = self._prompt_depth(rows, wanted or most)
        elif wanted == AUTO:
            wanted = depth_of(members.depths, rows, most)
        return self._ranks.agree(min(wanted, most))

    def _prompt_depth(self, rows: int, most: int) -> int:
        if self.cores.any:
            return 1
        if self._experts_on_gpu:
            model = self._resolved.model
            return prompt_depth(rows, model.num_experts, model.top_k, most)
        return most

    def ran_eagerly(self, reason: str) -> None:
        """A step ran without a graph although graphs are on."""
        counts = self._metrics.eager_steps
        counts[reason] = counts.get(reason, 0) + 1

    @property
    def steps(self) -> DecodeSteps:
        """Durations of decode steps."""
        return self._metrics.decode_steps

    @property
    def min_rows(self) -> int:
        """Smallest number of rows of a micro-batch: ``pipeline.min_rows``."""
        return self._resolved.deployment.pipeline.min_rows

    def close(self) -> None:
        """Leaves the deployment and frees the transport. May be called again."""
        self._control.leave()
        self._control.close()
        if self._spans:
            self._spans.close()
        self.remote.close()
        if self._scraper:
            self._scraper.close()
