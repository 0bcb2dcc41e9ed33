"""Compares a deployment's scores with those of colocated vLLM. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from afd_bench.agreement import Position, compare
from afd_bench.eval.cloze import choice
from afd_bench.eval.scoring import Scores


@dataclass(frozen=True)
class Whole:
    """Results for the positions that are scored over the whole vocabulary.

    kl: mean KL in nats. share: KL over the most likely tokens / kl (1 if both are 0).
    """

    kl: float
    share: float


@dataclass(frozen=True)
class Cloze:
    """accuracy, peer: accuracy of ours and of the peer. same: fraction of equal choices."""

    accuracy: float
    peer: float
    same: float


@dataclass(frozen=True)
class Numbers:
    """The numbers of one case.

    kl: mean KL(peer || ours) in nats per position, over the most likely tokens and one bucket for
    all others. top1: fraction of positions with the same most likely token. covered: mean
    probability of the compared tokens. positions: scored positions. perplexity, peer_perplexity: of
    the text's tokens, ours and the peer's.
    """

    kl: float
    top1: float
    covered: float
    positions: int
    perplexity: float
    peer_perplexity: float
    cloze: Cloze | None
    whole: Whole | None


def numbers(ours: Scores, peer: Scores, answers: Sequence[int], top: int) -> Numbers:
    """Compares both servers' scores of the same material.

    answers: indices of the correct cloze options. top: tokens per position that ``kl`` compares.
    """
    agreement = compare(peer.positions, ours.positions)
    return Numbers(
        agreement.kl,
        agreement.top1,
        agreement.covered,
        agreement.positions,
        perplexity(ours.own),
        perplexity(peer.own),
        _cloze(ours.cloze, peer.cloze, answers) if answers else None,
        _whole(ours.whole, peer.whole, top) if ours.whole and peer.whole else None,
    )


def perplexity(own: Sequence[Sequence[float]]) -> float:
    """Returns exp(-mean) of the natural log-probabilities of all tokens."""
    values = [value for window in own for value in window]
    return math.exp(-math.fsum(values) / len(values))


def likeliest(position: Position, top: int) -> Position:
    """Returns the ``top`` most likely tokens of a position, as a server would report them."""
    best = sorted(position, key=lambda token: (-position[token], token))[:top]
    return {token: position[token] for token in best}


def _cloze(
    ours: Sequence[Sequence[float]], peer: Sequence[Sequence[float]], answers: Sequence[int]
) -> Cloze:
    mine, theirs = [choice(item) for item in ours], [choice(item) for item in peer]
    return Cloze(_equal(mine, answers), _equal(theirs, answers), _equal(mine, theirs))


def _equal(left: Sequence[int], right: Sequence[int]) -> float:
    return sum(a == b for a, b in zip(left, right, strict=True)) / len(left)


def _whole(
    ours: Sequence[Sequence[Position]], peer: Sequence[Sequence[Position]], top: int
) -> Whole:
    whole = compare(peer, ours).kl
    seen = compare(
        [[likeliest(p, top) for p in window] for window in peer],
        [[likeliest(p, top) for p in window] for window in ours],
    ).kl
    return Whole(whole, seen / whole if whole else 1.0)
