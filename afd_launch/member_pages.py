"""What every member of a deployment did between two scrapes of its metrics pages."""

from __future__ import annotations

import logging
import time
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from afd.control.messages import Member

logger = logging.getLogger("afd.pages")

_ANSWER_S = 5.0  # a member without a core answers late
_OWN_STAGE = {"attention": "attention", "ffn": "ffn"}
# Sample name -> labels that stay in the key; others are summed over.
_WANTED: dict[str, tuple[str, ...]] = {
    "afd_stage_seconds_sum": ("stage",),
    "afd_stage_seconds_count": ("stage",),
    "afd_stage_budget_seconds": ("stage",),
    "afd_wire_seconds_sum": ("path", "peer"),
    "afd_wire_seconds_count": ("path", "peer"),
    "afd_bubble_seconds_total": (),
    "afd_step_thread_seconds_total": ("state",),
    "afd_expert_rows_total": (),
    "afd_wire_bytes_total": (),
    "afd_decode_steps_total": (),
    "afd_decode_step_seconds_total": (),
    "vllm:generation_tokens_total": (),
    "vllm:num_requests_running": (),
    "vllm:num_requests_waiting": (),
    "vllm:kv_cache_usage_perc": (),
}

Samples = Mapping[tuple[str, ...], float]
"""Values by sample name and the labels of ``_WANTED``, in that order."""


@dataclass(frozen=True)
class Page:
    """The samples of one member at one moment. moment: time.monotonic(). host: "" if unnamed."""

    member: str
    role: str
    host: str
    state: str
    moment: float
    samples: Samples


@dataclass(frozen=True)
class Mean:
    """Observations of a duration: their number and their total, seconds."""

    count: float = 0.0
    total: float = 0.0

    @property
    def seconds(self) -> float:
        """The mean; 0 without observations."""
        return self.total / self.count if self.count else 0.0


@dataclass(frozen=True)
class Work:
    """What one member did.

    stage: its own stage, per micro-batch and layer. wire: messages from each peer to it. load:
    expert rows (FFN) or bytes sent (attention) per micro-batch. waited: share of its time in
    which the thread that runs the steps was ready but had no core, 0 to 1. queued: the same in
    seconds per micro-batch and layer. bubble: share of a step in which it waited for
    peers, 0 to 1. budget_s: of its stage; None without a target. step_s: mean time of a decode
    step. tokens_per_s, running, queue, kv: of vLLM.
    """

    member: str
    role: str
    host: str = ""
    state: str = "ready"
    stage: Mean = field(default=Mean())
    wire: Mapping[str, Mean] = field(default_factory=dict)
    load: float = 0.0
    waited: float = 0.0
    queued: float = 0.0
    bubble: float = 0.0
    budget_s: float | None = None
    step_s: float = 0.0
    tokens_per_s: float = 0.0
    running: float = 0.0
    queue: float = 0.0
    kv: float = 0.0


def read_pages(members: Sequence[Member]) -> dict[str, Page]:
    """Fetches the pages of all members with one, in parallel. Members that do not answer are
    absent."""
    wanted = [m for m in members if m.role in _OWN_STAGE and m.metrics_url]
    with ThreadPoolExecutor(max(1, min(32, len(wanted)))) as pool:
        pages = pool.map(_read, wanted)
    return {page.member: page for page in pages if page is not None}


def _read(member: Member) -> Page | None:
    urls = [member.metrics_url]
    if member.api_url:
        urls.append(f"{member.api_url}/metrics")
    try:
        texts = []
        for url in urls:
            with urllib.request.urlopen(url, timeout=_ANSWER_S) as answer:
                texts.append(answer.read().decode())
    except OSError as error:
        logger.warning("the metrics page of %s did not answer: %s", member.id, error)
        return None
    moment = time.monotonic()
    samples = parsed("\n".join(texts).splitlines())
    return Page(member.id, member.role, member.host, member.state, moment, samples)


def parsed(lines: Iterable[str]) -> dict[tuple[str, ...], float]:
    """Sums the wanted samples of a Prometheus page. Skips the thousands of lines of the others."""
    from prometheus_client.parser import text_string_to_metric_families

    kept = [line for line in lines if line.partition("{")[0].partition(" ")[0] in _WANTED]
    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families("\n".join(kept) + "\n"):
        for sample in family.samples:
            labels = tuple(sample.labels.get(name, "") for name in _WANTED[sample.name])
            key = (sample.name, *labels)
            found[key] = found.get(key, 0.0) + sample.value
    return found


def works(before: Mapping[str, Page], after: Mapping[str, Page]) -> list[Work]:
    """Returns what each member did between two readings, by member id. A member that restarted
    meanwhile counts from its start."""
    budgets = {
        key[1]: value
        for page in after.values()
        for key, value in page.samples.items()
        if key[0] == "afd_stage_budget_seconds"
    }
    return [
        _work(before.get(name, page), page, budgets.get(_OWN_STAGE[page.role]))
        for name, page in sorted(after.items())
    ]


def _work(before: Page, after: Page, budget_s: float | None) -> Work:
    restarted = any(
        before.samples.get(key, 0.0) > value
        for key, value in after.samples.items()
        if key[0].endswith(("_total", "_sum", "_count"))
    )

    def moved(*key: str) -> float:
        then = 0.0 if restarted else before.samples.get(key, 0.0)
        return after.samples.get(key, 0.0) - then

    def mean(name: str, *labels: str) -> Mean:
        return Mean(moved(f"{name}_count", *labels), moved(f"{name}_sum", *labels))

    stage = mean("afd_stage_seconds", _OWN_STAGE[after.role])
    peers = {key[2] for key in after.samples if key[:2] == ("afd_wire_seconds_count", "inbound")}
    loads = "afd_expert_rows_total" if after.role == "ffn" else "afd_wire_bytes_total"
    ran = moved("afd_step_thread_seconds_total", "running")
    waited = moved("afd_step_thread_seconds_total", "waiting")
    bubble = moved("afd_bubble_seconds_total")
    steps = moved("afd_decode_steps_total")
    now = after.samples
    return Work(
        after.member,
        after.role,
        after.host,
        after.state,
        stage,
        {peer: mean("afd_wire_seconds", "inbound", peer) for peer in sorted(peers)},
        moved(loads) / stage.count if stage.count else 0.0,
        waited / (ran + waited) if ran + waited else 0.0,
        waited / stage.count if stage.count else 0.0,
        bubble / (bubble + stage.total) if bubble + stage.total else 0.0,
        budget_s,
        moved("afd_decode_step_seconds_total") / steps if steps else 0.0,
        moved("vllm:generation_tokens_total") / max(after.moment - before.moment, 1e-9),
        now.get(("vllm:num_requests_running",), 0.0),
        now.get(("vllm:num_requests_waiting",), 0.0),
        now.get(("vllm:kv_cache_usage_perc",), 0.0),
    )
