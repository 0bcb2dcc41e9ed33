"""Which attention instance gets a request: by the beginning of its prompt, and by load.

An instance keeps the KV cache of prompts that it computed (vLLM's prefix cache), so a request whose
prompt begins alike costs less there. The gateway remembers which instance got which beginnings. It
is a guess: the instance may have evicted them since, and then computes them again.

The beginning of a prompt is divided into blocks of text. Each block is named by a hash of all text
up to its end.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from typing import Literal

import msgspec

from afd_gateway.upstreams import MemberState, Task, View

Key = tuple[str, int, str]
Prompt = tuple[bytes, ...]
"""Names of the blocks of a prompt's beginning; () if it is unknown or shorter than a block."""

_BLOCK = 512  # bytes of JSON; about 128 tokens
_BLOCKS = 64  # of a prompt
_MAX_BODY = 4 * 2**20  # a longer body is not read for this
_REMEMBERED = 65536  # blocks per gateway process
_FULL = 0.95  # of the KV cache
_SLACK = 4
_SLACK_SHARE = 0.5

Routing = Literal["prefix", "fewest"]


class _Body(msgspec.Struct):
    """The fields of OpenAI's and Anthropic's requests that a prompt is made of."""

    model: msgspec.Raw = msgspec.Raw(b"")
    cache_salt: msgspec.Raw = msgspec.Raw(b"")
    tools: msgspec.Raw = msgspec.Raw(b"")
    system: msgspec.Raw = msgspec.Raw(b"")
    instructions: msgspec.Raw = msgspec.Raw(b"")
    prompt: msgspec.Raw = msgspec.Raw(b"")
    messages: msgspec.Raw = msgspec.Raw(b"")
    input: msgspec.Raw = msgspec.Raw(b"")


_decoder = msgspec.json.Decoder(_Body)


def prompt_of(body: bytes) -> Prompt:
    """Returns the names of the blocks of a request's prompt. Any bytes may be given."""
    if not _BLOCK <= len(body) <= _MAX_BODY:
        return ()
    try:
        fields = _decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return ()
    # In the order of chat templates: tools and system text come before the messages.
    parts = (
        fields.model, fields.cache_salt, fields.tools, fields.system, fields.instructions,
        fields.prompt, fields.messages, fields.input,
    )  # fmt: skip
    text = b"\0".join(bytes(memoryview(part)[: _BLOCK * _BLOCKS]) for part in parts)
    so_far = hashlib.blake2b(digest_size=12)
    names = []
    for begin in range(0, min(len(text), _BLOCK * _BLOCKS) - _BLOCK + 1, _BLOCK):
        so_far.update(text[begin : begin + _BLOCK])
        names.append(so_far.digest())
    return tuple(names)


class Beginnings:
    """Which instances got which blocks lately. Bounded; the least recently used are forgotten."""

    def __init__(self, limit: int = _REMEMBERED) -> None:
        self._limit = limit
        self._holders: OrderedDict[bytes, set[Key]] = OrderedDict()

    def matches(self, prompt: Prompt) -> dict[Key, int]:
        """Returns how many of the prompt's first blocks each instance got."""
        found: dict[Key, int] = {}
        alive: set[Key] | None = None
        for number, block in enumerate(prompt, start=1):
            holders = self._holders.get(block)
            if holders is None:
                break
            alive = set(holders) if alive is None else alive & holders
            if not alive:
                break
            found.update(dict.fromkeys(alive, number))
        return found

    def add(self, prompt: Prompt, key: Key) -> None:
        for block in prompt:
            self._holders.setdefault(block, set()).add(key)
            self._holders.move_to_end(block)
        while len(self._holders) > self._limit:
            self._holders.popitem(last=False)

    def forget(self, key: Key) -> None:
        """Forgets an instance that ended."""
        for block in [block for block, holders in self._holders.items() if key in holders]:
            self._holders[block].discard(key)
            if not self._holders[block]:
                del self._holders[block]


def able(
    views: Iterable[View],
    exclude: Collection[Key] = (),
    state: MemberState = "ready",
    *,
    limit: int | None = None,
    task: Task = "generate",
) -> list[View]:
    """Returns the healthy views; without those that are at ``limit`` if others are not, and
    without those whose KV cache is full if others' are not.

    Args:
        exclude: keys of upstreams that this request has tried already.
        state: only members in this state. task: only members that do it.
    """
    found = [v for v in views if v.in_state(state, task) and v.upstream.key not in exclude]
    if limit is not None:
        found = [view for view in found if view.load < limit] or found
    return [view for view in found if view.kv_usage < _FULL] or found


def choose(
    candidates: Sequence[View], matches: dict[Key, int], prompt: Prompt = (), *, turn: int = 0
) -> View | None:
    """Returns the view for a request; None without candidates.

    It is the one that got most of the prompt's beginning, unless its load is clearly above the
    lowest. Ties go to the lowest load. Then, for a known prompt, all gateway processes agree on one
    instance; else ``turn``, a number of the process, decides, so that processes differ.
    """
    if not candidates:
        return None
    lowest = min(view.load for view in candidates)
    most = lowest + max(_SLACK, _SLACK_SHARE * lowest)

    def rank(view: View) -> tuple[int, int, bytes, int]:
        matched = matches.get(view.upstream.key, 0) if view.load <= most else 0
        place = _place(prompt[0], view.upstream.id) if prompt else b""
        return -matched, view.load, place, (view.upstream.index - turn) % 2**20

    return min(candidates, key=rank)


def _place(block: bytes, name: str) -> bytes:
    """Returns the place of an instance in the order of instances that a block has."""
    return hashlib.blake2b(name.encode(), key=block, digest_size=8).digest()


class Router:
    """Chooses instances and remembers the choices.

    Args:
        limit: requests that an instance has at a time; None: no limit.
        turn: see ``choose``. task: of the instances.
    """

    def __init__(
        self,
        routing: Routing,
        limit: int | None = None,
        turn: int = 0,
        task: Task = "generate",
    ) -> None:
        self._beginnings = Beginnings() if routing == "prefix" else None
        self._limit = limit
        self._turn = turn
        self._task = task

    def choose(
        self,
        views: Iterable[View],
        exclude: Collection[Key] = (),
        body: bytes = b"",
        state: MemberState = "ready",
    ) -> View | None:
        """Returns the view for a request with this body; None if no instance can take it.

        exclude, state: see ``able``.
        """
        candidates = able(views, exclude, state, limit=self._limit, task=self._task)
        if self._beginnings is None or len(candidates) < 2:
            return choose(candidates, {}, turn=self._turn)
        prompt = prompt_of(body)
        chosen = choose(candidates, self._beginnings.matches(prompt), prompt, turn=self._turn)
        if chosen is not None:
            self._beginnings.add(prompt, chosen.upstream.key)
        return chosen

    def forget(self, key: Key) -> None:
        """Forgets an instance that ended."""
        if self._beginnings is not None:
            self._beginnings.forget(key)
