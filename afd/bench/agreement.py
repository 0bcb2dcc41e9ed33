"""How close two servers' next-token distributions are, on the same text.

Teacher forcing: the reference's greedy continuation is part of the prompt, and a server reports the
log-probabilities of its most likely tokens at every position (vLLM's ``prompt_logprobs``). So one
flipped token does not make everything after it differ, as it does in free decoding.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import aiohttp
import numpy as np

from afd.bench.workload import open_session, post_completion
from afd.errors import AfdError

TOP = 64
"""Tokens reported per position unless told otherwise; servers need ``--max-logprobs``."""
_SMALLEST_REST = 1e-5

Position = Mapping[int, float]
"""Token id -> natural log-probability, of the most likely tokens at one position."""


@dataclass(frozen=True)
class Forced:
    """A prompt and the continuation over which a server is scored; token ids."""

    prompt: tuple[int, ...]
    continuation: tuple[int, ...]


@dataclass(frozen=True)
class Agreement:
    """kl: mean KL(reference || other), nats per position, see :func:`kl_divergence`. top1: fraction
    of positions with the same most likely token. covered: mean probability of the compared tokens
    (the rest is one bucket). positions: how many."""

    kl: float
    top1: float
    covered: float
    positions: int


def score(
    url: str, model: str, texts: Sequence[Forced], *, top: int = TOP, at_once: bool = False
) -> list[list[Position]]:
    """Distributions at every continuation position of every text.

    Args:
        top: tokens reported per position. at_once: send all texts together, so that the server
            batches them as it likes, instead of one by one.

    Raises:
        AfdError: the server refused, or reported other positions than were asked for.
    """
    return asyncio.run(_score(url, model, texts, top, at_once))


async def _score(
    url: str, model: str, texts: Sequence[Forced], top: int, at_once: bool
) -> list[list[Position]]:
    async with open_session() as session:

        async def one(text: Forced) -> list[Position]:
            choice = await forced_choice(session, url, model, text, top)
            return parse_positions(choice, len(text.prompt), len(text.continuation), top)

        if at_once:
            return list(await asyncio.gather(*map(one, texts)))
        return [await one(text) for text in texts]


async def forced_choice(
    session: aiohttp.ClientSession, url: str, model: str, text: Forced, top: int
) -> dict[str, object]:
    """The answer from which :func:`parse_positions` and :func:`parse_own` read. Raises AfdError."""
    body: dict[str, object] = {
        "model": model,
        "prompt": [*text.prompt, *text.continuation],
        "max_tokens": 1,
        "temperature": 0,
        "prompt_logprobs": top,
    }
    return await post_completion(session, url, body)


def parse_positions(
    choice: Mapping[str, object], prompt: int, continuation: int, top: int = TOP
) -> list[Position]:
    """The last ``continuation`` of the ``prompt + continuation`` reported positions.

    vLLM reports at each position its most likely tokens and, if it is none of them, the prompt's
    own token, which is left out here.
    """
    return [
        {int(token): entry["logprob"] for token, entry in position.items() if entry["rank"] <= top}
        for position in _reported(choice, prompt + continuation)[prompt:]
    ]


def parse_own(choice: Mapping[str, object], text: Forced) -> list[float]:
    """Natural log-probability of each token of the continuation itself."""
    prompt, continuation = len(text.prompt), text.continuation
    positions = _reported(choice, prompt + len(continuation))[prompt:]
    return [
        position[str(token)]["logprob"]
        for token, position in zip(continuation, positions, strict=True)
    ]


def _reported(
    choice: Mapping[str, object], tokens: int
) -> Sequence[Mapping[str, Mapping[str, float]]]:
    """What a server says of each of ``tokens`` positions; of the first it says nothing."""
    reported = choice.get("prompt_logprobs")
    if not isinstance(reported, list) or len(reported) != tokens:
        count = len(reported) if isinstance(reported, list) else "no"
        raise AfdError(f"the server reported {count} prompt_logprobs for {tokens} tokens")
    return reported


def compare(
    reference: Sequence[Sequence[Position]], other: Sequence[Sequence[Position]]
) -> Agreement:
    """Means over all positions of all texts."""
    pairs = [
        (p, q)
        for left, right in zip(reference, other, strict=True)
        for p, q in zip(left, right, strict=True)
    ]
    return Agreement(
        kl=float(np.mean([kl_divergence(p, q) for p, q in pairs])),
        top1=float(np.mean([_best(p) == _best(q) for p, q in pairs])),
        covered=float(np.mean([_covered(p, q) for p, q in pairs])),
        positions=len(pairs),
    )


def kl_divergence(reference: Position, other: Position) -> float:
    """KL(reference || other) in nats over the tokens both report, and one bucket for all others.

    Merging tokens can only lower a KL divergence (data processing inequality), so this is a lower
    bound of the one over the whole vocabulary, and equal to it where all tokens are reported.
    """
    shared = sorted(reference.keys() & other.keys())
    p = _with_rest([reference[token] for token in shared])
    q = _with_rest([other[token] for token in shared])
    return float(np.sum(p * (np.log(p) - np.log(q))))


def _with_rest(logprobs: Sequence[float]) -> np.ndarray:
    """Probabilities [len + 1], float64: the given ones and the rest, which is never quite 0."""
    given = np.exp(np.asarray(logprobs, dtype=np.float64))
    # The reported logarithms are float32: over a whole vocabulary their sum misses 1 by about 1e-6,
    # on either side. That must not look like a bucket that only one of the two has.
    return np.append(given, max(1.0 - float(given.sum()), _SMALLEST_REST))


def _best(position: Position) -> int:
    return max(position, key=lambda token: (position[token], -token))


def _covered(reference: Position, other: Position) -> float:
    return math.fsum(math.exp(reference[token]) for token in reference.keys() & other.keys())
