"""The page that `afd bench identity` writes next to its records. Pure."""

from collections.abc import Mapping, Sequence

from afd.bench.cases import Case
from afd.bench.differences import KL_TARGET
from afd.bench.records import Record

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
    """Markdown: what was run, one line on what came out, one table row per case and depth."""
    commands = dict.fromkeys(f"`{r.command}`, {r.machine}, {r.date}." for r in records)
    lines = [
        "# Token identity with colocated vLLM",
        "",
        *commands,
        "",
        "Every case runs the same concurrent greedy workload as colocated vLLM, at most 64 tokens"
        " per step: 32 prompts of 3 to 200 tokens that arrive while others decode, 8 of them with a"
        " prefix of 96 tokens; then 44 requests, of which 16 start on a prefix of 192 tokens that"
        " another one is still writing. The KV cache is small enough that requests are preempted"
        " (preemptions, and prompt tokens found in the prefix cache, are counted per server, over"
        " all depths). `again` is colocated vLLM against itself with other arrival times;"
        " `against-float32` is colocated vLLM in bfloat16 against itself in float32: what the"
        " rounding alone does, and so a yardstick.",
        "",
        "- `match`: fraction of requests with all tokens equal; `one by one`: the first 32, one at"
        " a time.",
        "- `kl`: mean KL divergence over the reference's continuations, teacher-forced, nats per"
        " position, over the 64 likeliest tokens and one bucket for the rest (a lower bound);"
        " `kl (all)`: over the whole vocabulary, on the 4 shortest texts; `top1`: positions with"
        " the same likeliest token. The records state a divergence's ratio against the yardstick:"
        f" 2 is half as far ({KL_TARGET:g} nats stand in for it where float32 was not run).",
        "",
        *_found(records),
        "",
        *_table(records),
    ]
    if failed:
        lines += ["", "## Not run", ""]
        lines += [f"- {case.name}: {' '.join(why.split())}" for case, why in failed.items()]
    return "\n".join(lines) + "\n"


def _found(records: Sequence[Record]) -> list[str]:
    """What the numbers say, as a list of one sentence per kind of case."""
    lines = [
        f"- {dtype} {topology}: {sum(v == 1.0 for v in values)} of {len(values)} rows have every"
        f" token equal, the lowest match is {min(values):.3f}."
        for (dtype, topology), values in _matches(records).items()
    ]
    if any(" bfloat16 2A2F " in record.case for record in records):
        lines.append(
            "- With several FFN instances each one rounds its partial sum to bfloat16, as the ranks"
            " of a tensor-parallel all-reduce do, so tokens part where a router or the logits are"
            " close to a tie. Compare `kl` with the yardstick row of the family."
        )
    if any(" fp8 " in record.case for record in records):
        lines.append(
            "- The fp8 wire's divergence is the format's own: with the same rounding inserted into"
            " transformers, nearly all tokens are the same (hf.md). The weights are random here;"
            " how a trained model takes to fp8 rows must be measured on that model."
        )
    return lines


def _matches(records: Sequence[Record]) -> dict[tuple[str, str], list[float]]:
    """Values of ``match`` by (dtype, topology); every way of running included."""
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
