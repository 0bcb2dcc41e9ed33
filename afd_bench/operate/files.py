"""Writes the dashboards and alert rules: `python -m afd_bench.operate.files`.

The package has them for `afd examples`; the Helm chart has copies, because Helm reads no file
outside of a chart. A test checks that the files are what this module writes today.
"""

from __future__ import annotations

from pathlib import Path

import yaml

from afd_bench.operate.alerts import rule_groups
from afd_bench.operate.perses import perses_json

ROOT = Path(__file__).parents[2]
_DATA = ROOT / "afd_launch" / "data" / "dashboards"
_CHART = ROOT / "deploy" / "helm" / "afd" / "files"
_HEAD = (
    "# Written by `python -m afd_bench.operate.files`; the source is afd_bench/operate/alerts.py.\n"
)


def alerts_yaml() -> str:
    return _HEAD + yaml.safe_dump(rule_groups(), sort_keys=False, width=100)


def texts() -> dict[Path, str]:
    """Returns the text of each file. Needs the package grafana-foundation-sdk."""
    from afd_bench.operate.grafana import grafana_json

    board, alerts = grafana_json(), alerts_yaml()
    return {
        _DATA / "grafana" / "afd.json": board,
        _DATA / "perses" / "afd.json": perses_json(),
        _DATA / "prometheus" / "alerts.yaml": alerts,
        _CHART / "afd.json": board,
        _CHART / "alerts.yaml": alerts,
    }


def main() -> None:
    for path, text in texts().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
