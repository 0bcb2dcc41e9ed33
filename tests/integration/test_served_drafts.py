"""MTP and EAGLE through real servers: greedy tokens do not change, and as many drafts are accepted
as by colocated vLLM.

    ./run test -m long tests/integration/test_served_drafts.py
"""

import json
import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest
from deployments import BLOCK, SETTINGS
from helpers import VOCAB, Scrape, openai_client, wait_until
from reference import LONG, REQUESTS

from afd.models import qwen2_moe
from afd_bench.faults.subject import Subject
from afd_bench.faults.traffic import Traffic, answered, jobs
from afd_bench.servers import Server, colocated, disaggregated
from afd_bench.workload import run
from afd_demo.published.eagle import make_eagle
from afd_demo.published.make import make_published
from afd_demo.sizes import PRESETS

pytestmark = [pytest.mark.serve, pytest.mark.long]

DRAFTS = 3
PATTERN = "[a-f]{10,20}-[0-9]{15}"
SOME = (*REQUESTS[:8], LONG)
DEPTHS = (3, 2, 1)


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


@dataclass(frozen=True)
class Drafted:
    """A checkpoint, and attention.speculation for it.

    exact: in float32. False: in bfloat16, where tokens depend on which rows are computed together,
        so that requests are compared one by one, and with vLLM that speculates too.
    attention: further keys of the section. depths: of its steps.
    """

    checkpoint: Path
    speculation: dict[str, object]
    exact: bool = True
    attention: dict[str, object] = field(default_factory=dict)
    depths: tuple[int, ...] = DEPTHS

    @property
    def dtype(self) -> str:
        return "float32" if self.exact else "bfloat16"

    @property
    def colocated_args(self) -> list[str]:
        if self.attention.get("enable_prefix_caching", True):
            return [BLOCK]
        return [BLOCK, "--no-enable-prefix-caching", *qwen2_moe.NEXT.cpu_args]


def mtp(layout: str, folder: Path) -> Drafted:
    make_published(layout, folder, PRESETS["tiny"], dtype="float32", likely=4)
    return Drafted(folder, {"method": "mtp", "num_speculative_tokens": DRAFTS})


def mtp_next(folder: Path) -> Drafted:
    """vLLM on CPUs computes linear attention in bfloat16 only, and with speculation without prefix
    caching only."""
    sizes = replace(PRESETS["tiny"], layers=4, linear_head=128)
    make_published("qwen3_next", folder, sizes, likely=4)
    return Drafted(
        folder,
        {"method": "mtp", "num_speculative_tokens": DRAFTS},
        exact=False,
        attention={"dtype": "bfloat16", "enable_prefix_caching": False},
        depths=(1,),
    )


def eagle(method: Literal["eagle", "eagle3"], folder: Path) -> Drafted:
    head = folder.with_name("head")
    make_published("qwen3_moe", folder, PRESETS["tiny"], dtype="float32", likely=4)
    make_eagle(method, head, PRESETS["tiny"], dtype="float32")
    found = {"method": method, "num_speculative_tokens": DRAFTS, "model": str(head)}
    return Drafted(folder, found)


METHODS = {
    "mtp": partial(mtp, "deepseek_v3_mtp"),
    "mtp-glm4_moe": partial(mtp, "glm4_moe"),
    "mtp-qwen3_next": mtp_next,
    "eagle": partial(eagle, "eagle"),
    "eagle3": partial(eagle, "eagle3"),
}


