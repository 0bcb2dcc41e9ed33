"""The parts of the second-generation runner that need no step: cuts, blocks, the choice."""

import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from afd.config.speculation import Speculation
from afd.schedule import padded_depth
from attention_worker.vllm_hooks import generations
from attention_worker.vllm_hooks.cuts import CutBuffers, cut_step
from attention_worker.vllm_hooks.generations import FIRST, SECOND, SWITCH, model_runner
from attention_worker.vllm_hooks.request_blocks import RequestBlocks
from attention_worker.vllm_hooks.versions import Version, layout_of


@dataclass
class Batch:
    """The fields of vLLM's InputBatch that are cut."""

    req_ids: list[str]
    num_reqs: int
    num_reqs_after_padding: int
    idx_mapping: torch.Tensor
    idx_mapping_np: Any
    num_scheduled_tokens: Any
    num_tokens: int
    num_tokens_after_padding: int
    query_start_loc: torch.Tensor
    query_start_loc_np: Any
    seq_lens: torch.Tensor
    seq_lens_cpu_upper_bound: torch.Tensor
    is_prefilling_np: Any
    positions: torch.Tensor
    prompt_lens: torch.Tensor | None = None


def drawn_batch(draw: random.Random) -> Batch:
    """Returns a step of random requests; a step of one row each may be padded, as for a graph."""
    decode = draw.random() < 0.5
    requests = draw.randint(1, 9)
    rows = [1 if decode else draw.randint(1, 12) for _ in range(requests)]
    padding = draw.randint(0, 4) if decode else 0
    starts = np.cumsum([0, *rows, *[0] * padding]).astype(np.int32)
    computed = [draw.randint(0, 20) for _ in rows]
    lengths = torch.tensor([c + n for c, n in zip(computed, rows, strict=True)] + [0] * padding)
    return Batch(
        req_ids=[str(i) for i in range(requests)],
        num_reqs=requests,
        num_reqs_after_padding=requests + padding,
        idx_mapping=torch.arange(requests),
        idx_mapping_np=np.arange(requests),
        num_scheduled_tokens=np.array(rows, np.int32),
        num_tokens=sum(rows),
        num_tokens_after_padding=sum(rows) + padding,
        query_start_loc=torch.from_numpy(starts),
        query_start_loc_np=starts,
        seq_lens=lengths.int(),
        seq_lens_cpu_upper_bound=lengths.int(),
        is_prefilling_np=np.array([n > 1 for n in rows]),
        positions=torch.arange(sum(rows) + padding),
    )


@pytest.mark.parametrize("seed", range(60))
def test_micro_batches_are_those_of_the_first_generation(seed: int) -> None:
    """The reference is vLLM's own cutting of metadata, which its first-generation runner uses."""
    ubatch = pytest.importorskip("vllm.v1.worker.ubatch_utils")
    backend = pytest.importorskip("vllm.v1.attention.backend")
    draw, depth = random.Random(seed), 1
    while depth == 1:  # until a step is large enough for two micro-batches
        batch = drawn_batch(draw)
        rows, padded = batch.num_tokens, batch.num_tokens_after_padding
        depth = padded_depth(min(draw.randint(2, 3), rows), rows, padded)
    _, slices = ubatch.maybe_create_ubatch_slices(
        True, batch.num_scheduled_tokens, padded, batch.num_reqs_after_padding, depth
    )
    whole = backend.CommonAttentionMetadata(
        query_start_loc=batch.query_start_loc,
        query_start_loc_cpu=batch.query_start_loc,
        seq_lens=batch.seq_lens,
        num_reqs=batch.num_reqs_after_padding,
        num_actual_tokens=padded,
        max_query_len=max(batch.num_scheduled_tokens),
        max_seq_len=0,
        block_table_tensor=torch.zeros(batch.num_reqs_after_padding, 1),
        slot_mapping=batch.positions,
        seq_lens_cpu_upper_bound=batch.seq_lens_cpu_upper_bound,
    )
    expected = ubatch.split_attn_metadata(slices, whole)
    starts = batch.query_start_loc_np[: batch.num_reqs + 1]
    cuts = cut_step(starts, padded, batch.num_reqs_after_padding, depth)
    assert [(c.requests, c.rows) for c in cuts] == [
        (s.request_slice, s.token_slice) for s in slices
    ]
    buffers = CutBuffers(depth, 16, torch.device("cpu"))
    for index, (cut, theirs) in enumerate(zip(cuts, expected, strict=True)):
        part = buffers.part(batch, index, cut)
        assert torch.equal(part.query_start_loc, theirs.query_start_loc)
        assert part.query_start_loc_np.tolist() == theirs.query_start_loc.tolist()
        assert torch.equal(part.seq_lens, theirs.seq_lens)
        assert torch.equal(part.seq_lens_cpu_upper_bound, theirs.seq_lens_cpu_upper_bound)
        assert torch.equal(part.positions, theirs.slot_mapping)
        assert part.num_reqs_after_padding == theirs.num_reqs
        assert part.num_tokens_after_padding == theirs.num_actual_tokens
        assert part.num_scheduled_tokens.max() == theirs.max_query_len
    assert batch.query_start_loc_np[-1] == rows  # the step itself is unchanged


