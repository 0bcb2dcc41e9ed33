"""The same dashboard for Perses, as plain JSON: Perses has no builder for Python."""

from __future__ import annotations

import json
from typing import Any

from afd_bench.operate.panels import ROWS, Panel

_UNITS = {
    "short": "decimal",
    "s": "seconds",
    "percentunit": "percent-decimal",
    "bytes": "bytes",
    "Bps": "bytes/sec",
    "reqps": "requests/sec",
}


def perses_json() -> str:
    """Returns a resource of kind Dashboard as JSON text."""
    panels: dict[str, Any] = {}
    layouts = []
    for r, row in enumerate(ROWS):
        x, y, items = 0, 0, []
        for p, panel in enumerate(row.panels):
            panels[f"{r}_{p}"] = _panel(panel)
            if x + panel.width > 24:
                x, y = 0, y + row.panels[p - 1].height
            place = {"x": x, "y": y, "width": panel.width, "height": panel.height}
            items.append({**place, "content": {"$ref": f"#/spec/panels/{r}_{p}"}})
            x += panel.width
        layouts.append({"kind": "Grid", "spec": {"display": {"title": row.title}, "items": items}})
    member = {
        "name": "instance",
        "display": {"name": "Member"},
        "allowAllValue": True,
        "allowMultiple": True,
        "customAllValue": ".*",
        "defaultValue": "$__all",
        "plugin": {
            "kind": "PrometheusLabelValuesVariable",
            "spec": {"labelName": "instance", "matchers": ["afd_peer_up"]},
        },
    }
    spec = {
        "display": {"name": "AFD"},
        "duration": "30m",
        "refreshInterval": "10s",
        "variables": [{"kind": "ListVariable", "spec": member}],
        "panels": panels,
        "layouts": layouts,
    }
    board = {"kind": "Dashboard", "metadata": {"name": "afd", "project": "afd"}, "spec": spec}
    return json.dumps(board, indent=1, sort_keys=True) + "\n"


def _panel(panel: Panel) -> dict[str, Any]:
    unit = {"unit": _UNITS[panel.unit]}
    if panel.stat:
        plugin = {"kind": "StatChart", "spec": {"calculation": "last-number", "format": unit}}
    else:
        plugin = {"kind": "TimeSeriesChart", "spec": {"yAxis": {"format": unit, "min": 0}}}
    queries = [
        {
            "kind": "TimeSeriesQuery",
            "spec": {
                "plugin": {
                    "kind": "PrometheusTimeSeriesQuery",
                    "spec": {"query": query.expr, "seriesNameFormat": query.legend},
                }
            },
        }
        for query in panel.queries
    ]
    display = {"name": panel.title, "description": panel.text}
    return {"kind": "Panel", "spec": {"display": display, "plugin": plugin, "queries": queries}}
