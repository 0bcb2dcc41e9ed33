"""vLLM's second-generation model runner on CPUs: greedy tokens of the first one, in float32.

Its kernels are Triton's, so it runs on Triton's interpreter, eager. A minute and a half per case:

    .venv/bin/pip install triton
    ./run test -m long tests/integration/test_second_runner.py
"""

import importlib.util
import os
import signal
from pathlib import Path

import pytest
from adapters import ADAPTERS, adapter_arguments
from deployments import (
    BLOCK,
    NGRAM,
    SETTINGS,
    Models,
)
from helpers import Stream, all_begun, tokens_of
from reference import References, same_tokens

from afd.control import operator
from afd_bench.servers import Server, disaggregated
from attention_worker.vllm_hooks.generations import FIRST, SECOND, SWITCH

pytestmark = [
    pytest.mark.serve,
    pytest.mark.long,
    pytest.mark.timeout(580),
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="needs triton: pip install triton"
    ),
]
SAID = "model runner: vLLM's second generation"
ON_SECOND = {
    SWITCH: SECOND,
    "TRITON_INTERPRET": "1",
    "PYTHONPATH": os.pathsep.join(
        [str(Path(__file__).parent / "interpreter"), os.environ.get("PYTHONPATH", "")]
    ),
}


def config(model: Path, **attention: object) -> dict[str, object]:
    vllm_args = [BLOCK, *attention.pop("vllm_args", [])]  # type: ignore[misc]
    common = {**SETTINGS, "max_num_batched_tokens": 128, "vllm_args": vllm_args}
    return {
        "model": str(model),
        "attention": {**common, **attention},
        "ffn": {"late_ms": 20_000},
        "pipeline": {"depth": 3, "min_rows": 1},
        "deadlines": {"ffn_s": 120, "drain_s": 60},
    }


@pytest.mark.parametrize("case", ["plain", "ranks", "ngram"])
def test_tokens_are_those_of_colocated_vllm(
    case: str, references: References, tiny_models: Models, tmp_path: Path
) -> None:
    settings = {"plain": {}, "ranks": {"tp": 2}, "ngram": {"speculation": NGRAM}}[case]
    expected, log = references("qwen3_moe"), tmp_path / "serve.log"
    deployment = config(tiny_models("qwen3_moe"), **settings)
    with disaggregated(deployment, log=log, variables=ON_SECOND) as server:
        for depth in (3, 1):
            server.set_depth(depth)
            same_tokens(server, expected, f"depth {depth}")
    assert SAID in log.read_text()


def test_an_ffn_instance_that_dies_costs_no_request(tiny_models: Models, tmp_path: Path) -> None:
    log = tmp_path / "serve.log"
    prompts = [tokens_of(f"killed {i}", 5 + 9 * i) for i in range(6)]

    def tokens(server: Server, *, kill: bool) -> list[object]:
        streams = [Stream(server.url, prompt, 60).start() for prompt in prompts]
        if kill:
            all_begun(streams, 120, tokens=20)
            os.kill(operator.status(server.control).find("ffn", 0, 0).pid, signal.SIGKILL)
        return [stream.join(300).tokens for stream in streams]

    deployment = config(tiny_models("qwen3_moe"))
    with disaggregated(deployment, log=log, variables=ON_SECOND) as server:
        assert tokens(server, kill=True) == tokens(server, kill=False)
    assert SAID in log.read_text()


def test_each_request_gets_its_adapter(tiny_models: Models, tmp_path: Path) -> None:
    model = tiny_models("qwen3_moe")
    lora = adapter_arguments(model)
    prompts = [tokens_of(f"adapter{i}", 5 + 9 * i) for i in range(4)]
    found = []
    for variables in ({SWITCH: FIRST}, ON_SECOND):
        log = tmp_path / f"{variables[SWITCH]}.log"
        with disaggregated(config(model, vllm_args=lora), log=log, variables=variables) as server:
            names = ("model", *ADAPTERS)
            streams = [
                Stream(server.url, prompt, 24, model=name).start()
                for prompt in prompts
                for name in names
            ]
            found.append([stream.join(300).tokens for stream in streams])
        assert (SAID in log.read_text()) == (variables is ON_SECOND)
    assert found[0] == found[1]
    assert found[0][0] != found[0][1], "the adapter changed nothing"