@pytest.fixture(scope="module", params=METHODS)
def drafted(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Drafted:
    folder = tmp_path_factory.mktemp(request.param) / "model"
    return METHODS[request.param](folder)


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


def constrained(server: Server) -> str:
    """The text of a request whose output has to match a pattern: its drafts mostly do not."""
    (choice,) = (
        openai_client(server.url)
        .completions.create(
            model=server.model,
            prompt="letters and digits: ",
            max_tokens=60,
            temperature=0,
            extra_body={"structured_outputs": {"regex": PATTERN}},
        )
        .choices
    )
    assert re.fullmatch(PATTERN, choice.text), choice
    return choice.text


Alone = tuple[list[Sequence[int]], list[Sequence[int]], Counts, str]


@pytest.fixture(scope="module")
def alone(drafted: Drafted) -> Alone:
    """What colocated vLLM answers: tokens of REQUESTS and SOME, what it accepts of the drafts of
    SOME, and the text of :func:`constrained`.

    If exact, all are the same without speculation; else there are none of REQUESTS.
    """
    found, texts = [], []
    speculating = [f"--speculative-config={json.dumps(drafted.speculation)}"]
    for arguments in ([], speculating) if drafted.exact else (speculating,):
        with colocated(
            drafted.checkpoint,
            dtype=drafted.dtype,
            max_model_len=1024,
            max_num_seqs=32,
            max_num_batched_tokens=128,
            kv_cache_gib=0.25,
            vllm_args=[*drafted.colocated_args, *arguments],
        ) as server:
            together = answers(server, "together") if drafted.exact else []
            some, counts = one_by_one(server, "alone") if arguments else ([], Counts(0, 0))
            found.append(together)
            texts.append(constrained(server) if drafted.exact else "")
    assert (found[0], texts[0]) == (found[-1], texts[-1])
    assert 0 < counts.accepted < counts.drafted
    return found[0], some, counts, texts[0]


def settings(drafted: Drafted, instances: int) -> dict[str, Any]:
    """The deployment file of xA1F."""
    return {
        "model": str(drafted.checkpoint),
        "attention": {
            **SETTINGS,
            "instances": instances,
            "max_num_batched_tokens": 128,
            "speculation": drafted.speculation,
            "vllm_args": [BLOCK],
            **drafted.attention,
        },
        "pipeline": {"depth": 3, "min_rows": 1},
    }


@pytest.mark.parametrize("instances", [1, 2])
def test_drafts_change_no_token(drafted: Drafted, alone: Alone, instances: int) -> None:
    together, some, counts, text = alone
    with disaggregated(settings(drafted, instances)) as server:
        for depth in drafted.depths:
            server.set_depth(depth)
            if drafted.exact:
                assert answers(server, f"depth {depth}") == together
            tokens, found = one_by_one(server, f"depth {depth} alone")
            print(f"{instances}A1F, depth {depth}: {found}; colocated: {counts}")
            assert tokens == some
            assert found == counts
            if drafted.exact:  # else vLLM's kernel ends the engine (docs/vllm-features.md)
                assert constrained(server) == text
        page = Scrape(server.metrics())
        assert page.total("afd_late_peers_total") == 0
        for depth in drafted.depths:
            assert page.total("afd_steps_total", instance="ffn-0", depth=str(depth)) > 0


@pytest.mark.timeout(580)  # a restart of vLLM on shared cores
def test_killed_instances_lose_no_request(tmp_path: Path) -> None:
    """MTP in 2A1F: the FFN instance, which has the draft layer's experts, and an attention
    instance, whose requests go on elsewhere with new drafts."""
    config = settings(mtp("deepseek_v3_mtp", tmp_path / "model"), 2)
    config |= {"restart": {"max_restarts": 10}, "ffn": {"late_ms": 1000}}
    with disaggregated(config) as server:
        subject = Subject(server)
        asked = answered(server.url, server.model, jobs(5, 12, vocab=VOCAB, new_tokens=(20, 60)))
        with Traffic(server.url, server.model, asked, clients=6, seed=5) as traffic:
            for member in ("ffn-0", "attention-0"):
                time.sleep(2.0)
                os.kill(subject.member_pid(member), signal.SIGKILL)
                time.sleep(2.0)
                wait_until(subject.is_whole, 200.0, f"{member} is back")
            time.sleep(2.0)
            traffic.finish()
            counts = traffic.read()
        accepted = Counts.of(server)
        print(f"{counts}; {accepted}")
        assert counts.done > 20
        assert (counts.failed, counts.refused, counts.wrong) == (0, 0, 0)
        assert 0 < accepted.accepted < accepted.drafted
