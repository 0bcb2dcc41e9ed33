"""Results of benchmarks: one frozen record per measured number, in JSON files below docs/results.

A file is a list of records in the order in which their keys first appeared. A record's key is
(bench, case, metric); writing a record again replaces the earlier one.
"""

import argparse
import datetime
import json
import math
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from afd.errors import AfdError


@dataclass(frozen=True)
class Record:
    """One number and what it is compared with.

    bench: name of the benchmark. case: what was measured, as one line of words. metric, unit: of
    ``value`` and ``peer_value``. peer: the system compared with. ratio: ours against the peer's (or
    against the target that the benchmark's page names), stated so that more is better. machine: see
    :func:`machine`. command: what reproduces it. date: ISO, the day of the run.

    Raises:
        ValueError: a number is infinite or NaN, which JSON cannot hold.
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
    """Records of a file; none if it does not exist. Raises AfdError if it holds anything else."""
    if not path.exists():
        return []
    names = {field.name for field in fields(Record)}
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
    """An argument that says where results go, read before anything is measured.

    Raises:
        argparse.ArgumentTypeError: it is a folder.
    """
    path = Path(text)
    if path.is_dir():
        example = path / "results.json"
        raise argparse.ArgumentTypeError(f"{text} is a folder; name a file, such as {example}")
    return path


def write_records(path: Path, records: Sequence[Record]) -> None:
    """Add ``records`` to a file, in place of earlier ones with the same key.

    The file is replaced in one step: an interrupted benchmark leaves the old one whole.
    """
    merged = {record.key: record for record in (*read_records(path), *records)}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    text = json.dumps([asdict(record) for record in merged.values()], indent=1)
    partial.write_text(text + "\n", encoding="utf-8")
    partial.replace(path)


def today() -> str:
    """ISO date in UTC."""
    return datetime.datetime.now(datetime.timezone.utc).date().isoformat()


def machine() -> str:
    """This host in a few words, without its name: ``2 cores AMD EPYC, 24 GiB, no GPU``."""
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    cpu_info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    return describe(cores, cpu_info, memory, gpu_names())


def describe(cores: int, cpu_info: str, memory_bytes: int, gpus: Sequence[str]) -> str:
    """The words of :func:`machine`. cpu_info: text of /proc/cpuinfo. Pure."""
    models = (line.partition(":")[2] for line in cpu_info.splitlines() if "model name" in line)
    cpu = next(models, "").split(" @")[0]
    for noise in ("(R)", "(TM)", "Processor", "CPU"):
        cpu = cpu.replace(noise, "")
    kinds = [f"{gpus.count(name)} x {name}" for name in dict.fromkeys(gpus)]
    words = f"{cores} core{'s' if cores != 1 else ''} {' '.join(cpu.split())}".strip()
    return f"{words}, {round(memory_bytes / 2**30)} GiB, {', '.join(kinds) or 'no GPU'}"


def gpu_names() -> list[str]:
    """Product names of this host's NVIDIA GPUs; empty where their driver is not installed."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return []
    return answer.stdout.split("\n")[:-1] if answer.returncode == 0 else []
