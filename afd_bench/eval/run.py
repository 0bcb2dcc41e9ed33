"""Runs `afd eval`: starts colocated vLLM and the deployments, scores the texts, checks limits."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

from afd.config.deployment import Deployment
from afd.errors import AfdError, ConfigError
from afd.models import read_config, read_model
from afd.records import machine, read_records, today, write_records
from afd.texts import Text, read_texts
from afd_bench.eval.cases import Case, Target, deployment_file, targets
from afd_bench.eval.gates import breaches, gate_of
from afd_bench.eval.numbers import Numbers, numbers
from afd_bench.eval.options import Options
from afd_bench.eval.report import Origin, insert, page, reading, records, table, wire_bytes
from afd_bench.eval.scoring import Material, Scores, prepare, score
from afd_bench.measure import check_depth, read_counters
from afd_bench.servers import Server, colocated, disaggregated
from afd_launch.roles_of_host import available_cores

_PROPAGATION_S = 0.3  # until the instances have received a new depth


Opener = Callable[[], AbstractContextManager[Server]]


def evaluate(deployment: Deployment, options: Options) -> int:
    """Runs every case. Returns the exit status: 1 if a limit is exceeded, else 0.

    Raises:
        ConfigError: the options do not fit the deployment. AfdError: a server failed.
    """
    if deployment.attention.device != "cpu" or deployment.ffn.device != "cpu":
        raise ConfigError(
            "afd eval runs on CPU only; add --set attention.device=cpu --set ffn.device=cpu"
        )
    if options.page is not None:
        _renew(options.page, [])  # fails early if the page has no markers
    texts = read_texts(deployment.model, options.texts)
    family, model = read_model(deployment.model)
    failures: list[str] = []
    for asked in options.dtypes:
        dtype = family.serve_as(model, asked).dtype
        wanted = list(
            targets(
                deployment.attention.instances, options.ffns, dtype, options.wires,
                options.tps, options.reduces,
            )
        )  # fmt: skip
        failures += _Evaluation(deployment, options, texts, dtype).run(wanted)
    if options.out is not None:
        found = [r for r in read_records(options.out / "eval.json") if r.bench == "eval"]
        (options.out / "eval.md").write_text(page(found), encoding="utf-8")
        if options.page is not None:
            options.page.write_text(_renew(options.page, table(found)), encoding="utf-8")
    for failure in failures:
        print(f"afd eval: {failure}", flush=True)
    return 1 if failures else 0


def _renew(page_file: Path, lines: Sequence[str]) -> str:
    try:
        return insert(page_file.read_text(encoding="utf-8"), lines, page_file.name)
    except OSError as err:
        raise ConfigError(f"cannot read the page {page_file}: {err.strerror}") from None


class _Evaluation:
    """Evaluates all deployments of one dtype against colocated vLLM."""

    def __init__(
        self, deployment: Deployment, options: Options, texts: Sequence[Text], dtype: str
    ) -> None:
        self._deployment = deployment
        self._options = options
        self._texts = texts
        self._dtype = dtype
        self._vocabulary = int(str(read_config(deployment.model)["vocab_size"]))
        # vLLM's default limit of reported tokens is 20
        self._vllm_args = (f"--max-logprobs={max(self._vocabulary, options.effort.top)}",)
        self._materials: list[Material] = []
        self._peer: list[Scores] = []
        self._failures: list[str] = []

    def run(self, wanted: Sequence[Target]) -> list[str]:
        """Returns a sentence for every exceeded limit."""
        openers: list[tuple[str, Target | None, Opener]] = [
            (f"colocated {self._dtype}", None, self._open_colocated),
            *((target.name, target, self._opener(target)) for target in wanted),
        ]
        for start in range(0, len(openers), self._options.at_once):
            batch = openers[start : start + self._options.at_once]
            began = time.monotonic()
            with opened([opener for _, _, opener in batch]) as servers:
                took_s = time.monotonic() - began
                print(
                    f"{len(batch)} of {len(openers)} servers started in {took_s:.0f} s", flush=True
                )
                for (name, target, _), server in zip(batch, servers, strict=True):
                    began = time.monotonic()
                    if target is None:
                        self._score_peer(server)
                    else:
                        self._score_target(target, server)
                    print(f"{name} scored in {time.monotonic() - began:.0f} s", flush=True)
        return self._failures

    def _open_colocated(self) -> AbstractContextManager[Server]:
        settings = self._deployment.attention
        return colocated(
            self._deployment.model,
            dtype=self._dtype,
            cpus=available_cores()[-1:],  # one thread, like each of our instances on two cores
            max_model_len=settings.max_model_len,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            kv_cache_gib=settings.kv_cache_gib,
            vllm_args=[*settings.vllm_args, *self._vllm_args],
            deadline_s=self._deployment.deadlines.start_s,
        )

    def _opener(self, target: Target) -> Opener:
        file = deployment_file(self._deployment, target, max(self._options.depths), self._vllm_args)
        deadline_s = self._deployment.deadlines.start_s
        return lambda: disaggregated(file, deadline_s=deadline_s)

    def _score_peer(self, server: Server) -> None:
        effort = self._options.effort
        self._materials = [prepare(server, text, effort) for text in self._texts]
        self._peer = [self._score(server, material, whole=True) for material in self._materials]

    def _score_target(self, target: Target, server: Server) -> None:
        for depth in self._options.depths:
            server.set_depth(depth)
            time.sleep(_PROPAGATION_S)
            before = read_counters(server.metrics())
            for material, peer in zip(self._materials, self._peer, strict=True):
                deepest = depth == max(self._options.depths)
                ours = self._score(server, material, whole=deepest)
                found = numbers(ours, peer, material.answers, material.top)
                self._keep(target.case(depth, material.name), found)
            after = read_counters(server.metrics())
            check_depth(before.steps, after.steps, depth)
            if after.prefix_hits != before.prefix_hits:
                raise AfdError(
                    f"{target.name} read {after.prefix_hits - before.prefix_hits} prompt tokens"
                    " from its prefix cache, which leaves them without scores; set"
                    " attention.enable_prefix_caching=false"
                )

    def _score(self, server: Server, material: Material, *, whole: bool) -> Scores:
        vocabulary = self._vocabulary if whole and material.whole else 0
        return score(server, material, vocabulary=vocabulary)

    def _keep(self, case: Case, found: Numbers) -> None:
        _, model = read_model(self._deployment.model)
        size = wire_bytes(case.wire, case.dtype, model.hidden, model.top_k)
        origin = Origin(machine(), self._options.command, today())
        kept = records(case, found, size, origin)
        read = reading({record.metric: record for record in kept})
        broken = list(breaches(case, read))
        self._failures += broken
        verdict = ("FAILED" if broken else "within limits") if gate_of(case) else "no limits"
        cloze = ""
        if found.cloze is not None:
            cloze = f", cloze {found.cloze.accuracy:.3f} ({found.cloze.peer:.3f})"
        print(
            f"{case.name}: KL {read.kl:.2e}, perplexity {read.perplexity:.4f}"
            f" ({read.perplexity_change:+.3%}), top-1 {read.top1:.4f}{cloze}: {verdict}",
            flush=True,
        )
        if self._options.out is not None:
            write_records(self._options.out / "eval.json", kept)


@contextlib.contextmanager
def opened(openers: Sequence[Opener]) -> Iterator[list[Server]]:
    """Starts all servers at the same time; stops those that started at the end of the block."""
    with ThreadPoolExecutor(len(openers)) as pool:
        managers = [opener() for opener in openers]
        starts: list[Future[Server]] = [pool.submit(manager.__enter__) for manager in managers]
        try:
            yield [start.result() for start in starts]
        finally:
            ends = [
                pool.submit(manager.__exit__, None, None, None)
                for manager, start in zip(managers, starts, strict=True)
                if start.exception() is None
            ]
            for end in ends:
                end.result()
