"""Expert shards and transport slot numbers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from afd.errors import ConfigError
from afd.topology import SlotMap, expert_ranges, shared_slice


@given(experts=st.integers(1, 512), instances=st.integers(1, 64))
def test_expert_ranges_cover_every_expert_once_and_are_balanced(experts, instances):
    if instances > experts:
        with pytest.raises(ConfigError, match=f"{instances} FFN instances.*{experts} routed"):
            expert_ranges(experts, instances)
        return
    ranges = expert_ranges(experts, instances)
    assert [e for start, end in ranges for e in range(start, end)] == list(range(experts))
    sizes = {end - start for start, end in ranges}
    assert max(sizes) - min(sizes) <= 1


@given(width=st.integers(1, 4096), instances=st.integers(1, 16))
def test_shared_slices_cover_the_intermediate_dimension_once(width, instances):
    slices = [shared_slice(width, instances, j) for j in range(instances)]
    assert [i for start, end in slices for i in range(start, end)] == list(range(width))


@given(x=st.integers(1, 8), y=st.integers(1, 8), depth=st.integers(1, 3))
def test_slots_never_collide(x, y, depth):
    slots = SlotMap(x, y, depth)
    ffn = [slots.to_ffn(i, mb) for i in range(x) for mb in range(depth)]
    ffn += [slots.control_to_ffn(i) for i in range(x)]
    assert sorted(ffn) == list(range(slots.ffn_region_slots))
    attention = [slots.to_attention(j, mb) for j in range(y) for mb in range(depth)]
    assert sorted(attention) == list(range(slots.attention_region_slots))
    for i in range(x):
        first, count = slots.ffn_claim(i)
        claimed = set(range(first, first + count))
        assert {slots.to_ffn(i, mb) for mb in range(depth)} | {slots.control_to_ffn(i)} == claimed
