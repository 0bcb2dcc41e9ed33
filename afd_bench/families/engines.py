"""Runs many tiny models in one process, with vLLM alone or with remote experts.

``python -m afd_bench.families.engines colocated|remote CASES RESULTS``: CASES is a JSON file with a
list of :class:`Case`, RESULTS gets a list of :class:`Result`. One process for all models, because
importing vLLM takes longer than a tiny model. ``remote`` has the attention side of the product. It
calls the FFN side directly instead of through the transport, which knows no model and has its own
tests (tests/integration).
"""

import contextlib
import gc
import importlib
import json
import logging
import os
import random
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from afd.models import Family
from afd.models.family import split_form
from attention_worker.ranks import Ranks

ENVIRONMENT = {
    "VLLM_PLUGINS": "",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_HOST_IP": "127.0.0.1",
    "HF_HUB_OFFLINE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
}
TOKENS = 12
TOP = 64
"""Likeliest tokens per position that are reported."""
DEPTH = 3


@dataclass(frozen=True)
class Case:
    """One model.

    dtype: that it is served in. instances: FFN instances. split: serve it in split form, although
    its layers can be pipelined. scored: report next-token distributions too. drafts: tokens per
    step that are drafted; 0: it runs without speculation. method, head: see
    :class:`afd.config.speculation.Speculation`. prefix_caching: of attention instances.
    """

    name: str
    path: str
    dtype: str = "float32"
    instances: int = 2
    split: bool = False
    scored: bool = False
    drafts: int = 0
    method: str = "mtp"
    head: str | None = None
    prefix_caching: bool = True


@dataclass
class Result:
    """Greedy tokens by prompt, the depths of the steps, and drafted and accepted tokens.

    scores: by text and position, token and its natural log-probability, of the likeliest tokens.
    error: why the engine could not run. log: our log lines.
    """

    name: str
    tokens: list[list[int]] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    scores: list[list[list[tuple[int, float]]]] = field(default_factory=list)
    error: str = ""
    log: list[str] = field(default_factory=list)
    seconds: float = 0.0


def prompts() -> list[list[int]]:
    draw = random.Random(1)
    return [[draw.randrange(16, 500) for _ in range(n)] for n in (3, 11, 40)]


def texts() -> list[list[int]]:
    """Returns what engines score: the distribution behind every token of it."""
    draw = random.Random(2)
    return [[draw.randrange(16, 500) for _ in range(n)] for n in (50, 80, 110)]


def answers(argv: list[str], name: str, *, scored: bool) -> Result:
    """Returns tokens and scores of an engine with these vLLM arguments."""
    from vllm import SamplingParams, TokensPrompt
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.llm_engine import LLMEngine

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(parser.parse_args(argv)))
    try:

        def run(inputs: list[list[int]], sampling: Any) -> list[Any]:
            found: dict[str, Any] = {}
            for index, tokens in enumerate(inputs):
                engine.add_request(str(index), TokensPrompt(prompt_token_ids=tokens), sampling)
            while engine.has_unfinished_requests():
                found |= {output.request_id: output for output in engine.step()}
            return [found[str(index)] for index in range(len(inputs))]

        sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        result = Result(name)
        _count_drafts(engine, result)
        result.tokens = [list(output.outputs[0].token_ids) for output in run(prompts(), sampling)]
        if scored:
            sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=TOP)
            for output in run(texts(), sampling):
                result.scores.append([_likeliest(at) for at in output.prompt_logprobs[1:]])
        return result
    finally:
        _close(engine)


def _count_drafts(engine: Any, result: Result) -> None:
    """Makes the engine's scheduler count in ``result``; its own counts need its logs."""

    def count(
        stats: Any, num_draft_tokens: int, num_accepted_tokens: int, *_: Any, **__: Any
    ) -> None:
        result.drafted += num_draft_tokens
        result.accepted += num_accepted_tokens

    engine.engine_core.engine_core.scheduler.make_spec_decoding_stats = count


