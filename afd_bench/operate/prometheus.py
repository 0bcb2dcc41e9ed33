"""A real Prometheus: finds the program, runs it on a deployment, and asks it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from afd.errors import ConfigError
from afd.host.package_data import data_folder
from afd.host.ports import held_ports
from afd_bench.operate.alerts import rule_groups
from afd_bench.servers import server_process

CACHE = Path(tempfile.gettempdir(), "afd-prometheus")
"""Where Debian's package is unpacked by default."""

_START_S = 20.0


def find_programs(cache: Path) -> tuple[Path, Path]:
    """Returns (prometheus, promtool).

    They are looked for on PATH, then in ``cache``, where Debian's package is unpacked if neither
    has them: nothing is installed, and no service starts.

    Raises:
        ConfigError: they are not to be had; the message names the remedy.
    """
    found = [shutil.which(name) for name in ("prometheus", "promtool")]
    if all(found):
        return Path(str(found[0])), Path(str(found[1]))
    folder = cache / "usr" / "bin"
    if not (folder / "promtool").exists():
        _unpack(cache)
    return folder / "prometheus", folder / "promtool"


def _unpack(cache: Path) -> None:
    if shutil.which("apt-get") is None:
        raise ConfigError("no prometheus and no promtool on PATH; install Prometheus")
    cache.mkdir(parents=True, exist_ok=True)
    get = ["apt-get", "download", "-q", "prometheus"]
    done = subprocess.run(get, cwd=cache, capture_output=True, text=True, check=False)
    if done.returncode and os.geteuid() == 0:
        subprocess.run(["apt-get", "update", "-q"], capture_output=True, check=False)
        done = subprocess.run(get, cwd=cache, capture_output=True, text=True, check=False)
    archives = sorted(cache.glob("prometheus_*.deb"))
    if done.returncode or not archives:
        raise ConfigError("apt-get cannot download prometheus; install it, or put it on PATH")
    subprocess.run(["dpkg-deb", "-x", str(archives[-1]), str(cache)], check=True)


@dataclass(frozen=True)
class Series:
    """One line of a range query. points: (unix seconds, value)."""

    labels: Mapping[str, str]
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Prometheus:
    """A running Prometheus. url: without a path."""

    url: str

    def range(self, expr: str, start: float, end: float, step_s: float = 1.0) -> list[Series]:
        """Evaluates an expression over a range. Raises ConfigError with Prometheus' own message."""
        got = self._ask("query_range", query=expr, start=start, end=end, step=step_s)
        return [
            Series(one["metric"], tuple((float(t), float(v)) for t, v in one["values"]))
            for one in got["result"]
        ]

    def firing(self) -> set[str]:
        """Names of the alerts that fire now."""
        got = self._ask("alerts")
        return {a["labels"]["alertname"] for a in got["alerts"] if a["state"] == "firing"}

    def _ask(self, page: str, **arguments: object) -> dict[str, Any]:
        query = urllib.parse.urlencode(arguments)
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{page}?{query}", timeout=20) as answer:
                data: dict[str, Any] = json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            said = json.load(error).get("error", "")
            raise ConfigError(f"Prometheus refuses {arguments}: {said}") from None
        return data


@contextlib.contextmanager
def prometheus(program: Path, targets: Mapping[str, str], folder: Path) -> Iterator[Prometheus]:
    """Runs Prometheus with the shipped configuration and rules, scraping every two seconds.

    Args:
        targets: HOST:PORT by job. The job ``afd`` has the settings of the shipped file.
        folder: for its configuration, data and log.
    """
    shipped = data_folder("afd_launch") / "dashboards" / "prometheus" / "prometheus.yml"
    config = yaml.safe_load(shipped.read_text())
    config["global"] = {
        "scrape_interval": "2s", "scrape_timeout": "2s", "evaluation_interval": "1s"
    }  # fmt: skip
    (job,) = config["scrape_configs"]
    config["scrape_configs"] = [
        {
            **job,
            "job_name": name,
            "static_configs": [{"targets": [address], "labels": {"instance": name}}],
        }
        for name, address in targets.items()
    ]
    rules = rule_groups()
    for group in rules["groups"]:
        group["interval"] = "1s"
    (folder / "alerts.yaml").write_text(yaml.safe_dump(rules))
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with held_ports(["127.0.0.1"]) as (port,):
        argv = [
            str(program),
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{port}",
        ]
        with server_process(argv, os.environ, folder / "prometheus.log"):
            found = Prometheus(f"http://127.0.0.1:{port}")
            _await_ready(found.url, folder / "prometheus.log")
            yield found


def _await_ready(url: str, log: Path) -> None:
    ends = time.monotonic() + _START_S
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/-/ready", timeout=1):
            return
        if time.monotonic() > ends:
            raise ConfigError(f"Prometheus did not start: {log.read_text()[-500:]}")
        time.sleep(0.1)
