"""What `afd serve` says while its roles start: from what they log, once for each phase and kind."""

import io
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from test_supervisor import READY, WAIT, Run, role

from afd.host.logs import PHASE
from afd_launch.readiness import health_wait
from afd_launch.role_log import RoleLog
from afd_launch.start_progress import LASTING_S, PROGRESS_S, StartProgress, waiting_for
from afd_launch.supervisor import Stage


class Said:
    """A StartProgress and its lines; times are seconds since the start."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.progress = StartProgress(self.lines.append)

    def follow(self, after_s: float, **phases: str) -> None:
        named = {name.replace("_", "-"): phase for name, phase in phases.items()}
        self.progress.follow(named, self.progress.began + after_s)


def test_a_phase_that_lasts_has_one_line_for_each_kind() -> None:
    said = Said()
    importing = {"attention_0": "importing vLLM", "attention_1": "importing vLLM"}
    said.follow(0, control_0="", ffn_0="importing torch", **importing)
    said.follow(LASTING_S / 2, control_0="", ffn_0="joining", **importing)
    assert said.lines == []
    said.follow(2, control_0="", ffn_0="reading experts: 1.0 of 2.0 GB", **importing)
    said.follow(4, control_0="", ffn_0="reading experts: 1.5 of 2.0 GB", **importing)
    said.follow(6, control_0="", ffn_0="ready", **importing)
    said.follow(9, control_0="", ffn_0="ready", **importing)
    assert said.lines == [
        "2 s, attention-0, one of 2, is importing vLLM",
        "4 s, ffn-0 is reading experts: 1.5 of 2.0 GB",
    ]


def test_a_phase_that_comes_back_is_not_said_again() -> None:
    said = Said()
    for after_s, phase in enumerate(("a", "a", "a", "b", "b", "b", "a", "a", "a")):
        said.follow(after_s, ffn_0=phase)
    assert [line.partition(", ")[2] for line in said.lines] == ["ffn-0 is a", "ffn-0 is b"]


def test_a_reminder_follows_silence_only() -> None:
    said = Said()
    said.follow(0, ffn_0="importing torch")
    said.follow(3, ffn_0="importing torch")
    for after_s in (PROGRESS_S, 3 + PROGRESS_S + 0.5, 3 + PROGRESS_S + 1):
        said.progress.remind("ffn-0 to come", said.progress.began + after_s)
    assert said.lines == ["3 s, ffn-0 is importing torch", "8 s, waiting for ffn-0 to come"]


def test_roles_that_do_the_same_are_one_entry() -> None:
    waits = {f"attention-{i}": "to join the control plane" for i in range(5)}
    waits |= {"ffn-0": "to be ready", "ffn-1": "to be ready", "gateway-0": "to answer"}
    phases = dict.fromkeys(waits, "importing vLLM")
    phases |= {"attention-4": "building the model", "gateway-0": ""}
    phases |= {"ffn-0": "reading experts: 1 of 2 GB", "ffn-1": "reading experts: 2 of 2 GB"}
    assert waiting_for(waits, phases) == (
        "attention-0 and 3 more to join the control plane (importing vLLM);"
        " attention-4 to join the control plane (building the model);"
        " ffn-0, ffn-1 to be ready (reading experts: 1 of 2 GB);"
        " gateway-0 to answer"
    )
    assert waiting_for({"ffn-0": "to be ready"}, {}) == "ffn-0 to be ready"


SLOW = f"""
print("INFO {PHASE}importing torch", flush=True)
time.sleep(1.6)
print("INFO {PHASE}reading experts", flush=True)
print("INFO {PHASE}reading experts: 1.0 of 2.0 GB", flush=True)
time.sleep(0.2)
"""


@pytest.mark.parametrize("to_files", [True, False])
def test_the_supervisor_says_what_a_slow_start_does(tmp_path: Path, to_files: bool) -> None:
    stage = Stage((role(tmp_path, "ffn-0", SLOW + READY + WAIT),), 5)
    (logs := tmp_path / "logs").mkdir()
    run = Run(tmp_path, stage, log_dir=logs if to_files else None)
    assert run.status == 0
    assert len(re.findall(r"^\[afd\] \d s, ffn-0 is importing torch$", run.text, re.M)) == 1
    theirs = (logs / "ffn-0.log").read_text() if to_files else run.text
    assert (f"{PHASE}importing torch" in theirs) is to_files
    assert f"{PHASE}reading experts: 1.0 of 2.0 GB" in theirs


def test_a_start_that_takes_too_long_ends_with_what_the_role_did(tmp_path: Path, capsys) -> None:
    stage = Stage((role(tmp_path, "ffn-0", SLOW.replace("1.6", "60")),), 5)
    run = Run(tmp_path, stage, start_s=1.0)
    assert run.status == 1
    expected = "waiting for ffn-0 to say that it is ready (importing torch)"
    assert expected in capsys.readouterr().err


def test_a_phase_is_read_behind_the_prefix_of_vllm() -> None:
    out = io.StringIO()
    log = RoleLog("ffn-0", out=out)
    log.feed(f"(EngineCore pid=7) INFO {PHASE}capturing graphs\n".encode())
    assert log.phase == "capturing graphs" and "capturing graphs" in out.getvalue()


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (
            json.dumps({"reason": "no attention instance is ready"}),
            "no attention instance is ready",
        ),
        (json.dumps({"reason": None}), "503"),
        ("[]", "503"),
        ("not JSON", "503"),
    ],
)
def test_a_gateway_that_is_not_ready_says_what_it_lacks(body: str, says: str) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(503)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/health"
        assert health_wait(url) == f"to answer {url} with 200 (it says {says})"
        server.shutdown()
