"""`afd bench versions`: runs tests on the vLLM of this environment and records how many passed.

It needs a checkout with the test tools. Run it in each environment of `./run test-vllm VERSION`:
`.venv-vllm-0.30.0/bin/afd bench versions tests/identity tests/integration/test_pair.py`. A path
that takes too long for one run is run in parts with `pytest --junitxml`; `--reports` counts them.
For tests that ask vLLM for its second-generation runner, say `--runner second`:
`afd bench versions --runner second -m long tests/integration/test_second_runner.py`.
"""

import argparse
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from afd.errors import ConfigError
from afd.records import Record, command_line, machine, results_file, today, write_records
from attention_worker.vllm_hooks.versions import Installed, installed

ROOT = Path(__file__).parents[1]
RUNNERS = {"first": "first-generation runner", "second": "second-generation runner"}
DEFAULT = ("tests/unit/attention", "tests/identity", "tests/integration")


@dataclass(frozen=True)
class Count:
    """Tests of one path. ran: those that were not skipped."""

    path: str
    passed: int
    ran: int


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 1 if a test failed, else 0."""
    parser = argparse.ArgumentParser(prog="afd bench versions", description=__doc__)
    parser.add_argument("paths", nargs="*", default=DEFAULT, help="files and folders of tests")
    parser.add_argument(
        "--out",
        type=results_file,
        default=ROOT / "docs/results/versions.json",
        help="file of the records; default: %(default)s",
    )
    parser.add_argument("-m", dest="marks", default="", help="pytest's -m: the marks of the tests")
    parser.add_argument(
        "--runner",
        choices=RUNNERS,
        default="first",
        help="vLLM's model runner that the tests ask for; it is named in the records only",
    )
    parser.add_argument(
        "--reports",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="JUnit reports of pytest in this environment that together ran the paths, oldest"
        " first: a test that several have counts as in the last one",
    )
    args = parser.parse_args(argv)
    vllm = installed()
    if vllm is None:
        raise ConfigError("vLLM is not installed; run ./run test-vllm VERSION first")
    missing = [path for path in args.paths if not (ROOT / path).exists()]
    if missing:
        raise ConfigError(f"{', '.join(missing)} does not exist in {ROOT}; run it in a checkout")
    counts = []
    for path in args.paths:
        reports = _texts(args.reports) if args.reports else [run(path, args.marks)]
        counts.append(counted(path, reports))
        if not counts[-1].ran:
            raise ConfigError(f"no test of {path} has run; give a path whose tests have")
        options = ["--runner", args.runner] * (args.runner != "first")
        options += ["-m", args.marks] * bool(args.marks)
        command = command_line("versions", [*options, path])
        record = record_of(counts[-1], vllm, RUNNERS[args.runner], command)
        write_records(args.out, [record])
        print(f"{record.case}: {counts[-1].passed} of {counts[-1].ran} passed", flush=True)
    return 0 if all(c.passed == c.ran for c in counts) else 1


def run(path: str, marks: str = "") -> str:
    """Runs pytest on a path and returns its JUnit report.

    Raises:
        ConfigError: pytest collected nothing, or could not run.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", path]
        command += ["-m", marks] if marks else []
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        if status not in (0, 1) or not report.exists():
            raise ConfigError(f"pytest {path} ended with status {status}; see its output above")
        return report.read_text()


def counted(path: str, reports: Sequence[str]) -> Count:
    """Returns the numbers of the tests of ``path`` in pytest's JUnit reports.

    A test counts as in the last report that has it.
    """
    module = ".".join(Path(path).with_suffix("").parts)
    found: dict[tuple[str, str], set[str]] = {}
    for report in reports:
        cases: dict[tuple[str, str], set[str]] = {}
        for case in ElementTree.fromstring(report).iter("testcase"):
            if "name" not in case.attrib:
                continue  # pytest was interrupted in the middle of this one
            if not f"{case.attrib['classname']}.".startswith(f"{module}."):
                continue
            # One that fails again in its teardown has two entries.
            key = (case.attrib["classname"], case.attrib["name"])
            cases.setdefault(key, set()).update(child.tag for child in case)
        found |= cases
    ran = [tags for tags in found.values() if "skipped" not in tags]
    return Count(path, sum(not tags & {"failure", "error"} for tags in ran), len(ran))


def _texts(files: Sequence[Path]) -> list[str]:
    """Raises ConfigError."""
    try:
        return [file.read_text() for file in files]
    except OSError as err:
        raise ConfigError(f"cannot read the report {err.filename}: {err.strerror}") from None


def record_of(count: Count, vllm: Installed, runner: str, command: str) -> Record:
    """Returns the record of one path on one version."""
    case = f"{vllm.distribution} {vllm.version}, {runner}, {count.path}"
    ratio = round(count.passed / count.ran, 4) if count.ran else 0.0
    return Record(
        "versions", case, "passed", count.passed, "tests", "tests run", count.ran, ratio,
        machine(), command, date=today(),
    )  # fmt: skip
