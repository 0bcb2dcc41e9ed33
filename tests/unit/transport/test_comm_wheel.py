"""The afd_comm wheel: its linked libraries, and its independence of the rest of the project."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import afd_comm

ROOT = Path(__file__).parents[3]
EXTENSION = Path(str(sys.modules["afd_comm._core"].__file__))

# Libraries of every Linux with Python. All others (RDMA, GPU, NUMA) are loaded with dlopen.
SYSTEM = {
    "libc.so.6",
    "libdl.so.2",
    "libgcc_s.so.1",
    "libm.so.6",
    "libpthread.so.0",
    "librt.so.1",
    "libstdc++.so.6",
}


def needed(library: Path) -> set[str]:
    """Returns the library's DT_NEEDED entries."""
    readelf = shutil.which("readelf")
    if readelf is None:
        pytest.skip("readelf (binutils) is not installed")
    text = subprocess.run([readelf, "-d", library], capture_output=True, text=True, check=True)
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", text.stdout))


def test_the_extension_links_only_to_system_libraries() -> None:
    libraries = {n for n in needed(EXTENSION) if not n.startswith(("ld-linux", "libpython"))}
    assert libraries <= SYSTEM, f"linked at build time: {libraries - SYSTEM}"


def test_no_libraries_are_bundled() -> None:
    folder = Path(str(afd_comm.__file__)).parent
    libraries = [p.name for p in folder.rglob("*.so*")]
    assert libraries == [EXTENSION.name]
    assert not list(folder.parent.glob("afd_comm.libs"))


def test_it_works_without_the_rest_of_the_project(tmp_path: Path) -> None:
    code = (
        "import sys; from afd_comm import Link, Message, Region, Status, make_flag\n"
        "r = Region(1, 64, name='alone'); l = Link(r.addresses, timeout_us=1000)\n"
        "assert l.post(Message(0, []), make_flag(1, 1)) == Status.OK\n"
        "ours = {'afd', 'attention_worker', 'ffn_worker', 'torch', 'vllm'}\n"
        "assert not ours & set(sys.modules), ours & set(sys.modules)\n"
    )
    path = str(Path(str(afd_comm.__file__)).parents[1])
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr


def test_the_stub_file_matches_the_extension() -> None:
    """The .pyi has exactly the names of the extension."""
    source = (ROOT / "comm" / "python" / "afd_comm" / "_core.pyi").read_text(encoding="utf-8")
    names = r"^(?:class|def) (\w+)(?!\w|\(Protocol)|^(\w+): "  # protocols are for type checkers
    declared = set(re.findall(names, source, re.MULTILINE))
    core = sys.modules["afd_comm._core"]
    public = {n for n in vars(core) if not n.startswith("_")}
    assert {a or b for a, b in declared} == public >= set(afd_comm.__all__)
    for name in public:
        member = vars(core)[name]
        if not isinstance(member, type) or name in ("Status", "CommError"):
            continue
        body = re.search(rf"^class {name}\b.*?(?=^\S)", source + "\nend", re.M | re.S)
        assert body is not None
        stubbed = set(re.findall(r"def (\w+)", body.group()))
        real = {n for n in vars(member) if not n.startswith("_")}
        assert real == {n for n in stubbed if not n.startswith("_")}, name