def _likeliest(position: Any) -> list[tuple[int, float]]:
    """vLLM also reports the text's own token, whatever its rank."""
    return [(token, found.logprob) for token, found in position.items() if found.rank <= TOP]


def _close(engine: Any) -> None:
    from vllm.distributed.parallel_state import (
        destroy_distributed_environment,
        destroy_model_parallel,
    )

    engine.engine_core.shutdown()
    destroy_model_parallel()
    destroy_distributed_environment()


def settings(case: Case) -> dict[str, Any]:
    """Returns the deployment under test."""
    drafts = {
        "method": case.method,
        "num_speculative_tokens": case.drafts,
        "model": case.head,
    }
    return {
        "model": case.path,
        "attention": {
            "dtype": case.dtype,
            "max_model_len": 128,
            "max_num_seqs": 4,
            "max_num_batched_tokens": 128,
            "kv_cache_gib": 0.02,
            "enable_prefix_caching": case.prefix_caching,
            "speculation": drafts if case.drafts else None,
            "vllm_args": ["--block-size=32", "--disable-log-stats", f"--max-logprobs={TOP}"],
        },
        "ffn": {"instances": case.instances},
        "pipeline": {"depth": DEPTH, "min_rows": 1},
    }


def arguments(case: Case, role_file: Path) -> tuple[list[str], dict[str, str]]:
    """Returns the product's own arguments and environment for an attention instance."""
    from afd.config.deployment import Deployment
    from afd.config.roles import RoleSpec
    from attention_worker.vllm_hooks.command import attention_command

    role = RoleSpec("attention", 0, Deployment.from_plain(settings(case)), "tcp://127.0.0.1:1")
    role.save(role_file)
    argv, environment = attention_command(role, {})
    server = ("--host", "--port", "--served-model-name", "--disable-uvicorn", "--middleware")
    return [a for a in argv[3:] if not a.startswith(server)], environment


class LocalExperts:
    """Remote experts that are computed here, by the FFN side's own code."""

    def __init__(self, resolved: Any) -> None:
        from ffn_worker.experts.build import load_ffn_model
        from ffn_worker.moe import vllm_cpu

        # Colocated vLLM does not use that kernel for bfloat16 experts, and it rounds differently.
        vllm_cpu.__dict__["fused_experts"] = lambda: None
        deployment = resolved.deployment
        self._models = [
            load_ffn_model(
                deployment.model,
                resolved.family,
                resolved.model,
                instances=deployment.ffn.instances,
                index=index,
                threads=1,
            )
            for index in range(deployment.ffn.instances)
        ]
        self._outputs: dict[int, Any] = {}
        self.depths: set[int] = set()

    def begin_step(self, depth: int, *, draft: bool = False) -> None:
        if not draft:
            self.depths.add(depth)

    def sending(self, layer: int, micro_batch: int, rows: int) -> Any:
        return contextlib.nullcontext()

    def send(
        self,
        layer: int,
        micro_batch: int,
        hidden: Any,
        ids: Any,
        weights: Any,
        encoded: Any = None,
    ) -> None:
        assert micro_batch not in self._outputs, "sent twice"
        parts = [model.forward(layer, hidden, ids, weights) for model in self._models]
        self._outputs[micro_batch] = sum(parts)

    def recv(self, micro_batch: int) -> Any:
        return self._outputs.pop(micro_batch)

    def end_step(self) -> None:
        pass

    def leave(self) -> None:
        pass

    def close(self) -> None:
        pass


class LocalInstance:
    """Stands in for AttentionInstance: no control plane, no transport."""

    joined: "LocalInstance"
    rank = 0

    def __init__(self) -> None:
        from afd.config.resolve import resolve
        from afd.config.roles import load_role
        from afd.host.lent_cores_torch import LentCores
        from afd.metrics.decode_steps import DecodeSteps

        self.resolved = resolve(load_role().deployment)
        self.remote = LocalExperts(self.resolved)
        self.steps = DecodeSteps()
        self.max_depth = self.resolved.contract.max_depth
        self.min_rows = 1
        self.requests = None  # steps are not traced
        self.cores = LentCores()

    @property
    def family(self) -> Family:
        return self.resolved.family

    @classmethod
    def join(cls, ranks: Ranks) -> "LocalInstance":
        assert ranks.count == 1
        cls.joined = cls()
        return cls.joined

    def depth(self, rows: int, *, decode: bool) -> int:
        return self.max_depth

    def serve(self, model: Any, draft: Any) -> None:
        model.attach(self.remote, self.resolved.model.step_layers)
        if draft is not None:
            draft.attach(self.remote, self.resolved.model.draft_layers)

    def close(self) -> None:
        pass