def scheduled(
    rows: dict[str, int],
    new: dict[str, tuple[list[int], int]] | None = None,
    cached: dict[str, tuple[list[int] | None, int]] | None = None,
    finished: tuple[str, ...] = (),
    preempted: tuple[str, ...] | None = None,
) -> SimpleNamespace:
    """new, cached: request -> its (further) blocks and the number of its computed tokens."""
    known = (cached or {}).items()
    return SimpleNamespace(
        num_scheduled_tokens=rows,
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, block_ids=(blocks,), num_computed_tokens=done)
            for name, (blocks, done) in (new or {}).items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[name for name, _ in known],
            new_block_ids=[None if more is None else (more,) for _, (more, _) in known],
            num_computed_tokens=[done for _, (_, done) in known],
        ),
        finished_req_ids=set(finished),
        preempted_req_ids=preempted,
    )


def test_a_prefix_that_the_same_step_fills_is_a_hazard() -> None:
    blocks = RequestBlocks([4])

    def hazard(step: SimpleNamespace) -> bool:
        blocks.update(step)
        return blocks.prefix_hazard(step)

    assert not hazard(scheduled({"a": 6}, new={"a": ([1, 2], 0)}))
    # b starts on block 1, which is full since the last step; a writes to block 2.
    b = {"b": ([1, 7], 4)}
    assert not hazard(scheduled({"a": 1, "b": 3}, new=b, cached={"a": (None, 6)}))
    # c starts on block 2 too, whose last token a writes in this step.
    c = {"c": ([1, 2, 8], 8)}
    assert hazard(scheduled({"a": 1, "c": 3}, new=c, cached={"a": (None, 7)}))
    # d starts on block 3, which a got only now.
    d = {"d": ([1, 2, 3, 9], 12)}
    assert hazard(scheduled({"a": 1, "d": 1}, new=d, cached={"a": ([3], 8)}))
    # a has gone, and comes again as a new request.
    again = {"a": ([1, 5], 4)}
    step = scheduled({"a": 2}, new=again, finished=("b", "c"), preempted=("a",))
    assert not hazard(step)


def deployment(**changed: Any) -> Any:
    attention = SimpleNamespace(
        device=changed.get("device", "cuda"),
        speculation=changed.get("speculation"),
        tp=changed.get("tp", 1),
        vllm_args=changed.get("vllm_args", []),
    )
    return SimpleNamespace(
        attention=attention,
        pipeline=SimpleNamespace(graphs=changed.get("graphs", True)),
        prefill=SimpleNamespace(instances=changed.get("prefill", 0)),
    )


@pytest.mark.parametrize("environment", [{}, {SWITCH: FIRST}, {SWITCH: SECOND}])
def test_vllms_own_rule_decides(environment: dict[str, str]) -> None:
    for changed in ({}, {"tp": 2}):
        assert model_runner(deployment(**changed), environment) == {}


MTP, NGRAM = Speculation(method="mtp"), Speculation(method="ngram")


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"speculation": MTP}, "attention.speculation with draft layers and pipeline.graphs"),
        ({"prefill": 1}, "the section prefill"),
    ],
)
def test_what_the_second_generation_lacks_keeps_the_first(
    changed: dict[str, Any], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    for environment in ({}, {SWITCH: FIRST}):
        assert model_runner(deployment(**changed), environment) == {SWITCH: FIRST}
    assert not caplog.records
    assert model_runner(deployment(**changed), {SWITCH: SECOND}) == {SWITCH: FIRST}
    (record,) = caplog.records
    assert f"{named} works on vLLM's first-generation" in record.getMessage()


@pytest.mark.parametrize(("number", "environment"), [((0, 31), {SWITCH: FIRST}), ((0, 32), {})])
def test_older_versions_draft_by_n_gram_on_the_first(
    number: Version, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generations, "layout", lambda: layout_of(number))
    assert model_runner(deployment(speculation=NGRAM), {SWITCH: SECOND}) == environment


@pytest.mark.parametrize(
    "changed",
    [
        {"speculation": NGRAM},
        {"speculation": MTP, "graphs": False},
        {"speculation": MTP, "device": "cpu"},
    ],
)
def test_what_was_not_seen_on_a_gpu_waits_for_the_user(
    changed: dict[str, Any], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generations, "layout", lambda: layout_of((0, 32)))
    for environment in ({}, {SWITCH: FIRST}):
        assert model_runner(deployment(**changed), environment) == {SWITCH: FIRST}
    assert not caplog.records
    assert model_runner(deployment(**changed), {SWITCH: SECOND}) == {}
    (record,) = caplog.records
    assert record.getMessage().startswith("attention.speculation on vLLM's second-generation")
