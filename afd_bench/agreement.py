"""Compares the next-token distributions of two servers on the same text.

Uses teacher forcing: the prompt includes the reference's greedy continuation, and the server
reports the log-probabilities of its most likely tokens at every position (vLLM's
``prompt_logprobs``). In free decoding one different token would change all tokens after it; here it
does not.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import aiohttp
import numpy as np

from afd.errors import AfdError
from afd.texts import Forced
from afd_bench.workload import open_session, post_completion

TOP = 64
"""Default number of tokens reported per position. vLLM's limit is raised by ``--max-logprobs``."""
_SMALLEST_REST = 1e-5

Position = Mapping[int, float]
"""Token id -> natural log-probability, for the most likely tokens at one position."""


@dataclass(frozen=True)
class Agreement:
    """Means over all compared positions.

    kl: KL(reference || other), nats per position (:func:`kl_divergence`). top1: fraction of
    positions with the same most likely token. covered: reference probability of the tokens that
    both servers report; all others form one bucket. positions: number of positions.
    """

    kl: float
    top1: float
    covered: float
    positions: int


def score(
    url: str, model: str, texts: Sequence[Forced], *, top: int = TOP, at_once: bool = False
) -> list[list[Position]]:
    """Returns the distributions at every continuation position of every text.

    Args:
        top: tokens reported per position.
        at_once: sends all texts together, so that the server batches them; else one at a time.

    Raises:
        AfdError: the server refused a request or reported the wrong number of positions.
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
    """Returns the completion choice that :func:`parse_positions` and :func:`parse_own` read.

    Raises:
        AfdError: the request failed.
    """
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
    """Returns the last ``continuation`` of the ``prompt + continuation`` reported positions.

    vLLM also reports the prompt's own token at each position. This function drops that token unless
    it is among the ``top`` most likely ones.
    """
    return [
        {int(token): entry["logprob"] for token, entry in position.items() if entry["rank"] <= top}
        for position in _reported(choice, prompt + continuation)[prompt:]
    ]


def parse_own(choice: Mapping[str, object], text: Forced) -> list[float]:
    """Returns the natural log-probability of each token of the continuation."""
    prompt, continuation = len(text.prompt), text.continuation
    positions = _reported(choice, prompt + len(continuation))[prompt:]
    return [
        position[str(token)]["logprob"]
        for token, position in zip(continuation, positions, strict=True)
    ]


def _reported(
    choice: Mapping[str, object], tokens: int
) -> Sequence[Mapping[str, Mapping[str, float]]]:
    """Returns the entries of the ``tokens`` positions. The entry of the first position is None."""
    reported = choice.get("prompt_logprobs")
    if not isinstance(reported, list) or len(reported) != tokens:
        count = len(reported) if isinstance(reported, list) else "no"
        raise AfdError(
            f"the server reported {count} prompt_logprobs for {tokens} tokens; use vLLM >= 0.26"
        )
    return reported


def compare(
    reference: Sequence[Sequence[Position]], other: Sequence[Sequence[Position]]
) -> Agreement:
    """Returns the agreement over all positions of all texts."""
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
    """Returns KL(reference || other) in nats over the tokens that both report and one bucket.

    The bucket merges all other tokens. Merging can only lower a KL divergence (data processing
    inequality), so the result is a lower bound of the divergence over the whole vocabulary. It is
    exact if all tokens are reported.
    """
    shared = sorted(reference.keys() & other.keys())
    p = _with_rest([reference[token] for token in shared])
    q = _with_rest([other[token] for token in shared])
    return float(np.sum(p * (np.log(p) - np.log(q))))


def _with_rest(logprobs: Sequence[float]) -> np.ndarray:
    """Returns float64 [len + 1]: the given probabilities and the rest, which is never 0."""
    given = np.exp(np.asarray(logprobs, dtype=np.float64))
    # The reported logarithms are float32. Over a whole vocabulary their sum is off from 1 by about
    # 1e-6, above or below. The lower limit keeps that error out of the divergence.
    return np.append(given, max(1.0 - float(given.sum()), _SMALLEST_REST))


def _best(position: Position) -> int:
    return max(position, key=lambda token: (position[token], -token))


def _covered(reference: Position, other: Position) -> float:
    return math.fsum(math.exp(reference[token]) for token in reference.keys() & other.keys())
