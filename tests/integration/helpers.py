"""Runs deployments the way a user does, and inspects them from outside."""

import contextlib
import json
import os
import random
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import psutil
from leftovers import shared_memory
from prometheus_client.parser import text_string_to_metric_families

from afd.control import operator
from afd.control.messages import Member, Members
from afd.host.ports import accepts
from afd_bench.servers import Server

if TYPE_CHECKING:
    from openai import OpenAI

T = TypeVar("T")

POLL_S = 0.1
VOCAB = 2000  # every tiny model has at least these token ids
HEALTH_S = 120.0  # limit for recovery from a killed instance, on a busy machine


def wait_until(check: Callable[[], T | None], deadline_s: float, what: str) -> T:
    """Returns the first truthy result of ``check``; fails the test after ``deadline_s``."""
    end = time.monotonic() + deadline_s
    while not (answer := check()):
        assert time.monotonic() < end, f"not within {deadline_s:g} s: {what}"
        time.sleep(POLL_S)
    return answer


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """Sets environment variables for the processes started inside the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def tokens_of(text: str, count: int) -> tuple[int, ...]:
    """Returns a prompt of exactly ``count`` token ids, determined by ``text``."""
    draw = random.Random(text)
    return tuple(draw.randrange(16, VOCAB) for _ in range(count))


# -- a deployment, from outside


@dataclass(frozen=True)
class Running:
    """A deployment under test. folder: TMPDIR of all its processes, which identifies them."""

    server: Server
    folder: Path
    shm_before: frozenset[str]

    @property
    def url(self) -> str:
        return self.server.url

    def client(self) -> "OpenAI":
        return openai_client(self.url)

    def metrics(self, having: str = "") -> "Scrape":
        """having: a metric to wait for. A busy API server may miss the gateway's deadline."""

        def page() -> "Scrape | None":
            found = Scrape(self.server.metrics())
            return found if not having or found.values(having) else None

        return wait_until(page, 10, f"{having} is on the metrics page")

    def total(self, metric: str, **labels: str) -> float:
        """The metric's total, once the page has it."""
        return self.metrics(having=metric).total(metric, **labels)

    def members(self) -> Members:
        return operator.status(self.server.control)

    def member(self, member_id: str) -> Member:
        found = [m for m in self.members().members if m.id == member_id]
        assert found, f"{member_id} is not registered"
        return found[0]

    def generation(self, member_id: str) -> int | None:
        """Returns the member's generation, or None while it is not registered."""
        found = [m.generation for m in self.members().members if m.id == member_id]
        return found[0] if found else None

    def is_running(self) -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(self.server.pid).status() != psutil.STATUS_ZOMBIE
        return False

    def is_whole(self) -> bool:
        """Whether every expected member is ready and healthy."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                members = json.load(answer)["members"]
        except OSError:
            return False
        return all(
            (member["state"], member["health"] or "healthy") == ("ready", "healthy")
            for member in members
        )

    def is_back(self, before: Member) -> bool:
        """Whether a killed member has come back, and all are whole.

        Until its end is seen, all are whole too, with the member of before.
        """
        return (self.generation(before.id) or 0) > before.generation and self.is_whole()

    def await_exit(self, deadline_s: float) -> int:
        """Returns the exit status of ``afd serve``, as its parent sees it."""
        return int(psutil.Process(self.server.pid).wait(deadline_s))

    def ports(self) -> list[tuple[str, int]]:
        """Returns (address, port) of every TCP socket on which the processes listen now."""
        found = []
        for pid in processes_of(self.folder):
            with contextlib.suppress(psutil.Error):
                found += [
                    (c.laddr.ip, c.laddr.port)
                    for c in psutil.Process(pid).net_connections("tcp")
                    if c.status == psutil.CONN_LISTEN
                ]
        return found

    def await_nothing_left(self, ports: Sequence[tuple[str, int]], deadline_s: float) -> None:
        """Fails the test if :meth:`left_over` still finds something at the deadline."""
        end = time.monotonic() + deadline_s
        while (left := self.left_over(ports)) and time.monotonic() < end:
            time.sleep(POLL_S)
        assert left == [], left

    def left_over(self, ports: Sequence[tuple[str, int]]) -> list[str]:
        """Returns what an ended deployment has left behind; the list should be empty."""
        files = [p for p in self.folder.iterdir() if p != self.server.log.parent]
        ours = {child.pid for child in psutil.Process().children()}  # the server's watchdog
        return [
            *(
                f"process {p} {text}"
                for p, text in processes_of(self.folder).items()
                if p not in ours
            ),
            *(f"file {path}" for path in files),
            *(f"shared memory {name}" for name in shared_memory() - self.shm_before),
            *(f"listener {host}:{port}" for host, port in ports if accepts(host, port)),
        ]


def processes_of(folder: Path) -> dict[int, str]:
    """Returns pid -> command of all live processes with ``folder`` in their environment.

    Children inherit the environment, whatever their process group or parent.
    """
    found = {}
    for pid in psutil.pids():
        with contextlib.suppress(OSError):  # the process has ended meanwhile
            # environ is empty for zombies
            if os.fsencode(folder) in Path(f"/proc/{pid}/environ").read_bytes():
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                found[pid] = command.replace(b"\0", b" ").decode()[:160]
    return found


def answers(url: str) -> bool:
    """Whether a GET returns status 200."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


