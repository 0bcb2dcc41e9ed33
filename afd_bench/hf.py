"""`afd bench hf`: compares greedy tokens with Hugging Face transformers, in float32.

Makes two comparisons per family on a tiny checkpoint, one request at a time:
- Colocated vLLM, the reference of the other benchmarks, against transformers' ``generate()``.
- A deployment on the fp8 wire against ``generate()`` with that wire's rounding inserted. Equal
  tokens show that the wire format changes nothing else.

transformers does not have Step-3; its reference is a float32 forward pass
(afd_bench/hf_step3_torch.py).
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from afd.records import Record, command_line, machine, today, write_records
from afd_bench.cases import (
    MAX_LOGPROBS,
    SETTINGS,
    Case,
    add_files,
    deployment,
    tiny_model,
    vllm_args,
)
from afd_bench.servers import colocated, disaggregated
from afd_bench.workload import Answer, Request, mixed, run_sequentially
from afd_demo.sizes import FAMILIES
from afd_launch.roles_of_host import available_cores

REQUESTS = 16
_DEPTH = 3
_START_S = 600.0


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 1 if tokens differ on the exact wire format, else 0."""
    args = _arguments(argv)
    command = command_line("hf", argv)
    requests = mixed(args.seed, vocab=MAX_LOGPROBS, count=REQUESTS)
    records: list[Record] = []
    notes: list[str] = []
    for family in args.families:
        model = tiny_model(args.models, family)
        peer, plain = _expected(family, model, requests, fp8=False)
        rounded_peer, rounded = _expected(family, model, requests, fp8=True)
        name = f"{family} float32 colocated"
        ours = _colocated(model, requests)
        new = [compared(name, "match", peer, ours, plain, command)]
        notes += differences(name, ours, plain)
        name = f"{family} float32 fp8 1A1F"
        ours = _fp8(family, model, requests)
        new.append(compared(name, "match", rounded_peer, ours, rounded, command))
        new.append(compared(name, "match_unrounded", peer, ours, plain, command))
        notes += differences(name, ours, rounded)
        write_records(args.out, new)
        records += new
        for record in new:
            print(f"{record.case}: {record.metric} {record.value:.3f}, {record.peer}", flush=True)
    text = page(records, notes)
    args.out.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)
    return 0 if all(r.value == 1.0 for r in records if "fp8" not in r.case) else 1


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="afd bench hf", description=__doc__)
    parser.add_argument(
        "--families", nargs="+", default=FAMILIES, choices=FAMILIES, help="model families"
    )
    parser.add_argument("--seed", type=int, default=1, help="seed of the prompts")
    add_files(parser, "hf")
    return parser.parse_args(argv)


def _colocated(model: Path, requests: Sequence[Request]) -> list[Answer]:
    with colocated(
        model.absolute(),
        dtype="float32",
        cpus=available_cores()[-1:],
        max_model_len=int(SETTINGS["max_model_len"]),
        kv_cache_gib=SETTINGS["kv_cache_gib"],
        vllm_args=vllm_args(1),
        deadline_s=_START_S,
    ) as server:
        return run_sequentially(server.url, server.model, requests, salt="hf")


def _fp8(family: str, model: Path, requests: Sequence[Request]) -> list[Answer]:
    config = deployment(Case(family, "float32", "fp8", "1A1F"), model, _DEPTH)
    with disaggregated(config, deadline_s=_START_S) as server:
        return run_sequentially(server.url, server.model, requests, salt="hf")


def _expected(
    family: str, model: Path, requests: Sequence[Request], *, fp8: bool
) -> tuple[str, list[tuple[int, ...]]]:
    """Returns the name and the tokens of the reference."""
    # Imported here because torch and transformers take seconds to import.
    from afd_bench.hf_torch import step3_greedy, transformers_greedy, version

    wire = " with the fp8 wire's rounding" if fp8 else ""
    if family == "step3":
        return f"plain float32 torch{wire}", step3_greedy(model, requests, fp8=fp8)
    return f"{version()}{wire}", transformers_greedy(model, requests, fp8=fp8)


def compared(
    name: str,
    metric: str,
    peer: str,
    ours: Sequence[Answer],
    expected: Sequence[tuple[int, ...]],
    command: str,
) -> Record:
    """Returns the record of one comparison: the fraction of requests with all tokens equal."""
    equal = [answer.tokens == tokens for answer, tokens in zip(ours, expected, strict=True)]
    value = sum(equal) / len(equal)
    return Record(
        bench="hf",
        case=name,
        metric=metric,
        value=value,
        unit="fraction of requests",
        peer=peer,
        peer_value=1.0,
        ratio=value,
        machine=machine(),
        command=command,
        date=today(),
    )


def differences(
    name: str, ours: Sequence[Answer], expected: Sequence[tuple[int, ...]]
) -> list[str]:
    """Returns one line per request that differs: the position, and vLLM's gap there."""
    lines = []
    for index, (answer, tokens) in enumerate(zip(ours, expected, strict=True)):
        pairs = enumerate(zip(answer.tokens, tokens, strict=True))
        at = next((i for i, (a, b) in pairs if a != b), None)
        if at is not None:
            lines.append(
                f"{name}: request {index} differs from token {at} of {len(tokens)} on; there the"
                f" two best tokens are {answer.gaps[at]:.2g} nats apart"
            )
    return lines


def page(records: Sequence[Record], notes: Sequence[str]) -> str:
    """Returns the results as Markdown."""
    plain = {r.case: r.value for r in records if r.metric == "match_unrounded"}
    rows = [
        f"| {r.case} | {r.peer} | {r.value:.3f} |"
        f" {format(plain[r.case], '.3f') if r.case in plain else ''} |"
        for r in records
        if r.metric == "match"
    ]
    lines = [
        "# Greedy tokens against Hugging Face transformers",
        "",
        "| case | compared with | requests equal | equal without rounding |",
        "|---|---|---|---|",
        *rows,
        "",
        *dict.fromkeys(f"`{r.command}`, {r.machine}, {r.date}." for r in records),
        "",
        f"{REQUESTS} prompts of 3 to 200 tokens, one at a time, greedy, float32, tiny random"
        " checkpoints.",
        "",
        "- `colocated` is plain vLLM, the reference of the other benchmarks.",
        "- `fp8 1A1F` is a deployment with the fp8 wire format. Its reference rounds the rows of"
        " every MoE layer as that format does, and nothing else. Rounding is a step function: a"
        " difference of 1e-7 before it can become 6 % of an element after it, so tokens may differ"
        " where two of them are close.",
        "- The last column compares the fp8 deployment with the reference without rounding.",
    ]
    if notes:
        lines += ["", "Where requests differ:", "", *(f"- {note}" for note in notes)]
    return "\n".join(lines) + "\n"
