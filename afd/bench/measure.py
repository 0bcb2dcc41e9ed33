"""Runs the workload of `afd bench identity` on one server and collects what it answered."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from afd.bench.agreement import Forced, Position, score
from afd.bench.cases import MAX_LOGPROBS, SETTINGS, Case, deployment, vllm_args
from afd.bench.servers import Server, colocated, disaggregated
from afd.bench.workload import Answer, Request, reordered, run, run_sequentially
from afd.errors import AfdError
from afd.launch.plan import available_cores

START_S = 600.0
_SETTLE_S = 0.3  # the depth reaches the instances with the next message of the control plane
_WHOLE_VOCABULARY = 4  # texts scored over all tokens: the shortest ones, it is slow

Scores = list[list[Position]]


@dataclass(frozen=True)
class Workload:
    """Two request sets (afd/bench/workload.py), run one after the other. The first one is also run
    one by one, and its texts are scored."""

    mixed: tuple[Request, ...]
    followers: tuple[Request, ...]

    def reordered(self) -> "Workload":
        return Workload(reordered(self.mixed, seed=1), self.followers)


@dataclass(frozen=True)
class Counters:
    """Totals of a server since its start, over all of its attention instances.

    preemptions: requests. prefix_hits: prompt tokens found in the prefix cache. steps: engine steps
    by number of micro-batches; empty for colocated vLLM.
    """

    preemptions: int
    prefix_hits: int
    steps: dict[int, int]


@dataclass(frozen=True)
class Run:
    """One pass of the workload: answers in its order, first the mixed set's.

    one_by_one: the mixed set's when requests come one at a time. top, whole: distributions over the
    reference's continuations, by their likeliest tokens and by all. Empty where not taken.
    """

    answers: list[Answer]
    one_by_one: list[Answer]
    top: Scores
    whole: Scores


@dataclass(frozen=True)
class Measured:
    """runs: by depth; the reference has a first pass (1) and one in another order (2). float32: a
    reference's distributions over the continuations of the float32 reference, if there is one."""

    runs: dict[int, Run]
    counters: Counters
    float32: tuple[Scores, Scores] | None = None


def measure_reference(
    case: Case,
    model: Path,
    workload: Workload,
    float32: Callable[[], Measured] | None,
) -> Measured:
    """Colocated vLLM, twice: the second time arrivals, and the batches of scored texts, differ.

    Args:
        float32: the reference in float32, if this is another dtype and that one runs too.
    """
    with colocated(
        model.absolute(),
        dtype=case.dtype,
        cpus=available_cores()[-1:],  # one thread, like every instance of ours on two cores
        max_model_len=int(SETTINGS["max_model_len"]),
        max_num_seqs=int(SETTINGS["max_num_seqs"]),
        max_num_batched_tokens=int(SETTINGS["max_num_batched_tokens"]),
        kv_cache_gib=SETTINGS["kv_cache_gib"],
        vllm_args=vllm_args(1),
        deadline_s=START_S,
    ) as server:
        first = _pass(server, case, workload, "first")
        again = workload.reordered()
        second = _pass(server, case, again, "second", at_once=True, texts_of=first.answers)
        counters = read_counters(server.metrics())
        scores = None
        if float32 is not None:
            scores = _scores(server, forced(workload, float32().runs[1].answers))
        elif not case.scored:
            scores = _scores(server, forced(workload, first.answers))
        return Measured({1: first, 2: second}, counters, scores)


def measure(
    case: Case,
    model: Path,
    workload: Workload,
    depths: Sequence[int],
    reference: Callable[[], Measured],
) -> Measured:
    """One deployment at each depth; ``reference`` is called once the deployment is up.

    Raises:
        AfdError: it did not start, or a depth was asked for and no step ran at it.
    """
    config = deployment(case, model, max(depths))
    with disaggregated(config, deadline_s=START_S) as server:
        expected = reference().runs[1].answers if case.scored else None
        runs = {}
        for depth in depths:
            server.set_depth(depth)
            time.sleep(_SETTLE_S)
            before = read_counters(server.metrics()).steps
            in_full = depth == max(depths)  # what takes long is done once
            salt = f"depth{depth}"
            runs[depth] = _pass(server, case, workload, salt, texts_of=expected, in_full=in_full)
            check_depth(before, read_counters(server.metrics()).steps, depth)
        return Measured(runs, read_counters(server.metrics()))


def _pass(
    server: Server,
    case: Case,
    workload: Workload,
    salt: str,
    *,
    at_once: bool = False,
    texts_of: Sequence[Answer] | None = None,
    in_full: bool = True,
) -> Run:
    """at_once: score all texts together. texts_of: answers whose tokens are scored, this pass's own
    if None. in_full: also one by one, and over the whole vocabulary."""
    url, name = server.url, server.model
    answers = run(url, name, workload.mixed, salt=salt)
    answers += run(url, name, workload.followers, salt=salt)
    if not case.scored:
        return Run(answers, [], [], [])
    texts = forced(workload, texts_of or answers)
    if not in_full:
        return Run(answers, [], score(url, name, texts, at_once=at_once), [])
    top, whole = _scores(server, texts, at_once=at_once)
    alone = run_sequentially(url, name, workload.mixed, salt=f"{salt} alone")
    return Run(answers, alone, top, whole)


def _scores(server: Server, texts: list[Forced], *, at_once: bool = False) -> tuple[Scores, Scores]:
    """By the likeliest tokens on all texts, and by the whole vocabulary on the shortest ones."""
    short = sorted(texts, key=lambda text: len(text.prompt))[:_WHOLE_VOCABULARY]
    top = score(server.url, server.model, texts, at_once=at_once)
    whole = score(server.url, server.model, short, top=MAX_LOGPROBS, at_once=at_once)
    return top, whole


def forced(workload: Workload, answers: Sequence[Answer]) -> list[Forced]:
    """Each prompt of the mixed set with its greedy continuation."""
    pairs = zip(workload.mixed, answers, strict=False)  # the followers' answers come after
    return [Forced(request.prompt, answer.tokens) for request, answer in pairs]


def read_counters(exposition: str) -> Counters:
    """The counters of all attention instances in a Prometheus exposition."""
    preemptions = prefix_hits = 0
    steps: dict[int, int] = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            count = int(sample.value) if sample.name.endswith("_total") else 0
            if sample.name == "vllm:num_preemptions_total":
                preemptions += count
            elif sample.name == "vllm:prefix_cache_hits_total":
                prefix_hits += count
            elif sample.name == "afd_steps_total" and sample.labels["instance"].startswith("att"):
                depth = int(sample.labels["depth"])
                steps[depth] = steps.get(depth, 0) + count
    return Counters(preemptions, prefix_hits, steps)


def check_depth(before: dict[int, int], after: dict[int, int], depth: int) -> None:
    """Raises AfdError unless steps ran at ``depth``, and none deeper, between two readings."""
    ran = {d: count - before.get(d, 0) for d, count in after.items()}
    deeper = sum(count for d, count in ran.items() if d > depth)
    if ran.get(depth, 0) == 0 or deeper:
        raise AfdError(
            f"depth {depth} was set, but steps ran as {ran} (by depth); the runtime depth did not"
            " reach the attention instances"
        )
