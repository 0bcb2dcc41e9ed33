"""LoRA adapters of attention: several in one batch, beside the base model and with speculation."""

from pathlib import Path

import pytest
from adapters import ADAPTERS, ATTENTION, make_adapter, merged
from deployments import Host, Models
from helpers import Running, Stream, tokens_of
from reference import References, same_tokens

from afd_bench.families.hf import disagreements

pytestmark = pytest.mark.serve


TWO_RANKS = pytest.param("tp_adapters", marks=pytest.mark.long)
"""``attention.tp: 2``: ./run test -m long tests/integration/test_served_adapters.py"""


@pytest.fixture(params=["ranks", TWO_RANKS])
def deployment(host: Host, request: pytest.FixtureRequest) -> Running:
    return host.serve(request.param)


def test_each_request_gets_its_adapter(
    deployment: Running, references: References, tiny_models: Models, tmp_path: Path
) -> None:
    """Requests of two adapters and of the base model run at the same time."""
    checkpoint = tiny_models("qwen3_moe")
    prompts = [tokens_of(f"adapter{i}", 5 + 9 * i) for i in range(4)]
    streams = {
        name: [Stream(deployment.url, prompt, 24, model=name).start() for prompt in prompts]
        for name in ADAPTERS
    }
    same_tokens(deployment.server, references("qwen3_moe"), "beside adapters")
    for seed, (name, running) in enumerate(streams.items()):
        answers = [stream.join(60).tokens for stream in running]
        assert [stream.error for stream in running] == [None] * len(running)
        adapter = make_adapter(tmp_path / name, checkpoint, seed, ATTENTION)
        reference = merged(tmp_path / f"merged-{name}", checkpoint, adapter)
        assert disagreements(reference, [list(p) for p in prompts], answers) == []
        plain = disagreements(checkpoint, [list(p) for p in prompts], answers)
        assert plain, "the adapter changed nothing"
