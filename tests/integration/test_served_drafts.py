"""MTP through real servers: greedy tokens do not change, and as many drafts are accepted as by
colocated vLLM.

    ./run test -m long tests/integration/test_served_drafts.py
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from deployments import BLOCK, SETTINGS
from helpers import Scrape
from reference import LONG, REQUESTS

from afd_bench.servers import Server, colocated, disaggregated
from afd_bench.workload import run
from afd_demo.published.make import make_published
from afd_demo.sizes import PRESETS

pytestmark = [pytest.mark.serve, pytest.mark.long]

DRAFTS = 3
SOME = (*REQUESTS[:8], LONG)
MTP = f'--speculative-config={{"method": "mtp", "num_speculative_tokens": {DRAFTS}}}'


@dataclass(frozen=True)
class Counts:
    """Draft tokens so far."""

    drafted: float
    accepted: float

    @classmethod
    def of(cls, server: Server) -> "Counts":
        page = Scrape(server.metrics())
        names = ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens")
        return cls(*(page.total(f"{name}_total") for name in names))

    def __sub__(self, other: "Counts") -> "Counts":
        return Counts(self.drafted - other.drafted, self.accepted - other.accepted)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mtp") / "model"
    make_published("deepseek_v3_mtp", folder, PRESETS["tiny"], dtype="float32", likely=4)
    return folder


def answers(server: Server, salt: str) -> list[Sequence[int]]:
    return [answer.tokens for answer in run(server.url, server.model, REQUESTS, salt=salt)]


def one_by_one(server: Server, salt: str) -> tuple[list[Sequence[int]], Counts]:
    """The tokens of some requests, and what was accepted.

    vLLM drafts another token where a chunk of a prompt ends, so the counts depend on the chunks,
    and those on what else runs and on cached prefixes.
    """
    before, tokens = Counts.of(server), []
    for number, request in enumerate(SOME):
        one = replace(request, arrival_s=0.0)
        (answer,) = run(server.url, server.model, [one], salt=f"{salt} {number}")
        tokens.append(answer.tokens)
    return tokens, Counts.of(server) - before


Alone = tuple[list[Sequence[int]], list[Sequence[int]], Counts]


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> Alone:
    """The tokens of colocated vLLM without speculation, of REQUESTS and SOME, and what it accepts
    with speculation."""
    found = []
    for arguments in ([], [MTP]):
        with colocated(
            checkpoint,
            dtype="float32",
            max_model_len=1024,
            max_num_seqs=32,
            max_num_batched_tokens=128,
            kv_cache_gib=0.25,
            vllm_args=[BLOCK, *arguments],
        ) as server:
            together = answers(server, "together")
            some, counts = one_by_one(server, "alone") if arguments else ([], Counts(0, 0))
            found.append(together)
    plain, drafted = found
    assert plain == drafted
    assert 0 < counts.accepted < counts.drafted
    return plain, some, counts


@pytest.mark.parametrize("instances", [1, 2])
def test_drafts_change_no_token(checkpoint: Path, alone: Alone, instances: int) -> None:
    together, some, counts = alone
    config = {
        "model": str(checkpoint),
        "attention": {
            **SETTINGS,
            "instances": instances,
            "max_num_batched_tokens": 128,
            "speculation": {"method": "mtp", "num_speculative_tokens": DRAFTS},
            "vllm_args": [BLOCK],
        },
        "pipeline": {"depth": 3, "min_rows": 1},
    }
    with disaggregated(config) as server:
        for depth in (3, 1):
            server.set_depth(depth)
            assert answers(server, f"depth {depth}") == together
            tokens, found = one_by_one(server, f"depth {depth} alone")
            print(f"{instances}A1F, depth {depth}: {found}; colocated: {counts}")
            assert tokens == some
            assert found == counts
        page = Scrape(server.metrics())
        assert page.total("afd_late_peers_total") == 0
        for depth in (3, 1):
            assert page.total("afd_steps_total", instance="ffn-0", depth=str(depth)) > 0
