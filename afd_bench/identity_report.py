"""Renders the page that `afd bench identity` writes next to its records. Pure."""

from collections.abc import Mapping, Sequence

from afd.records import Record
from afd_bench.cases import Case
from afd_bench.differences import KL_TARGET

_COLUMNS = {
    "match": ("match", "{:.3f}"),
    "one by one": ("one by one", "{:.3f}"),
    "kl": ("kl", "{:.1e}"),
    "kl_whole_vocabulary": ("kl (all)", "{:.1e}"),
    "top1": ("top1", "{:.4f}"),
    "preemptions": ("preemptions", "{:.0f}"),
    "prefix_hits": ("prefix hits", "{:.0f}"),
}
_OF_SERVER = ("preemptions", "prefix_hits")  # counted once for all depths
_ALONE = " one by one"


def report(records: Sequence[Record], failed: Mapping[Case, str]) -> str:
    """Returns Markdown: findings, one table row per case and depth, commands and method."""
    commands = dict.fromkeys(f"`{r.command}`, {r.machine}, {r.date}." for r in records)
    lines = [
        "# Token identity with colocated vLLM",
        "",
        *_found(records),
        "",
        *_table(records),
        "",
        *commands,
        "",
        "Every case runs the same concurrent greedy workload as colocated vLLM, with at most 64"
        " tokens per step:",
        "",
        "1. 32 prompts of 3 to 200 tokens that arrive while others decode; 8 of them share a prefix"
        " of 96 tokens.",
        "2. 44 requests; 16 of them start with a prefix of 192 tokens that another request is still"
        " writing.",
        "",
        "The KV cache is small, so that vLLM preempts requests. Preemptions and prefix-cache hits"
        " (prompt tokens) are counted per server over all depths.",
        "",
        "- `again`: colocated vLLM against itself with other arrival times.",
        "- `against-float32`: colocated vLLM in bfloat16 against itself in float32. This effect of"
        " rounding alone is the yardstick for the other divergences.",
        "- `match`: fraction of requests with all tokens equal; `one by one`: the same for the"
        " first 32 requests, sent one at a time.",
        "- `kl`: mean KL divergence in nats per position, teacher-forced on the reference's"
        " continuations, over the 64 most likely tokens and one bucket for the rest (a lower"
        " bound). `kl (all)`: over the whole vocabulary, on the 4 shortest texts.",
        "- `top1`: fraction of positions with the same most likely token.",
        "",
        "The records compare each divergence with the yardstick: a ratio of 2 means half the"
        f" divergence. Without a float32 run the yardstick is {KL_TARGET:g} nats.",
    ]
    if failed:
        lines += ["", "## Not run", ""]
        lines += [f"- {case.name}: {' '.join(why.split())}" for case, why in failed.items()]
    return "\n".join(lines) + "\n"


def _found(records: Sequence[Record]) -> list[str]:
    """Returns one line of findings per kind of case."""
    lines = [
        f"- {dtype} {topology}: {sum(v == 1.0 for v in values)} of {len(values)} rows have every"
        f" token equal, the lowest match is {min(values):.3f}."
        for (dtype, topology), values in _matches(records).items()
    ]
    if any(" bfloat16 2A2F " in record.case for record in records):
        lines.append(
            "- With several FFN instances, each instance rounds its partial sum to bfloat16, like"
            " the ranks of a tensor-parallel all-reduce. Tokens can differ where a router or the"
            " logits are close to a tie. Compare `kl` with the yardstick row of the family."
        )
    if any(" fp8 " in record.case for record in records):
        lines.append(
            "- The divergence of the fp8 wire comes from the format itself: with the same rounding"
            " inserted into transformers, nearly all tokens are equal (hf.md). These weights are"
            " random; measure the effect of fp8 rows on a trained model with that model."
        )
    return lines


def _matches(records: Sequence[Record]) -> dict[tuple[str, str], list[float]]:
    """Returns the values of ``match`` by (dtype, topology), for all depths and wire formats."""
    values: dict[tuple[str, str], list[float]] = {}
    for record in records:
        if record.metric == "match":
            _, dtype, topology = record.case.split()[:3]
            values.setdefault((dtype, topology), []).append(record.value)
    return values


def _table(records: Sequence[Record]) -> list[str]:
    rows: dict[str, dict[str, float]] = {}
    servers: dict[str, dict[str, float]] = {}
    for record in records:
        if record.metric in _OF_SERVER:
            servers.setdefault(record.case, {})[record.metric] = record.value
            continue
        case = record.case.removesuffix(_ALONE).replace(" exact ", " ")
        alone = record.case.endswith(_ALONE)
        rows.setdefault(case, {})["one by one" if alone else record.metric] = record.value
    lines = ["| case | " + " | ".join(title for title, _ in _COLUMNS.values()) + " |"]
    lines.append("|---" * (len(_COLUMNS) + 1) + "|")
    for case, row in rows.items():
        values = row | servers.get(case.rpartition(" ")[0], {})
        cells = [
            form.format(values[key]) if key in values else "" for key, (_, form) in _COLUMNS.items()
        ]
        lines.append(f"| {case} | " + " | ".join(cells) + " |")
    return lines
