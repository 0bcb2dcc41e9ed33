"""Fixtures for tests that start real processes."""

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from deployments import BLOCK, Host, Models
from reference import REQUESTS, SCORED, Reference, References, score

from afd_bench.servers import colocated
from afd_bench.workload import run

_SHOWN = 600
"""Lines of the deployment's log to show. When an engine dies, every request logs its own traceback
after the one that names the cause."""


@pytest.fixture(scope="session", autouse=True)
def _need_vllm() -> None:
    for name in ("vllm", "openai", "afd_comm"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"the package {name} is not installed; ./run test installs it")


@pytest.fixture(scope="session")
def host(tmp_path_factory: pytest.TempPathFactory, tiny_models: Models) -> Iterator[Host]:
    host = Host(tmp_path_factory.mktemp("host"), tiny_models)
    yield host
    host.close()


@pytest.fixture(scope="session")
def references(tiny_models: Models) -> References:
    """Returns a function: family -> answers of colocated vLLM.

    Each vLLM server runs only while its answers are collected. It prefills each prompt in a single
    step, because every prompt fits into its limit of 1024 tokens per step.
    """
    known: dict[str, Reference] = {}

    def get(family: str) -> Reference:
        if family not in known:
            with colocated(
                tiny_models(family),
                dtype="float32",
                max_model_len=1024,
                max_num_seqs=32,
                kv_cache_gib=0.25,
                vllm_args=[BLOCK],
            ) as server:
                answers = run(server.url, server.model, REQUESTS, salt="reference")
                scores = [score(server, prompt) for prompt in SCORED]
            known[family] = Reference(answers, scores)
        return known[family]

    return get


@pytest.fixture(scope="session")
def terse(tiny_models: Models) -> dict[str, float]:
    """A logit_bias against blanks and control characters. The grammar for tool calls allows them,
    and a model with random weights would fill its JSON with them."""
    from tokenizers import Tokenizer

    file: Path = tiny_models("qwen3_moe") / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    texts = {i: tokenizer.decode([i]) for i in range(tokenizer.get_vocab_size())}
    return {
        str(i): -100.0
        for i, text in texts.items()
        if not text.strip() or any(ord(letter) < 32 for letter in text)
    }


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Adds the end of the deployment's log to the report of a failed test."""
    outcome = yield
    report = outcome.get_result()
    host = item.funcargs.get("host") if isinstance(item, pytest.Function) else None
    if report.failed and isinstance(host, Host) and host.current is not None:
        with contextlib.suppress(OSError):
            lines = host.current.server.log.read_text(errors="replace").splitlines()
            report.sections.append(("deployment log", "\n".join(lines[-_SHOWN:])))
