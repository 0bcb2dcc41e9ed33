"""Renders the page that `afd bench families` writes beside its records. Pure."""

from collections.abc import Sequence

from afd.records import Record
from afd_bench.report import pages

_TEXT = """# Model families and stored formats beside colocated vLLM

`afd bench families`: tiny random checkpoints, laid out as they are published, on CPUs. The FFN side
is called directly, not through the transport.

- `match`: fraction of 3 prompts whose 12 greedy tokens are all equal, in float32: to those of
  colocated vLLM, or (T) to Transformers' where vLLM cannot serve the family on CPUs.
- `kl`: mean KL divergence from colocated vLLM in bfloat16, or (T) from Transformers in bfloat16
  where vLLM cannot serve the family on CPUs; nats per position, over 237 positions and the 64
  likeliest tokens of each.
- `rounding`: the same between that peer in float32 and in bfloat16, which is the effect of rounding
  alone. Where vLLM serves bfloat16 only, it is not measured, and 1.0e-03 stands there.
- `top1`: fraction of positions with the same likeliest token, in bfloat16.

Quantised checkpoints are compared with vLLM on an unquantised checkpoint of the decoded values.
With two FFN instances, each rounds its partial sum to bfloat16, so `kl` is not 0. Weights are
random, so the two largest logits are often close.

| family | stored as | match | kl | rounding | top1 |
|---|---|---|---|---|---|
"""


def page(name: str, records: Sequence[Record]) -> str:
    """Returns Markdown. name: of the file of the records."""
    rows: dict[tuple[str, str], dict[str, Record]] = {}
    for record in records:
        family, stored_as, _ = record.case.split()
        rows.setdefault((family, stored_as), {})[record.metric] = record
    lines = [_row(*key, found) for key, found in rows.items()]
    commands = dict.fromkeys(f"`{r.command}`, {r.machine}, {r.date}." for r in records)
    text = _TEXT + "\n".join([*lines, "", *commands]) + "\n"
    return pages.insert(text, pages.section(name, records))


def _row(family: str, stored_as: str, found: dict[str, Record]) -> str:
    match, kl, top1 = (found.get(metric) for metric in ("match", "kl", "top1"))
    cells = [
        "" if match is None else f"{match.value:.2f}{_mark(match)}",
        "" if kl is None else f"{kl.value:.1e}{_mark(kl)}",
        "" if kl is None else f"{kl.peer_value:.1e}",
        "" if top1 is None else f"{top1.value:.3f}",
    ]
    return f"| {family} | {stored_as} | {' | '.join(cells)} |"


def _mark(record: Record) -> str:
    return " (T)" if record.peer == "transformers" else ""
