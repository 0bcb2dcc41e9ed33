"""A made-up language model behind the endpoints that `afd eval` asks."""

import contextlib
import functools
import itertools
import json
import math
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from afd_bench.servers import Server

VOCAB = 128


@functools.cache
def logprobs(last: int, error: float) -> list[float]:
    """Of the token after ``last``: its neighbours are likely; some tokens shift by ``error``."""
    logits = [-abs(t - last) / 8.0 + error * ((t * 7 + last * 3) % 5 - 2) for t in range(VOCAB)]
    total = math.log(math.fsum(map(math.exp, logits)))
    return [value - total for value in logits]


@functools.cache
def ranked(last: int, error: float) -> dict[int, dict[str, float]]:
    """What a server reports of every token, likeliest first."""
    values = logprobs(last, error)
    order = sorted(range(VOCAB), key=lambda token: (-values[token], token))
    return {t: {"logprob": values[t], "rank": rank} for rank, t in enumerate(order, 1)}


@dataclass
class Model:
    """Tokens are bytes. error: how far from the true model. stuck: the depth cannot be changed.
    steps by depth, prefix_hits: what the metrics say."""

    error: float = 0.0
    depth: int = 1
    stuck: bool = False
    prefix_hits: int = 0
    steps: dict[int, int] = field(default_factory=dict)

    def answer(self, path: str, body: dict[str, object]) -> dict[str, object]:
        if path == "/tokenize":
            prompt = body["prompt"]
            assert isinstance(prompt, str)
            return {"tokens": [c % VOCAB for c in prompt.encode()]}
        self.steps[self.depth] = self.steps.get(self.depth, 0) + 1
        prompt, top = body["prompt"], body["prompt_logprobs"]
        assert isinstance(prompt, list) and isinstance(top, int)
        reported = [self._position(prompt, i, top) for i in range(1, len(prompt))]
        return {"choices": [{"prompt_logprobs": [None, *reported]}]}

    def _position(self, prompt: list[int], index: int, top: int) -> dict[str, object]:
        entries = ranked(prompt[index - 1], self.error)
        shown = dict.fromkeys([prompt[index], *itertools.islice(entries, top)])
        return {str(token): entries[token] for token in shown}

    def metrics(self) -> str:
        lines = [f"vllm:prefix_cache_hits_total {self.prefix_hits}"]
        lines += [
            f'afd_steps_total{{instance="attention-0",depth="{depth}"}} {count}'
            for depth, count in self.steps.items()
        ]
        head = "# TYPE vllm:prefix_cache_hits counter\n"
        return head + lines[0] + "\n# TYPE afd_steps counter\n" + "\n".join(lines[1:]) + "\n"


@dataclass(frozen=True, kw_only=True)
class FakeServer(Server):
    state: Model

    def set_depth(self, depth: int) -> None:
        if not self.state.stuck:
            self.state.depth = depth


@contextlib.contextmanager
def served(model: Model) -> Iterator[FakeServer]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # the body waits for the head's acknowledgement, 40 ms

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self._send(json.dumps(model.answer(self.path, body)), "application/json")

        def do_GET(self) -> None:
            self._send(model.metrics(), "text/plain")

        def _send(self, text: str, kind: str) -> None:
            data = text.encode()
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    class Listener(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64  # of 5, what comes at once beyond is tried again after a second

    server = Listener(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}"
        yield FakeServer(url, "model", Path("none"), "", 0, state=model)
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()
