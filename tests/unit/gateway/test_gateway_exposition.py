"""Merging Prometheus pages; results are checked with prometheus_client's parser."""

from __future__ import annotations

import random

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Summary, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from afd_gateway.exposition import Page, merge, with_instance

# A shortened /metrics page of vLLM's API server: counters, gauges, a histogram and `_created`.
VLLM = """\
# HELP python_info Python platform information
# TYPE python_info gauge
python_info{implementation="CPython",major="3",minor="11",patchlevel="8",version="3.11.8"} 1.0
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 2.0
# HELP vllm:generation_tokens_total Number of generation tokens processed.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="tiny"} 1234.0
# HELP vllm:generation_tokens_created Number of generation tokens processed.
# TYPE vllm:generation_tokens_created gauge
vllm:generation_tokens_created{engine="0",model_name="tiny"} 1.7636e+09
# HELP vllm:time_to_first_token_seconds Histogram of time to first token in seconds.
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001",model_name="tiny"} 0.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1",model_name="tiny"} 3.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="tiny"} 4.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="tiny"} 4.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="tiny"} 0.75
# HELP vllm:time_to_first_token_seconds_created Histogram of time to first token in seconds.
# TYPE vllm:time_to_first_token_seconds_created gauge
vllm:time_to_first_token_seconds_created{engine="0",model_name="tiny"} 1.7636e+09
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",cache_dtype="auto",mm="{'a': \\"1,2\\"}"} 1.0
# HELP http_request_duration_highr_seconds Latency with many buckets but no API specific labels.
# TYPE http_request_duration_highr_seconds histogram
http_request_duration_highr_seconds_bucket{le="0.01"} 1.0
http_request_duration_highr_seconds_bucket{le="+Inf"} 1.0
http_request_duration_highr_seconds_count 1.0
http_request_duration_highr_seconds_sum 0.005
"""


def series(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    found: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, f"the series occurs twice: {key}"
            found[key] = sample.value
    return found


def kinds(text: str) -> dict[str, str]:
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(set(names)) == len(names), "a family has two TYPE lines"
    helps = [line.split()[2] for line in text.splitlines() if line.startswith("# HELP")]
    assert len(set(helps)) == len(helps), "a family has two HELP lines"
    return {family.name: family.type for family in text_string_to_metric_families(text)}


def labelled(text: str, instance: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """The reference implementation: parses the page and adds the label to every sample."""
    return {
        (name, tuple(sorted((*labels, ("instance", instance))))): value
        for (name, labels), value in series(text).items()
    }


def test_vllm_pages_of_two_instances() -> None:
    merged = merge([Page(VLLM, "attention-0"), Page(VLLM, "attention-1")])
    assert series(merged) == labelled(VLLM, "attention-0") | labelled(VLLM, "attention-1")
    assert kinds(merged) == kinds(VLLM)
    assert merged.count("# TYPE vllm:time_to_first_token_seconds histogram\n") == 1
    assert 'le="+Inf"' in merged
    # The format requires that the samples of a family are contiguous.
    lines = [line for line in merged.splitlines() if line.startswith("vllm:num_requests_running")]
    assert len(lines) == 2 and f"{lines[0]}\n{lines[1]}" in merged


def test_escaped_label_values_survive() -> None:
    merged = merge([Page(VLLM, "attention-0")])
    info = next(
        sample
        for family in text_string_to_metric_families(merged)
        for sample in family.samples
        if sample.name == "vllm:cache_config_info"
    )
    assert info.labels["mm"] == "{'a': \"1,2\"}"
    assert info.labels["instance"] == "attention-0"


@pytest.mark.parametrize("seed", range(8))
def test_random_registries_round_trip(seed: int) -> None:
    rng = random.Random(seed)
    pages, expected = [], {}
    alphabet = 'abc{}",=\\ \n#\u2028é'
    for number in range(3):
        registry = CollectorRegistry()
        counter = Counter("requests", "help \\ text\nline", ["path"], registry=registry)
        gauge = Gauge("vllm:depth", "d", ["a", "b"], registry=registry)
        histogram = Histogram("seconds", "s", ["x"], registry=registry)
        summary = Summary("size", "z", registry=registry)
        for _ in range(6):
            word = "".join(rng.choices(alphabet, k=5))
            counter.labels(word).inc(rng.random())
            gauge.labels(word, "q").set(rng.choice([1e300, -1.5, float("inf"), 0]))
            histogram.labels(word).observe(rng.random())
            summary.observe(rng.random())
        text = generate_latest(registry).decode()
        pages.append(Page(text, f"attention-{number}"))
        expected |= labelled(text, f"attention-{number}")
    merged = merge(pages)
    assert series(merged) == expected
    assert merge([Page(merged)]) == merged  # merging a merged page changes nothing


def test_page_without_instance_is_unchanged() -> None:
    own = '# TYPE up gauge\nup{instance="ffn-0"} 0\n'
    assert merge([Page(own)]) == own


def test_a_label_named_instance_is_kept_under_prometheus_name() -> None:
    assert with_instance('a="1",instance="x"', "ffn-0") == (
        'instance="ffn-0",a="1",exported_instance="x"'
    )
    assert with_instance("", "ffn-0") == 'instance="ffn-0"'
    assert with_instance('a="instance=1",', "f") == 'instance="f",a="instance=1"'


def test_type_conflict_keeps_the_first() -> None:
    first = "# TYPE x gauge\nx 1\n"
    second = '# TYPE x histogram\nx_bucket{le="+Inf"} 1\nx_count 1\nx_sum 1\n'
    merged = merge([Page(first, "a-0"), Page(second, "a-1")])
    assert merged == '# TYPE x gauge\nx{instance="a-0"} 1\n'


def test_the_same_series_twice_is_kept_once() -> None:
    text = "# TYPE x gauge\nx 1\n"
    assert merge([Page(text, "a-0"), Page("# TYPE x gauge\nx 2\n", "a-0")]) == (
        '# TYPE x gauge\nx{instance="a-0"} 1\n'
    )


@pytest.mark.parametrize(
    "line", ["x", "x1", "x one", 'x{a="1} 2', "<html>", "x{} 1 2 3", "1x 2", "# EOF", "x 1_0"]
)
def test_lines_that_are_not_samples_are_dropped(line: str) -> None:
    merged = merge([Page(f"{line}\n# TYPE good gauge\ngood 1\n", "a-0")])
    assert merged == '# TYPE good gauge\ngood{instance="a-0"} 1\n'


def test_untyped_samples_timestamps_and_spaces() -> None:
    merged = merge([Page('plain 1 1700000000000\r\nother { a = "1" , } NaN\n', "f-0")])
    assert 'plain{instance="f-0"} 1 1700000000000\n' in merged
    assert 'other{instance="f-0",a="1"} NaN\n' in merged
    assert merged.count("untyped") == 2
    assert merge([]) == ""
