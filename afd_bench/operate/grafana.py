"""The Grafana dashboard, built with Grafana's own SDK."""

from __future__ import annotations

import json

from grafana_foundation_sdk.builders import common as options
from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.builders import prometheus, stat, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import dashboard as model

from afd_bench.operate.panels import ROWS, Panel

_SOURCE = model.DataSourceRef("prometheus", "${datasource}")


def grafana_json() -> str:
    """Returns the dashboard as JSON text."""
    board = (
        build.Dashboard("AFD")
        .uid("afd")
        .tags(["afd", "vllm"])
        .refresh("10s")
        .time("now-30m", "now")
        .with_variable(
            build.DatasourceVariable("datasource").label("Data source").type("prometheus")
        )
        .with_variable(
            build.QueryVariable("instance")
            .label("Member")
            .datasource(_SOURCE)
            .query({"query": "label_values(afd_peer_up, instance)", "refId": "instance"})
            .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .multi(True)
            .include_all(True)
            .all_value(".*")
            .current(model.VariableOption(text="All", value="$__all"))
        )
    )
    number = 0
    for row in ROWS:
        number += 1
        board.with_row(build.Row(row.title).id(number))
        for panel in row.panels:
            number += 1
            board.with_panel(_panel(panel).id(number))
    return json.dumps(board.build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def _panel(panel: Panel) -> timeseries.Panel | stat.Panel:
    made: timeseries.Panel | stat.Panel
    if panel.stat:
        made = stat.Panel().reduce_options(options.ReduceDataOptions().calcs(["lastNotNull"]))
    else:
        made = timeseries.Panel().fill_opacity(10).min(0 if panel.title != "Headroom" else -1)
    made.title(panel.title).description(panel.text).unit(panel.unit).datasource(_SOURCE)
    made.height(panel.height).span(panel.width)
    for number, query in enumerate(panel.queries):
        made.with_target(
            prometheus.Dataquery()
            .expr(query.expr)
            .legend_format(query.legend)
            .ref_id(chr(ord("A") + number))
        )
    return made
