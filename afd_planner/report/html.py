"""The plan as one self-contained HTML file: verdict, tables, and plots as inline SVG."""

from __future__ import annotations

from html import escape

from afd_planner.report.plots import PLOTS, svg
from afd_planner.report.text import assumption_lines, headline, table_rows
from afd_planner.report.verdict_text import verdict_lines
from afd_planner.sizing.plan import Plan

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 52rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse } td, th { padding: .2rem .8rem; text-align: left }
tr:nth-child(even) { background: #f3f4f6 } svg { max-width: 100%; height: auto }
.verdict { padding: .6rem 1rem; border-left: 4px solid #1f6feb; background: #f3f6fb }
.no { border-color: #d1740a; background: #fdf5ea } footer { color: #555; font-size: .9em }
"""


def html(plan: Plan) -> str:
    """Returns the HTML document of a plan."""
    head, *body = table_rows(plan)
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in body
    )
    first, *rest = verdict_lines(plan)
    points = "".join(f"<li>{escape(line.strip(' -'))}</li>" for line in rest)
    kind = "verdict" if plan.verdict.disaggregate else "verdict no"
    plots = "".join(f"<section>{svg(plan, draw)}</section>" for _, draw in PLOTS)
    notes = "<br>".join(escape(line) for line in assumption_lines(plan))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>afd plan</title>'
        f"<style>{_STYLE}</style><h1>{escape(headline(plan.request))}</h1>"
        f'<div class="{kind}"><b>{escape(first)}</b><ul>{points}</ul></div>'
        f"<table><tr>{cells}</tr>{rows}</table>{plots}<footer>{notes}</footer></html>\n"
    )
