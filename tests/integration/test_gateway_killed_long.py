"""Gateway processes are killed under streams whose clients come back for the rest.

AFD_FAULTS is the number of kills, AFD_TEST_SEED repeats the moments of a run.
"""

import http.client
import json
import os
import random
import signal
import threading
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import pytest
from deployments import Host
from helpers import HEALTH_S, tokens_of, wait_until

pytestmark = [pytest.mark.serve, pytest.mark.long]

KILLS = int(os.environ.get("AFD_FAULTS", "3"))
SEED = os.environ.get("AFD_TEST_SEED", str(time.time_ns()))
TOKENS, STREAMS = 300, 16


@dataclass
class Client:
    """Reads one stream to its end, whatever number of connections that takes."""

    url: str
    number: int
    name: str
    events: list[tuple[int, str]] = field(default_factory=list)
    connections: int = 0
    error: str = ""

    def start(self) -> "Client":
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        return self

    def join(self) -> "Client":
        self._thread.join(120)
        assert not self._thread.is_alive() and not self.error, self.error
        return self

    @property
    def tokens(self) -> list[int]:
        bodies = [json.loads(data) for _, data in self.events[:-1]]
        assert len({body["id"] for body in bodies}) == 1
        return [t for body in bodies for c in body["choices"] for t in c["token_ids"] or ()]

    def _read(self) -> None:
        while not self.error and not (self.events and self.events[-1][1] == "[DONE]"):
            self.connections += 1
            try:
                self._connect()
            except (OSError, http.client.HTTPException):
                time.sleep(0.05)

    def _connect(self) -> None:
        where = urlsplit(self.url)
        connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=60)
        body = {
            "model": "model", "prompt": list(tokens_of(f"kill{self.number}", 20)), "stream": True,
            "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        last = self.events[-1][0] if self.events else 0
        headers = {
            "Content-Type": "application/json",
            "X-Request-Id": f"{self.name}-{self.number}",
            "Last-Event-ID": str(last),
        }
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            self.error = f"{answer.status} {answer.read()!r}"
            return
        number = 0
        while line := answer.readline().decode():
            if line.startswith("id: "):
                number = int(line[4:])
            elif line.startswith("data: "):
                if '"error"' in line:
                    self.error = line
                    return
                self.events.append((number, line[6:].rstrip("\n")))
        connection.close()


def read_all(url: str, name: str) -> list[Client]:
    return [Client(url, number, name).start() for number in range(STREAMS)]


def test_no_event_is_lost_or_repeated(host: Host, capsys: pytest.CaptureFixture[str]) -> None:
    deployment = host.serve("gateways")
    draw = random.Random(SEED)
    wanted = [client.join().tokens for client in read_all(deployment.url, "undisturbed")]
    assert all(len(tokens) == TOKENS for tokens in wanted)
    came_back = 0
    for kill in range(KILLS):
        clients = read_all(deployment.url, f"kill-{kill}")
        time.sleep(draw.uniform(0.3, 2.0))
        victim = deployment.member(f"gateway-{kill % 2}")
        os.kill(victim.pid, signal.SIGKILL)
        for client, tokens in zip(clients, wanted, strict=True):
            client.join()
            numbers = [number for number, _ in client.events]
            assert numbers == list(range(1, len(numbers) + 1))  # an event may have several tokens
            assert client.tokens == tokens
        came_back += sum(client.connections - 1 for client in clients)

        def is_back(member: str = victim.id, before: int = victim.generation) -> bool:
            return (deployment.generation(member) or 0) > before

        wait_until(is_back, HEALTH_S, "the gateway process is back")
    with capsys.disabled():
        print(f"\n{KILLS} kills, seed {SEED}: {came_back} connections broke, 0 events lost")
    assert came_back
    name = [client.join() for client in read_all(deployment.url, "kill-0")]  # all are kept
    assert [client.tokens for client in name] == wanted
