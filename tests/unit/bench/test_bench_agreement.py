"""KL divergence of two servers' reports against float64 numpy over the whole vocabulary."""

import numpy as np
import pytest

from afd.errors import AfdError
from afd_bench.agreement import compare, kl_divergence, parse_positions

VOCAB = 500


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


def reported(logprobs: np.ndarray, top: int) -> dict[int, float]:
    """What a server would report: float32, likeliest first."""
    best = np.argsort(-logprobs)[:top]
    return {int(token): float(np.float32(logprobs[token])) for token in best}


def reference_kl(p: np.ndarray, q: np.ndarray, tokens: list[int]) -> float:
    """By definition, float64: ``tokens`` one by one, all others merged."""
    rest = np.setdiff1d(np.arange(len(p)), tokens)
    p_all = [*np.exp(p[tokens]), np.exp(p[rest]).sum()]
    q_all = [*np.exp(q[tokens]), np.exp(q[rest]).sum()]
    return float(sum(a * np.log(a / b) for a, b in zip(p_all, q_all, strict=True) if a > 0))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("top", [5, 64, VOCAB])
def test_kl_equals_its_definition(seed: int, top: int) -> None:
    draw = np.random.default_rng(seed)
    logits = draw.normal(size=VOCAB) * draw.uniform(0.5, 4.0)
    p, q = log_softmax(logits), log_softmax(logits + 0.1 * draw.normal(size=VOCAB))
    left, right = reported(p, top), reported(q, top)
    shared = sorted(left.keys() & right.keys())
    assert shared
    expected = reference_kl(p, q, shared)
    assert kl_divergence(left, right) == pytest.approx(expected, rel=1e-3, abs=2e-6)


@pytest.mark.parametrize("seed", range(4))
def test_merging_tokens_gives_a_lower_bound(seed: int) -> None:
    draw = np.random.default_rng(seed)
    logits = draw.normal(size=VOCAB)
    p, q = log_softmax(logits), log_softmax(logits + 0.2 * draw.normal(size=VOCAB))
    values = [kl_divergence(reported(p, top), reported(q, top)) for top in (8, 64, VOCAB)]
    whole = float(np.sum(np.exp(p) * (p - q)))
    assert values == sorted(values)
    assert values[-1] == pytest.approx(whole, rel=1e-3)
    assert values[0] >= 0.0


def test_equal_distributions_have_no_divergence_even_as_float32() -> None:
    p = log_softmax(np.random.default_rng(0).normal(size=VOCAB))
    assert kl_divergence(reported(p, VOCAB), reported(p, VOCAB)) == 0.0
    # The sums of two whole-vocabulary reports miss 1 by different float32 rounding errors.
    low = {token: value - 1e-6 for token, value in reported(p, VOCAB).items()}
    assert abs(kl_divergence(reported(p, VOCAB), low)) < 2e-6


def test_without_a_shared_token_only_the_rest_is_compared() -> None:
    left, right = {1: np.log(0.4)}, {2: np.log(0.4)}
    assert kl_divergence(left, right) == 0.0  # both rests are everything: a lower bound, still


def test_means_over_positions() -> None:
    sure, split = {1: np.log(0.9), 2: np.log(0.1)}, {1: np.log(0.4), 2: np.log(0.6)}
    found = compare([[sure], [sure, split]], [[sure], [split, split]])
    assert found.positions == 3
    assert found.top1 == pytest.approx(2 / 3)
    expected = 0.9 * np.log(0.9 / 0.4) + 0.1 * np.log(0.1 / 0.6)
    assert found.kl == pytest.approx(expected / 3)
    assert found.covered == pytest.approx(1.0)


def test_equal_best_tokens_are_the_same_best_token() -> None:
    tie, swapped = {7: -0.7, 3: -0.7}, {3: -0.7, 7: -0.7}
    assert compare([[tie]], [[swapped]]).top1 == 1.0


def test_texts_of_different_length_are_not_compared() -> None:
    with pytest.raises(ValueError):
        compare([[{1: 0.0}]], [[{1: 0.0}, {1: 0.0}]])


def entry(logprob: float, rank: int) -> dict[str, object]:
    return {"logprob": logprob, "rank": rank, "decoded_token": "x"}


def test_parsing_keeps_the_continuation_and_drops_the_prompts_own_unlikely_token() -> None:
    reported_positions = [
        None,
        {"5": entry(-1.0, 1)},
        {"6": entry(-0.5, 1), "7": entry(-0.75, 2), "900": entry(-9.0, 700)},
        {"8": entry(-0.25, 1)},
    ]
    choice = {"prompt_logprobs": reported_positions}
    assert parse_positions(choice, 2, 2) == [{6: -0.5, 7: -0.75}, {8: -0.25}]
    assert parse_positions(choice, 2, 2, top=1) == [{6: -0.5}, {8: -0.25}]
    with pytest.raises(AfdError, match="4 prompt_logprobs for 5 tokens"):
        parse_positions(choice, 3, 2)
    with pytest.raises(AfdError, match="no prompt_logprobs"):
        parse_positions({"prompt_logprobs": None}, 2, 2)
