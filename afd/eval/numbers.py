"""What a deployment's scores come to beside colocated vLLM's. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from afd.bench.agreement import Position, compare
from afd.eval.cloze import choice
from afd.eval.scoring import Scores


@dataclass(frozen=True)
class Whole:
    """On the few positions that are scored over the whole vocabulary: mean KL in nats, and the
    share of it that the likeliest tokens show (1 where both are 0)."""

    kl: float
    share: float


@dataclass(frozen=True)
class Cloze:
    """Accuracy of ours and of the peer, and the fraction of items where both choose the same."""

    accuracy: float
    peer: float
    same: float


@dataclass(frozen=True)
class Numbers:
    """One case. kl: mean KL(peer || ours), nats per position, over the likeliest tokens and one
    bucket for all others. top1: fraction of positions with the same likeliest token. perplexity:
    of the text's tokens. covered: mean probability of the compared tokens."""

    kl: float
    top1: float
    covered: float
    positions: int
    perplexity: float
    peer_perplexity: float
    cloze: Cloze | None
    whole: Whole | None


def numbers(ours: Scores, peer: Scores, answers: Sequence[int], top: int) -> Numbers:
    """Both servers' scores of the same material.

    Args:
        answers: of its cloze items. top: tokens per position that ``kl`` compares.
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
    """exp(-mean) of natural log-probabilities, each token counted once."""
    values = [value for window in own for value in window]
    return math.exp(-math.fsum(values) / len(values))


def likeliest(position: Position, top: int) -> Position:
    """What a server would have reported if asked for ``top`` tokens."""
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
