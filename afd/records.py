"""Benchmark results: one record per measured number, in the JSON files of docs/results.

A file is a list of records. The key of a record is (bench, case, metric, peer). Writing a record
replaces the one with the same key in place; records with new keys are appended.
"""

import argparse
import datetime
import functools
import json
import math
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from afd.errors import AfdError
from afd.host.amd_gpus import architectures

UNKNOWN = "unknown"
"""The commit of a record whose code was not read from a git checkout."""
_COMMIT_VARIABLE = "AFD_COMMIT"


@functools.cache
def current_commit() -> str:
    """Returns the commit of the running code, read once per process.

    The value is the abbreviated hash, with "-dirty" appended if a tracked file outside docs/ is
    modified. The environment variable AFD_COMMIT overrides it, for copies of a checkout without
    .git. Without either, as in an installed wheel, the value is ``UNKNOWN``.
    """
    return os.environ.get(_COMMIT_VARIABLE) or commit_of(Path(__file__))


def commit_of(source: Path) -> str:
    """Returns the commit of the checkout that tracks the file ``source``; see current_commit."""
    # A wheel may be installed below somebody else's checkout, which does not track its files.
    if _git(source.parent, "ls-files", "--error-unmatch", source.name) is None:
        return UNKNOWN
    commit = _git(source.parent, "rev-parse", "--short=12", "HEAD")
    if not commit:
        return UNKNOWN
    # Result pages and records in docs/ change while benches run; they are not what is measured.
    code = ("status", "--porcelain", "--untracked-files=no", "--", ":(top)", ":(top,exclude)docs")
    return f"{commit}-dirty" if _git(source.parent, *code) else commit


def _git(folder: Path, *arguments: str) -> str | None:
    """Returns the output of a git command, or None if git is missing or the command fails."""
    command = ["git", "-C", str(folder), *arguments]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


@dataclass(frozen=True)
class Record:
    """One measured number and the number it is compared with.

    Attributes:
        bench: Name of the benchmark.
        case: What was measured, in one line.
        metric: Name of the quantity.
        value: The measured number.
        unit: Unit of ``value`` and ``peer_value``.
        peer: The system or target compared with.
        peer_value: Its number.
        ratio: Our number relative to the peer's, arranged so that more is better.
        machine: The host, see :func:`machine`.
        command: The command that reproduces the number.
        commit: The measured code, see :func:`current_commit`.
        date: Day of the run, ISO format, UTC.

    Raises:
        ValueError: A number is infinite or NaN, which JSON cannot hold.
    """

    bench: str
    case: str
    metric: str
    value: float
    unit: str
    peer: str
    peer_value: float
    ratio: float
    machine: str
    command: str
    commit: str = field(default_factory=current_commit, kw_only=True)
    date: str

    def __post_init__(self) -> None:
        for name in ("value", "peer_value", "ratio"):
            if not math.isfinite(self.__dict__[name]):
                raise ValueError(
                    f"{name} of {self.key} is {self.__dict__[name]}; it must be finite"
                )

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.bench, self.case, self.metric, self.peer


def read_records(path: Path) -> list[Record]:
    """Returns the records of a file, or an empty list if the file does not exist.

    Raises:
        AfdError: The file is not a list of records.
    """
    if not path.exists():
        return []
    names = {entry.name for entry in fields(Record)}
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as err:
        raise AfdError(
            f"{path} is not JSON ({err}); delete it and run the benchmark again"
        ) from None
    if not isinstance(entries, list) or any(
        not isinstance(entry, dict) or set(entry) != names for entry in entries
    ):
        raise AfdError(f"{path} is not a list of records; delete it and run the benchmark again")
    return [Record(**entry) for entry in entries]


def results_file(text: str) -> Path:
    """Parses the argument ``--out``, so that a wrong path fails before the measurement.

    Raises:
        argparse.ArgumentTypeError: The path is a folder.
    """
    path = Path(text)
    if path.is_dir():
        example = path / "results.json"
        raise argparse.ArgumentTypeError(f"{text} is a folder; name a file, such as {example}")
    return path


def write_records(path: Path, records: Sequence[Record]) -> None:
    """Merges ``records`` into a file; a new record replaces the old one with the same key.

    The file is replaced as by :func:`replace_records`.
    """
    replace_records(path, [*read_records(path), *records])


def replace_records(path: Path, records: Sequence[Record]) -> None:
    """Makes ``records`` the whole of a file; of several with the same key, the last.

    The file is replaced atomically, so that an interrupted benchmark leaves the old one intact.
    """
    merged = {record.key: record for record in records}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    text = json.dumps([asdict(record) for record in merged.values()], indent=1)
    partial.write_text(text + "\n", encoding="utf-8")
    partial.replace(path)


_FOLDERS = ("--out", "--models", "--cache", "--log", "--logs", "--traces")


def command_line(name: str, argv: Sequence[str]) -> str:
    """The command of a record: ``afd bench NAME`` with its arguments, but for folders of this host.

    ``--out``, ``--models``, ``--logs`` and their like say where files go and do not change what is
    measured.
    """
    words, kept = iter(argv), [f"afd bench {name}"]
    for word in words:
        option, equals, _ = word.partition("=")
        if option not in _FOLDERS:
            kept.append(word)
        elif not equals:
            next(words, None)
    return " ".join(kept)


def today() -> str:
    """Returns today's ISO date in UTC."""
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()


def machine() -> str:
    """Describes this host without its name, e.g. ``2 cores AMD EPYC, 24 GiB, no GPU``."""
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    cpu_info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    return describe(cores, cpu_info, memory, gpu_names())


def describe(cores: int, cpu_info: str, memory_bytes: int, gpus: Sequence[str]) -> str:
    """Formats the description that :func:`machine` returns.

    Args:
        cores: Number of CPU cores.
        cpu_info: Text of /proc/cpuinfo.
        memory_bytes: Physical memory.
        gpus: Product name of each GPU.
    """
    models = (line.partition(":")[2] for line in cpu_info.splitlines() if "model name" in line)
    cpu = next(models, "").split(" @")[0]
    for noise in ("(R)", "(TM)", "Processor", "CPU"):
        cpu = cpu.replace(noise, "")
    kinds = [f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)]
    words = f"{cores} core{'s' if cores != 1 else ''} {' '.join(cpu.split())}".strip()
    return f"{words}, {round(memory_bytes / 2**30)} GiB, {', '.join(kinds) or 'no GPU'}"


def gpu_names() -> list[str]:
    """Returns the product names of this host's NVIDIA GPUs, or LLVM's names of its AMD GPUs; empty
    without a driver of either."""
    if shutil.which("nvidia-smi") is None:
        return [f"AMD {arch}" for arch in architectures()]
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return []
    return answer.stdout.split("\n")[:-1] if answer.returncode == 0 else []
