"""Records of `afd bench prefill`. The servers are those of other benches."""

from afd_bench.prefill import OURS, PEER, Measured, Prompts, records


def test_ratios_above_one_are_in_our_favour():
    first = Measured("step 1024, 128 tokens", "ttft_ms", "ms")
    rate = Measured("step 1024, 128 tokens", "tokens_per_s", "tokens/s")
    for mine, peer in ((10.0, 20.0), (12.0, 18.0), (50.0, 90.0)):
        for one in (first, rate):
            one.add(OURS, mine)
            one.add(PEER, peer)
    made = records([first, rate], "prefill", OURS, PEER, "afd bench prefill")
    found = {record.metric: record for record in made}
    assert (found["ttft_ms"].value, found["ttft_ms"].peer_value) == (12.0, 20.0)
    assert found["ttft_ms"].ratio == 1.667 and found["tokens_per_s"].ratio == 0.6


def test_no_prompt_begins_like_another():
    prompts = Prompts()
    begins = {tuple(prompts.draw(16)) for _ in range(200)}
    assert len(begins) == 200 and all(5 <= token < 2005 for one in begins for token in one)
