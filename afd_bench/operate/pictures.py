"""One PNG per panel, drawn from Prometheus' answers: what an operator sees, without Grafana."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from afd_bench.operate.panels import ROWS
from afd_bench.operate.watched import Shown, Watched

_SCALE = {
    "s": (1e3, "ms"),
    "percentunit": (100.0, "percent"),
    "bytes": (1 / 2**20, "MiB"),
    "Bps": (1 / 2**20, "MiB/s"),
    "reqps": (1.0, "requests/s"),
    "short": (1.0, ""),
}


_PAGE = """# The dashboard, seen with data

Written by `afd bench operate --page docs/dashboard.md`: a real Prometheus watched 2A2F of the demo
model on two CPU cores under load. The dashed line marks where an FFN instance was killed. Panels
marked * need GPUs or RDMA ports; a stand-in fed them. Each picture is drawn from Prometheus' answer
to the panel's query, in place of a screen of Grafana.
"""


def write_page(watched: Watched, page: Path) -> int:
    """Writes a page with all pictures, which go to images/dashboard beside it. Returns how many."""
    folder = page.parent / "images" / "dashboard"
    drawn = dict(
        zip((shown.panel.title for shown in watched.shown), draw(watched, folder), strict=True)
    )
    lines = [_PAGE]
    for row in ROWS:
        lines += [f"## {row.title}", ""]
        for panel in row.panels:
            mark = " *" if panel.needs in ("graphs", "rdma") else ""
            place = drawn[panel.title].relative_to(page.parent)
            lines += [
                f"**{panel.title}**{mark}. {panel.text}",
                "",
                f"![{panel.title}]({place})",
                "",
            ]
    page.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")
    return len(drawn)


def draw(watched: Watched, folder: Path) -> list[Path]:
    """Writes one PNG per panel into ``folder``; a dashed line marks the kill. Returns the files."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for shown in watched.shown:
        figure, axes = plt.subplots(figsize=(5.2, 2.4), dpi=72)
        factor, unit = _SCALE[shown.panel.unit]
        lines = _lines(shown)
        for label, points in lines:
            times = [t - watched.began for t, _ in points]
            axes.plot(times, [v * factor for _, v in points], label=label, linewidth=1.2)
        axes.axvline(watched.killed_at - watched.began, color="grey", linestyle="--", linewidth=0.8)
        axes.set_title(shown.panel.title, fontsize=9, loc="left")
        axes.set_ylabel(unit, fontsize=7)
        axes.set_xlabel("s", fontsize=7)
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.3)
        if lines and len(lines) <= 10:
            axes.legend(fontsize=6, loc="upper left", frameon=False)
        figure.tight_layout()
        path = folder / f"{re.sub('[^a-z0-9]+', '-', shown.panel.title.lower()).strip('-')}.png"
        figure.savefig(path, metadata={"Software": None})
        plt.close(figure)
        made.append(path)
    return made


def _lines(shown: Shown) -> list[tuple[str, tuple[tuple[float, float], ...]]]:
    return [
        (_named(legend, one.labels), one.points) for legend, found in shown.series for one in found
    ]


def _named(legend: str, labels: Mapping[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), legend)
