"""The load of a simulation from the command line, in the terms of `vllm bench serve`."""

from __future__ import annotations

import argparse
import math
from typing import Any

from afd.errors import ConfigError
from afd_planner.simulate.spec import MAX_TOKENS, Spec, parse_spec

NUM_PROMPTS, INPUT_LEN, OUTPUT_LEN = 1000, 1024, 128
"""Defaults of `vllm bench serve` with random data."""

_REQUESTS = {
    "num_prompts": "count",
    "max_concurrency": "max_concurrency",
    "max_num_seqs": "max_batch",
    "max_num_batched_tokens": "max_tokens",
    "kv_cache_tokens": "kv_tokens",
    "prefill": "prefill",
}
"""Arguments to keys of ``requests`` that have the same meaning."""
_POSITIVE = (
    "request_rate",
    "burstiness",
    "num_prompts",
    "input_len",
    "output_len",
    "max_concurrency",
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_cache_tokens",
)
_LENGTHS = ("input_len", "output_len", "range_ratio")
_MOMENTS = ("request_rate", "burstiness")


def with_load(spec: Spec, args: argparse.Namespace) -> Spec:
    """Returns the spec with the requests that the arguments describe; unchanged without any.

    Arguments that are None keep the file's value, or the default if the file has no requests. The
    batch of a constant load becomes ``max_batch``.

    Raises:
        ConfigError: A value is not a positive number, or the arguments contradict one another.
    """
    names = (*_REQUESTS, *_LENGTHS, *_MOMENTS, "arrivals")
    given = {
        name: value for name, value in vars(args).items() if name in names and value is not None
    }
    if not given:
        return spec
    _check(given)
    data = spec.model_dump(mode="json", exclude_unset=True)
    constant = data.pop("constant", None)
    requests: dict[str, Any] = data.setdefault("requests", {"arrivals": {"kind": "together"}})
    if constant:
        requests["max_batch"] = constant["rows"]
    requests |= {_REQUESTS[name]: given[name] for name in _REQUESTS if name in given}
    if "arrivals" in given:
        requests["arrivals"] = {"kind": "trace", "file": str(given["arrivals"].absolute())}
        for key in ("prompt", "output"):
            requests.pop(key, None)
        if "num_prompts" not in given:
            requests.pop("count", None)
        return _parsed(data, spec)
    if any(name in given for name in _MOMENTS) or requests["arrivals"]["kind"] == "trace":
        requests["arrivals"] = _arrivals(given)
    requests.setdefault("count", NUM_PROMPTS)
    for key, name, default in (
        ("prompt", "input_len", INPUT_LEN),
        ("output", "output_len", OUTPUT_LEN),
    ):
        mean, ratio = given.get(name), given.get("range_ratio")
        requests[key] = _length(requests.get(key), mean, ratio, default)
    return _parsed(data, spec)


def _parsed(data: dict[str, Any], spec: Spec) -> Spec:
    requests = data["requests"]
    if "max_batch" in requests:
        requests.setdefault("max_tokens", max(MAX_TOKENS, requests["max_batch"]))
    return parse_spec(data, spec.name)


def _check(given: dict[str, Any]) -> None:
    for name in _POSITIVE:
        value = given.get(name)
        endless = name == "request_rate" and value == math.inf
        if value is not None and not (endless or (math.isfinite(value) and value > 0)):
            more = " or inf" if name == "request_rate" else ""
            raise ConfigError(f"{_flag(name)} is {value:g}; give a number above 0{more}")
    ratio = given.get("range_ratio", 0.0)
    if not 0 <= ratio < 1:
        raise ConfigError(f"--range-ratio is {ratio:g}; give a number of at least 0 and below 1")
    extra = [name for name in (*_MOMENTS, *_LENGTHS) if name in given]
    if "arrivals" in given and extra:
        raise ConfigError(
            f"--arrivals already says when requests arrive and how long they are; leave out"
            f" {_flag(extra[0])}"
        )
    if "burstiness" in given and given.get("request_rate", math.inf) == math.inf:
        raise ConfigError("--burstiness needs --request-rate, requests per second")


def _arrivals(given: dict[str, Any]) -> dict[str, Any]:
    rate = given.get("request_rate", math.inf)
    if rate == math.inf:
        return {"kind": "together"}
    return {"kind": "gamma", "per_s": rate, "burstiness": given.get("burstiness", 1.0)}


def _length(
    known: dict[str, Any] | None, tokens: float | None, ratio: float | None, default: float
) -> dict[str, Any]:
    """Returns a distribution of lengths: ``known`` with the mean and the range that were given."""
    length = dict(known or {"tokens": default})
    if tokens is not None:
        length["tokens"] = tokens
    if ratio is not None:
        length |= {"kind": "uniform", "spread": ratio}
    return length


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
