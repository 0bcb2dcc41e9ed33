"""Backend verbs on soft-RoCE devices, in a virtual machine that boots once for all its cases.

The FFN loop has a boot of its own: importing torch takes minutes in the guest.

Not covered: speed, GPU memory, NUMA, flow control of a real fabric (docs/rdma.md).
Skipped, with the reason, where the guest cannot run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
GUEST_S = 600
CAUGHT = 7
"""Exit status of the stress program when a payload check failed (verbs_stress.cc)."""

pytestmark = [pytest.mark.rdma_vm, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Case:
    """Output and exit status of one case."""

    rc: int
    text: str


def build_stress(folder: Path) -> Path:
    # -O1 compiles in half the time of -O2, and most of a case is the guest's kernel.
    flags = ["-DAFD_PYTHON=OFF", "-DAFD_STRESS=ON", "-DCMAKE_BUILD_TYPE=None"]
    flags.append("-DCMAKE_CXX_FLAGS=-O1")
    configure = ["cmake", "-S", ROOT / "comm", "-B", folder, "-G", "Ninja", *flags]
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL, timeout=120)
    build = ["cmake", "--build", folder, "--parallel", "2", "--target", "verbs_stress"]
    subprocess.run(build, check=True, stdout=subprocess.DEVNULL, timeout=600)
    return folder / "verbs_stress"


def run_guest(folder: Path, which: str) -> dict[str, Case]:
    """Boots the guest once. Returns its cases by name; skips where the guest cannot run.

    which: ``CASES`` of cases.sh.
    """
    # inside the checkout, so that only its first run downloads a kernel
    cache = Path(os.environ.get("RDMA_VM_CACHE") or HERE / "build")
    cache.mkdir(parents=True, exist_ok=True)
    ready = subprocess.run(
        ["bash", HERE / "packages.sh", cache], capture_output=True, text=True, timeout=600
    )
    if ready.returncode:
        pytest.skip((ready.stdout.strip() or ready.stderr.strip()).splitlines()[-1])
    stress = build_stress(folder / "build")
    job = folder / "job.sh"
    job.write_text(
        f"HERE={HERE}\nSTRESS={stress}\nPYTHON={sys.executable}\nCASES={which}\n"
        f"export PYTHONPATH={':'.join([str(ROOT), *sys.path[1:]])} OMP_NUM_THREADS=1\n"
        ". $HERE/cases.sh\n"
    )
    done = subprocess.run(
        ["bash", HERE / "guest.sh", job, str(GUEST_S), cache],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=GUEST_S + 60,
    )
    if "GUEST: kernel" not in done.stdout:
        pytest.skip(f"the guest does not boot here: {(done.stdout + done.stderr)[-300:]!r}")
    print(done.stdout)
    found = re.findall(
        r"^BEGIN (\w+)\n(.*?)^END \1 rc=(\d+)", done.stdout, flags=re.MULTILINE | re.DOTALL
    )
    return {name: Case(int(rc), text) for name, text, rc in found}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    return run_guest(tmp_path_factory.mktemp("rdma_vm"), "transport")


def passed(cases: dict[str, Case], name: str, *says: str, rc: int = 0) -> None:
    assert name in cases, f"the guest ended before case {name}; it ran {list(cases)}"
    case = cases[name]
    assert case.rc == rc, case.text
    for text in says:
        assert text in case.text, case.text


def test_sizes_from_64_bytes_to_15_mb(cases: dict[str, Case]) -> None:
    passed(cases, "sizes", "sizes ok")


def test_loss_and_delay(cases: dict[str, Case]) -> None:
    passed(cases, "loss", "all there once")
    dropped = [int(n) for n in re.findall(r"dropped (\d+)", cases["loss"].text)]
    assert sum(dropped) > 0, "no packet was lost, so the case tested nothing"


def test_death_of_either_end(cases: dict[str, Case]) -> None:
    passed(cases, "kill", "the sender's death was seen", "the receiver's death was seen")
    writers = re.search(r"(\d+) kills, (\d+) of them writers", cases["kill"].text)
    assert writers is not None and 0 < int(writers[2]) <= int(writers[1])


def test_either_end_is_stopped(cases: dict[str, Case]) -> None:
    passed(
        cases,
        "stop",
        "a wait for a stopped sender ended",
        "one message per slot came after the receiver went on",
        "to a stopped receiver ended",
        "a receiver that missed messages ended the link",
    )


def test_a_late_message_of_a_dead_generation(cases: dict[str, Case]) -> None:
    passed(cases, "late", "nothing of the older generation came")


@pytest.mark.parametrize("fault", ["offset", "short"])
def test_negative_controls(cases: dict[str, Case], fault: str) -> None:
    """The payload check detects a stripe at a wrong offset, and one that is 64 B short."""
    passed(cases, fault, "caught by the payload check", rc=CAUGHT)


def test_no_such_device(cases: dict[str, Case]) -> None:
    passed(cases, "no_device", "there is no RDMA device 'mlx5_0'", "rxa0, rxa1, rxf0, rxf1", rc=1)


@pytest.mark.parametrize("name", ["sender_port_down", "receiver_port_down"])
def test_a_port_goes_down_in_mid_run(cases: dict[str, Case], name: str) -> None:
    passed(cases, name, "is down", "all there once")


def test_a_link_starts_while_a_port_is_down(cases: dict[str, Case]) -> None:
    passed(cases, "restart_on_one_port", "notes: port rxa1:1 is down", "all there once")


def test_refused_registration(cases: dict[str, Case]) -> None:
    passed(cases, "memlock", "limit of locked memory is 64 KiB", "ulimit -l unlimited")


@pytest.mark.long
def test_the_ffn_loop_over_verbs(tmp_path: Path) -> None:
    passed(run_guest(tmp_path, "ffn_loop"), "ffn_loop", "every answer equals the reference")


@pytest.mark.long
def test_doctor_lists_and_measures_each_port(tmp_path: Path) -> None:
    """A port that is down is bad, and the other one is measured all the same."""
    cases = run_guest(tmp_path, "doctor")
    passed(cases, "doctor", "rxa0:1 active, Ethernet", "gid_index 1", "RoCE v2")
    passed(cases, "rates", "verbs: 1 MiB there and back, bytes equal")
    both, one = cases["rates"].text.split("one port:")
    for port in ("rxa0:1", "rxa1:1"):
        assert len(re.findall(rf"^ok +rdma {port} +(?:rate|latency) ", both, re.MULTILINE)) == 2
    assert len(re.findall(r"^ok +rdma rxa0:1 ", one, re.MULTILINE)) == 2
    assert re.search(r"^bad +rdma rxa1:1 ", one, re.MULTILINE)
    assert len(re.findall(r"^ok +tcp ", both, re.MULTILINE)) >= 3
