"""Comparison of contracts, and encoding of messages with msgpack."""

from __future__ import annotations

import msgspec
import pytest
from control_support import CONTRACT, contract_with
from hypothesis import given, settings
from hypothesis import strategies as st

from afd.config.contract import REMEDIES, Contract, compare, describe
from afd.control import messages as m

counts = st.integers(min_value=0, max_value=1 << 20)
contracts = st.builds(
    Contract,
    model_hash=st.text("0123456789abcdef", min_size=8, max_size=64),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    wire=st.sampled_from(["exact", "fp8"]),
    hidden=counts,
    num_layers=counts,
    moe_layers=st.lists(counts, max_size=4).map(tuple),
    num_experts=counts,
    top_k=counts,
    capacity_rows=counts,
    max_depth=st.integers(1, 3),
    attention_instances=counts,
    attention_tp=counts,
    ffn_instances=counts,
    ffn_tp=counts,
    reduce=st.sampled_from(["exact", "int4"]),
    dispatch=st.sampled_from(["broadcast", "routed"]),
    shared_experts=st.sampled_from(["slices", "rows"]),
    expert_slots=st.lists(counts, max_size=3).map(tuple),
    expert_map=st.lists(st.tuples(counts, counts), max_size=3).map(tuple),
    graph_buckets=st.lists(st.tuples(counts, counts), max_size=3).map(tuple),
)


@settings(max_examples=100)
@given(contracts, contracts)
def test_compare_names_exactly_the_fields_that_differ(ours: Contract, theirs: Contract) -> None:
    found = {x.field: (x.ours, x.theirs) for x in compare(ours, theirs)}
    for name in Contract.__struct_fields__:
        left = msgspec.structs.asdict(ours)[name]
        right = msgspec.structs.asdict(theirs)[name]
        if left == right:
            assert name not in found
        else:
            assert found[name] == (left, right)


@settings(max_examples=100)
@given(contracts)
def test_a_contract_survives_encoding(contract: Contract) -> None:
    hello = m.Hello("ffn", 0, contract, addresses=("shm:1", "tcp:h:2"))
    received = m.decode_to_server(m.encode(hello))
    assert received == hello
    assert isinstance(received, m.Hello) and received.contract is not None
    assert compare(received.contract, contract) == []


@pytest.mark.parametrize("name", Contract.__struct_fields__)
def test_every_field_has_a_remedy(name: str) -> None:
    other = contract_with(**{name: "other"})
    (mismatch,) = compare(other, CONTRACT)
    assert mismatch.field == name
    assert mismatch.remedy == REMEDIES[name]


def test_description_names_field_values_holder_and_remedy() -> None:
    text = describe(compare(contract_with(dtype="float32"), CONTRACT), "attention-0")
    assert text == (
        "dtype is float32 here but bfloat16 on attention-0; "
        "start every role from the same deployment file"
    )


def test_description_cuts_long_values_and_repeats_no_remedy() -> None:
    other = contract_with(model_hash="f" * 500, hidden=128, dtype="float32")
    text = describe(compare(other, CONTRACT), "ffn-0")
    assert len(text) < 400
    assert text.count("the same checkpoint") == 1
    assert text.count("the same deployment file") == 1


def test_unknown_messages_are_malformed() -> None:
    for frame in (b"", b"\xc1", b"junk", msgspec.msgpack.encode({"type": "nonsense"})):
        with pytest.raises(m.Malformed):
            m.decode_to_server(frame)


def test_members_lookup() -> None:
    ready = m.Member("ffn", 1, 7, state="ready")
    members = m.Members(3, (m.Member("attention", 0, 5), m.Member("ffn", 0, 6), ready))
    assert members.find("ffn", 1) is ready
    assert members.find("ffn", 2) is None
    assert [x.id for x in members.of("ffn")] == ["ffn-0", "ffn-1"]
    assert m.Member("ffn", 1, 7, rank=2).id == "ffn-1.2" and members.find("ffn", 1, 2) is None
    assert members.of("ffn", state="ready") == (ready,)
