"""The distribution of context lengths that a plan is made for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from afd.errors import ConfigError

QUANTILE_BINS = 20
FORMS = "4096, or 4096:0.7,32768:0.3, or p50=4096,p90=16384,p99=65536"


@dataclass(frozen=True)
class ContextMix:
    """Distribution of the tokens per request in the KV cache, over all requests in flight.

    Attributes:
        lengths: Tokens, ascending.
        shares: Share of rows with each length; sums to 1.
    """

    lengths: tuple[float, ...]
    shares: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean tokens per row."""
        return self.average(lambda length: length)

    @property
    def longest(self) -> float:
        return self.lengths[-1]

    def average(self, cost: Callable[[float], float]) -> float:
        """Returns the mean of ``cost(length)`` over rows. Windows make cost non-linear."""
        return sum(
            share * cost(length) for length, share in zip(self.lengths, self.shares, strict=True)
        )

    def scaled(self, factor: float) -> ContextMix:
        """Returns the same distribution with every length multiplied by ``factor``."""
        return ContextMix(tuple(length * factor for length in self.lengths), self.shares)

    def __str__(self) -> str:
        if len(self.lengths) == 1:
            return f"{self.mean:g} tokens"
        return f"mean {self.mean:.0f}, longest {self.longest:.0f} tokens"


def fixed(length: float) -> ContextMix:
    """Returns the distribution in which all requests have ``length`` tokens."""
    return ContextMix((float(length),), (1.0,))


def parse_context(text: str) -> ContextMix:
    """Parses a mean (``4096``, ``32k``), ``length:share`` pairs, or ``p50=``/``p90=``/``p99=``.

    Raises:
        ConfigError: The text has none of these forms, or is not a valid distribution.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    try:
        if len(parts) == 1 and ":" not in parts[0] and "=" not in parts[0]:
            return _checked([(_tokens(parts[0]), 1.0)], text)
        if all("=" in part for part in parts):
            return _from_quantiles(parts, text)
        pairs = [part.split(":") for part in parts]
        return _checked([(_tokens(length), float(share)) for length, share in pairs], text)
    except ValueError:
        raise ConfigError(f"--context {text} is not a context length; write {FORMS}") from None


def _tokens(text: str) -> float:
    lower = text.strip().lower()
    scale = 1024 if lower.endswith("k") else 1
    return float(lower.removesuffix("k")) * scale


def _checked(pairs: list[tuple[float, float]], text: str) -> ContextMix:
    if not pairs:
        raise ValueError(text)
    pairs = sorted(pairs)
    if any(not (math.isfinite(length) and length >= 1) for length, _ in pairs):
        raise ConfigError(f"--context {text}: every length must be at least 1 token")
    total = sum(share for _, share in pairs)
    if any(not 0 < share <= 1.0 + 1e-9 for _, share in pairs) or abs(total - 1) > 0.01:
        raise ConfigError(
            f"--context {text}: the shares sum to {total:g}; they must be positive and sum to 1"
        )
    lengths, shares = zip(*pairs, strict=True)
    return ContextMix(lengths, tuple(share / total for share in shares))


def _from_quantiles(parts: list[str], text: str) -> ContextMix:
    """Interpolates log-linearly between quantiles, mirrored at the median like a log-normal."""
    given = {}
    for part in parts:
        name, _, value = part.partition("=")
        if name not in ("p50", "p90", "p99"):
            raise ConfigError(f"--context {text}: unknown quantile {name}; use p50, p90 and p99")
        given[name] = _tokens(value)
    values = [given[name] for name in ("p50", "p90", "p99") if name in given]
    if "p50" not in given or values != sorted(values) or values[0] < 1:
        raise ConfigError(
            f"--context {text}: give p50, with p50 <= p90 <= p99 and each at least 1 token"
        )
    median = given["p50"]
    above = [(q, given[n]) for n, q in (("p90", 0.90), ("p99", 0.99)) if n in given]
    anchors = [(1 - q, median**2 / v) for q, v in reversed(above)]
    anchors += [(0.5, median), *above]
    middles = [(i + 0.5) / QUANTILE_BINS for i in range(QUANTILE_BINS)]
    lengths = [max(1.0, _quantile(anchors, q)) for q in middles]
    return _checked([(length, 1 / QUANTILE_BINS) for length in lengths], text)


def _quantile(anchors: list[tuple[float, float]], q: float) -> float:
    if q <= anchors[0][0]:
        return anchors[0][1]
    for (q0, v0), (q1, v1) in pairwise(anchors):
        if q <= q1:
            weight = (q - q0) / (q1 - q0)
            return math.exp((1 - weight) * math.log(v0) + weight * math.log(v1))
    return anchors[-1][1]
