"""One PNG per panel, drawn from Prometheus' answers: what an operator sees, without Grafana."""

from __future__ import annotations

import re
from pathlib import Path

from afd_bench.operate.watched import Shown, Watched

_SCALE = {
    "s": (1e3, "ms"),
    "percentunit": (100.0, "percent"),
    "bytes": (1 / 2**20, "MiB"),
    "Bps": (1 / 2**20, "MiB/s"),
    "reqps": (1.0, "requests/s"),
    "short": (1.0, ""),
}


def draw(watched: Watched, folder: Path) -> list[Path]:
    """Writes one PNG per panel into ``folder``; a dashed line marks the kill. Returns the files."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for shown in watched.shown:
        figure, axes = plt.subplots(figsize=(5.2, 2.6), dpi=80)
        factor, unit = _SCALE[shown.panel.unit]
        lines = _lines(shown)
        first = min((t for _, points in lines for t, _ in points), default=0.0)
        for label, points in lines:
            times = [t - first for t, _ in points]
            axes.plot(times, [v * factor for _, v in points], label=label, linewidth=1.2)
        axes.axvline(watched.killed_at, color="grey", linestyle="--", linewidth=0.8)
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
        (re.sub(r"\{\{(\w+)\}\}", lambda m, s=one: s.labels.get(m[1], ""), legend), one.points)
        for legend, found in shown.series
        for one in found
    ]