class Scrape:
    """A parsed Prometheus page."""

    def __init__(self, text: str) -> None:
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self._samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
        for family in self.families.values():
            for sample in family.samples:
                self._samples.setdefault(sample.name, []).append((sample.labels, sample.value))

    def values(self, name: str, **labels: str) -> list[float]:
        """Returns the values of all samples with this name whose labels include the given ones."""
        return [
            value
            for found, value in self._samples.get(name, [])
            if all(found.get(key) == wanted for key, wanted in labels.items())
        ]

    def total(self, name: str, **labels: str) -> float:
        values = self.values(name, **labels)
        assert values, f"no sample {name}{labels or ''} on the page"
        return sum(values)

    def labels(self, name: str) -> list[Mapping[str, str]]:
        return [found for found, _ in self._samples.get(name, [])]


# -- clients


def openai_client(url: str) -> "OpenAI":
    from openai import OpenAI  # installed with vLLM; without vLLM these tests are skipped

    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)


@dataclass
class Stream:
    """One greedy streamed completion, read by its own thread.

    times: monotonic seconds at which each chunk arrived. instance: the attention instance that
    serves the stream.
    """

    url: str
    prompt: tuple[int, ...]
    new_tokens: int
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    instance: str = ""
    finish: str | None = None
    error: Exception | None = None
    model: str = "model"

    def start(self) -> "Stream":
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        return self

    def join(self, deadline_s: float) -> "Stream":
        self._thread.join(deadline_s)
        assert not self._thread.is_alive(), f"a stream has not ended within {deadline_s:g} s"
        return self

    def longest_gap(self, since: float) -> float:
        """Returns the longest gap between two chunks in seconds, of gaps ending after ``since``."""
        pairs = zip(self.times, self.times[1:], strict=False)
        return max((b - a for a, b in pairs if b > since), default=0.0)

    def _read(self) -> None:
        try:
            with openai_client(self.url).completions.create(
                model=self.model,
                prompt=list(self.prompt),
                max_tokens=self.new_tokens,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            ) as chunks:
                self.instance = chunks.response.headers.get("x-afd-instance", "")
                for chunk in chunks:
                    self.times.append(time.monotonic())
                    for choice in chunk.choices:
                        self.tokens += (choice.model_extra or {}).get("token_ids") or []
                        self.finish = choice.finish_reason or self.finish
        except Exception as error:  # checked by the test in its own thread
            self.error = error


def start_streams(url: str, count: int, new_tokens: int, *, name: str = "load") -> list[Stream]:
    """Starts ``count`` streams with prompts of 5 to 40 tokens; ``name`` determines the prompts."""
    return [
        Stream(url, tokens_of(f"{name}{i}", 5 + 35 * i // count), new_tokens).start()
        for i in range(count)
    ]


def all_begun(streams: Sequence[Stream], deadline_s: float = 60.0, tokens: int = 2) -> None:
    """Waits until every stream has received its first tokens or failed."""
    wait_until(
        lambda: all(len(s.tokens) >= tokens or s.error for s in streams),
        deadline_s,
        f"every stream has begun; tokens at first: {[len(s.tokens) for s in streams]}",
    )


def tokens_when_whole(streams: Sequence[Stream], deadline_s: float) -> list[list[int]]:
    """Waits for every stream to end at its full length; returns the tokens of each."""
    for stream in streams:
        stream.join(deadline_s)
        assert stream.error is None, f"a stream failed: {stream.error!r}"
        assert (stream.finish, len(stream.tokens)) == ("length", stream.new_tokens)
    return [stream.tokens for stream in streams]