def run_colocated(case: Case, role_file: Path) -> Result:
    from attention_worker.vllm_hooks.arguments import process_environment
    from attention_worker.vllm_hooks.versions import layout

    argv, environment = arguments(case, role_file)
    ours = ("--worker-cls", "--load-format")
    with process_environment(environment):
        _register_class(case.path, drafts=case.drafts > 0 and case.method == "mtp")
        argv = [a for a in argv if not a.startswith(ours)]
        if case.drafts and layout().cpu_draft_kernels_missing:
            from attention_worker.vllm_hooks.draft_kernels import put_draft_kernels

            put_draft_kernels()  # vLLM alone ends at the first draft
        return answers(argv, case.name, scored=case.scored)


def run_remote(case: Case, role_file: Path) -> Result:
    import afd.models

    known = afd.models.FAMILIES
    if case.split:
        families = (split_form(f, f.name, f.architectures, "a test") for f in known)
        afd.models.FAMILIES = tuple(families)
    try:
        return _run_remote(case, role_file)
    finally:
        afd.models.FAMILIES = known


def _run_remote(case: Case, role_file: Path) -> Result:
    argv, environment = arguments(case, role_file)
    from vllm.model_executor.custom_op import op_registry_oot

    from afd.config.roles import ROLE_FILE_ENV, load_role
    from attention_worker.vllm_hooks import instance_runner
    from attention_worker.vllm_hooks.arguments import process_environment
    from attention_worker.vllm_hooks.register import register_model

    instance_runner.AttentionInstance = LocalInstance  # type: ignore[assignment,attr-defined]  # stands in for it
    op_registry_oot.pop("RoutedExperts", None)  # registered by the case before; vLLM refuses twice
    with process_environment({**environment, ROLE_FILE_ENV: str(role_file)}):
        register_model(load_role())
        result = answers(argv, case.name, scored=case.scored)
    result.depths = sorted(LocalInstance.joined.remote.depths)
    return result


def _register_class(path: str, *, drafts: bool) -> None:
    """Gives vLLM classes instead of names: it would look at those in a process of its own."""
    from vllm import ModelRegistry

    from afd.models import read_model

    family, model = read_model(path)
    sources = {model.architecture: family.vllm_class[model.architecture]}
    if drafts:
        sources |= [family.mtp]
    for architecture, source in sources.items():
        module, _, name = source.partition(":")
        ModelRegistry.register_model(architecture, getattr(importlib.import_module(module), name))


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def main() -> None:
    os.environ.update(ENVIRONMENT)
    gc.disable()
    side, cases_file, results_file = sys.argv[1:]
    run = {"colocated": run_colocated, "remote": run_remote}[side]
    handler = _Lines()
    logging.getLogger("afd").addHandler(handler)
    logging.getLogger("afd").setLevel(logging.INFO)
    results: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        for entry in json.loads(Path(cases_file).read_text()):
            case, began = Case(**entry), time.monotonic()
            handler.lines = []
            try:
                # vLLM collects seven times per engine: most of a tiny model's time.
                with mock.patch.object(gc, "collect"):
                    result = run(case, Path(folder) / "role.json")
            except Exception:
                result = Result(case.name, error=traceback.format_exc())
            gc.collect()
            result.log, result.seconds = handler.lines, time.monotonic() - began
            results.append(asdict(result))
            partial = Path(f"{results_file}.partial")
            partial.write_text(json.dumps(results))
            partial.replace(results_file)  # others read it while this goes on


if __name__ == "__main__":
    main()
