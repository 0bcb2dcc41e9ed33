"""Runs the workload of `afd bench identity` on one server and collects its answers."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from afd.errors import AfdError
from afd.texts import Forced
from afd_bench.agreement import Position, score
from afd_bench.cases import MAX_LOGPROBS, SETTINGS, Case, deployment, vllm_args
from afd_bench.servers import Server, colocated, disaggregated
from afd_bench.workload import Answer, Request, reordered, run, run_sequentially
from afd_launch.roles_of_host import available_cores

START_S = 600.0
_PROPAGATION_S = 0.3  # until the instances have received a new depth
_WHOLE_VOCABULARY = 4  # texts scored over all tokens, which is slow: only the shortest ones

Scores = list[list[Position]]


@dataclass(frozen=True)
class Workload:
    """Two request sets (afd_bench/workload.py), run in order.

    The mixed set is also run one request at a time, and its texts are scored.
    """

    mixed: tuple[Request, ...]
    followers: tuple[Request, ...]

    def reordered(self) -> "Workload":
        return Workload(reordered(self.mixed, seed=1), self.followers)


@dataclass(frozen=True)
class Counters:
    """Totals of a server since its start, over all of its attention instances.

    preemptions: preempted requests. prefix_hits: prompt tokens found in the prefix cache. steps:
    engine steps by depth; empty for colocated vLLM.
    """

    preemptions: int
    prefix_hits: int
    steps: dict[int, int]


@dataclass(frozen=True)
class Run:
    """One pass of the workload. Lists that were not measured are empty.

    answers: in the order of the workload, the mixed set first. one_by_one: answers to the mixed
    set, sent one at a time. top, whole: distributions at the reference's continuations, over the
    most likely tokens and over all tokens.
    """

    answers: list[Answer]
    one_by_one: list[Answer]
    top: Scores
    whole: Scores


@dataclass(frozen=True)
class Measured:
    """All measurements of one server.

    runs: by depth; a reference has its first pass at 1 and a pass with reordered arrivals at 2.
    float32: a reference's distributions at the continuations of the float32 reference, if measured.
    """

    runs: dict[int, Run]
    counters: Counters
    float32: tuple[Scores, Scores] | None = None


def measure_reference(
    case: Case,
    model: Path,
    workload: Workload,
    float32: Callable[[], Measured] | None,
) -> Measured:
    """Measures colocated vLLM twice, the second time with other arrivals and scoring batches.

    float32: returns the float32 reference if this is another dtype and that reference runs too.
    """
    with colocated(
        model.absolute(),
        dtype=case.dtype,
        cpus=available_cores()[-1:],  # one thread, like each of our instances on two cores
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
    nic: Path | None = None,
) -> Measured:
    """Measures one deployment at each depth; calls ``reference`` when the deployment is ready.

    nic: see :func:`afd_bench.cases.deployment`.

    Raises:
        AfdError: the deployment did not start, or no step ran at a depth.
    """
    config = deployment(case, model, max(depths), nic)
    with disaggregated(config, deadline_s=START_S) as server:
        expected = reference().runs[1].answers if case.scored else None
        runs = {}
        for depth in depths:
            server.set_depth(depth)
            time.sleep(_PROPAGATION_S)
            before = read_counters(server.metrics()).steps
            in_full = depth == max(depths)  # slow measurements run at one depth only
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
    """Runs and scores the workload once.

    at_once: scores all texts together. texts_of: answers whose tokens are scored; None: the answers
    of this pass. in_full: also measures one by one and over the whole vocabulary.
    """
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
    """Scores the most likely tokens of all texts, and the whole vocabulary of the shortest."""
    short = sorted(texts, key=lambda text: len(text.prompt))[:_WHOLE_VOCABULARY]
    top = score(server.url, server.model, texts, at_once=at_once)
    whole = score(server.url, server.model, short, top=MAX_LOGPROBS, at_once=at_once)
    return top, whole


def forced(workload: Workload, answers: Sequence[Answer]) -> list[Forced]:
    """Returns each prompt of the mixed set with its greedy continuation."""
    pairs = zip(workload.mixed, answers, strict=False)  # answers to the second set come after
    return [Forced(request.prompt, answer.tokens) for request, answer in pairs]


def read_counters(exposition: str) -> Counters:
    """Sums the counters of all attention instances in a Prometheus exposition."""
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
    """Raises AfdError unless steps ran at ``depth``, and none deeper, between two readings.

    before, after: steps by depth.
    """
    ran = {d: count - before.get(d, 0) for d, count in after.items()}
    deeper = sum(count for d, count in ran.items() if d > depth)
    if ran.get(depth, 0) == 0 or deeper:
        raise AfdError(
            f"depth {depth} was set, but the steps by depth are {ran}; the attention instances did"
            " not receive the new depth, see their logs"
        )
