"""Scores a text on a server: log-probabilities of its tokens and of cloze options.

Uses teacher forcing (vLLM's ``prompt_logprobs``). vLLM does not read its prefix cache for such
requests, because cached positions would have no log-probabilities (vllm/sampling_params.py:
skip_reading_prefix_cache).
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

from afd.errors import AfdError
from afd.texts import Forced, Text, spread, windows
from afd_bench.agreement import Position, forced_choice, parse_own, parse_positions
from afd_bench.eval import cloze
from afd_bench.servers import Server
from afd_bench.workload import open_session

_AT_ONCE = 16  # requests: enough for full steps, few enough that none misses its deadline
_WHOLE_WINDOW = 33  # tokens; all but the first are scored


@dataclass(frozen=True)
class Effort:
    """How much of each text is scored.

    tokens: positions scored with the ``top`` most likely tokens. window, stride: in tokens, see
    afd/texts.py. cloze: number of items. whole: positions scored over the whole vocabulary (slow).
    """

    tokens: int
    cloze: int
    whole: int
    window: int = 256
    stride: int = 128
    top: int = 64


@dataclass(frozen=True)
class Material:
    """A text as token ids.

    windows: scored with the ``top`` most likely tokens. whole: scored over the whole vocabulary.
    cloze: per item, one (context, option) pair per option. answers: indices of correct options.
    """

    name: str
    windows: tuple[Forced, ...]
    whole: tuple[Forced, ...]
    cloze: tuple[tuple[Forced, ...], ...]
    answers: tuple[int, ...]
    top: int


@dataclass(frozen=True)
class Scores:
    """One server's scores, in the order of the material.

    positions: distributions per window. own: natural log-probabilities of the text's tokens, per
    window. cloze: log-probabilities of the options, per item. whole: distributions over the whole
    vocabulary, per window.
    """

    positions: list[list[Position]]
    own: list[list[float]]
    cloze: list[list[float]]
    whole: list[list[Position]]


def prepare(server: Server, text: Text, effort: Effort) -> Material:
    """Tokenises a text with the server's tokenizer. Raises AfdError."""
    return asyncio.run(_prepare(server, text, effort))


async def _prepare(server: Server, text: Text, effort: Effort) -> Material:
    items = cloze.items(text.documents, effort.cloze)
    async with open_session() as session:

        async def tokens(words: str, *, special: bool = True) -> tuple[int, ...]:
            return await _tokenise(session, server, words, special=special)

        documents = [await tokens(document) for document in text.documents]
        asked = []
        for item in items:
            context = await tokens(item.context)
            options = [await tokens(option, special=False) for option in item.options]
            asked.append(tuple(Forced(context, option) for option in options))
    all_windows = [w for d in documents for w in windows(d, effort.window, effort.stride)]
    heads = [d[:_WHOLE_WINDOW] for d in documents]
    short = [w for d in heads for w in windows(d, _WHOLE_WINDOW, 1 + _WHOLE_WINDOW // 2)]
    whole = spread(short, effort.whole) if effort.whole else []
    return Material(
        text.name,
        tuple(spread(all_windows, effort.tokens)),
        tuple(whole),
        tuple(asked),
        tuple(item.answer for item in items),
        effort.top,
    )


async def _tokenise(
    session: aiohttp.ClientSession, server: Server, words: str, *, special: bool
) -> tuple[int, ...]:
    body = {"model": server.model, "prompt": words, "add_special_tokens": special}
    try:
        async with session.post(f"{server.url}/tokenize", json=body) as answer:
            data = await answer.json()
            if answer.status != 200:
                raise AfdError(
                    f"{server.url}/tokenize returned {answer.status}: {data}; see its log"
                )
    except (aiohttp.ClientError, asyncio.TimeoutError) as err:
        raise AfdError(f"{server.url} did not tokenise a text ({err!r}); see its log") from None
    return tuple(data["tokens"])


def score(server: Server, material: Material, *, vocabulary: int = 0) -> Scores:
    """Scores a text on a server. Raises AfdError.

    vocabulary: size of the vocabulary, to score ``material.whole``; 0 skips that.
    """
    return asyncio.run(_score(server, material, vocabulary))


async def _score(server: Server, material: Material, vocabulary: int) -> Scores:
    async with open_session() as session:
        gate = asyncio.Semaphore(_AT_ONCE)

        async def one(text: Forced, top: int) -> tuple[list[Position], list[float]]:
            async with gate:
                choice = await forced_choice(session, server.url, server.model, text, top)
            prompt, continuation = len(text.prompt), len(text.continuation)
            positions = parse_positions(choice, prompt, continuation, top) if top else []
            return positions, parse_own(choice, text)

        async def every(
            texts: Sequence[Forced], top: int
        ) -> list[tuple[list[Position], list[float]]]:
            return list(await asyncio.gather(*(one(text, top) for text in texts)))

        read = await every(material.windows, material.top)
        whole = await every(material.whole, vocabulary) if vocabulary else []
        options = await every([option for item in material.cloze for option in item], 0)
    sums = iter(sum(own) for _, own in options)
    return Scores(
        [positions for positions, _ in read],
        [own for _, own in read],
        [[next(sums) for _ in item] for item in material.cloze],
        [positions for positions, _ in whole],
    )
