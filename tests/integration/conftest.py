"""Fixtures of the tests that start real processes."""

import contextlib
import importlib.util
from collections.abc import Iterator

import pytest
from deployments import BLOCK, Host, Models
from reference import REQUESTS, SCORED, Reference, References, score

from afd.bench.servers import colocated
from afd.bench.workload import run

_SHOWN = 600
"""Lines of a deployment's log: when an engine dies, each of its requests writes a trace of its own
behind the one that says why."""


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
    """family -> answers of colocated vLLM, which runs just for as long as it takes to ask it.

    It reads each prompt in one piece, where it fits into a step of 1024 tokens.
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


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """The end of the deployment's log goes with a failure."""
    outcome = yield
    report = outcome.get_result()
    host = item.funcargs.get("host") if isinstance(item, pytest.Function) else None
    if report.failed and isinstance(host, Host) and host.current is not None:
        with contextlib.suppress(OSError):
            lines = host.current.server.log.read_text(errors="replace").splitlines()
            report.sections.append(("deployment log", "\n".join(lines[-_SHOWN:])))
