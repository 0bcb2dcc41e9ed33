"""`afd ctl rebalance` and `afd placement`: place experts by their load, live or at start."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from afd.config.contract import Contract
from afd.config.deployment import Deployment
from afd.control import operator
from afd.control.keys import ClientKeys
from afd.control.messages import Members
from afd.control.moves import settled
from afd.errors import AfdError, ConfigError, DeadlineExceeded
from afd.placement.tables import Placement, Table, problem, save_placement
from afd_launch.balance import Load, balance, imbalance, improved, without_empty

Policy = Literal["auto", "vllm", "greedy"]
POLICIES: tuple[Policy, ...] = ("auto", "vllm", "greedy")

METRIC = "afd_expert_rows_total"
_POLL_S = 0.2
_PROGRESS_S = 5.0


def propose(load: Load, placement: Placement, policy: Policy) -> tuple[Placement, str]:
    """Returns a placement for a load and the policy that made it. Layers without a gain stay.

    Empty slots stay empty, and an instance without experts gets none.

    Args:
        placement: the current one.
        policy: auto uses vLLM's balancer if it is installed and supports the placement.

    Raises:
        ConfigError: policy is vllm and vLLM's balancer cannot be used; or see
            :func:`afd_launch.balance.without_empty`.
    """
    packed, unpack = without_empty(placement)
    bounds = packed.bounds
    greedy = tuple(balance(of_layer, bounds) for of_layer in load)
    proposed, maker = greedy, "greedy"
    if policy != "greedy":
        try:
            proposed, maker = _by_vllm(load, bounds, greedy)
        except ConfigError as err:
            if policy == "vllm":
                raise
            maker = f"greedy ({err.args[0].split(';')[0]})"
    return unpack(improved(packed.tables, proposed, bounds, load)), maker


def _by_vllm(
    load: Load, bounds: Sequence[int], greedy: tuple[Table, ...]
) -> tuple[tuple[Table, ...], str]:
    from afd_launch.eplb_torch import vllm_balance

    found = vllm_balance(load, bounds)
    usable = [problem(table, bounds, len(load[0])) is None for table in found]
    tables = tuple(t if ok else g for t, g, ok in zip(found, greedy, usable, strict=True))
    note = f", greedy in {usable.count(False)} layers" if not all(usable) else ""
    return tables, f"vllm{note}"


def gain(load: Load, before: Placement, after: Placement) -> str:
    """Returns one line: load of the busiest instance over the mean, before and after."""
    lines = []
    for placement in (before, after):
        ratios = [
            imbalance(table, placement.bounds, of_layer)
            for table, of_layer in zip(placement.tables, load, strict=True)
        ]
        lines.append(
            f"{max(ratios):.2f} in the worst layer, {sum(ratios) / len(ratios):.2f} on average"
        )
    changed = sum(a != b for a, b in zip(before.tables, after.tables, strict=True))
    return (
        f"busiest instance over the mean: {lines[0]}; after moving {changed} of {len(load)} layers:"
        f" {lines[1]}"
    )


def place(
    deployment: Deployment, load_file: Path, text: str | None, policy: Policy, out: Path
) -> int:
    """Writes a placement file for ``ffn.placement``. Raises ConfigError."""
    from afd.config.resolve import resolve

    resolved = resolve(deployment)
    load = routing_load(load_file, resolved.model.num_experts, len(resolved.model.moe_layers), text)
    placement, maker = propose(load, resolved.placement, policy)
    save_placement(out, placement)
    print(f"policy {maker}; {gain(load, resolved.placement, placement)}")
    print(f"{out} written; set ffn.placement to it")
    return 0


def routing_load(
    path: Path, num_experts: int, layers: int, text: str | None
) -> tuple[tuple[float, ...], ...]:
    """Returns the load of one text in a file of routing loads, or of all texts weighted by rows.

    Raises:
        ConfigError: the file cannot be read, is for another model, or does not have that text.
    """
    try:
        texts = json.loads(path.read_text(encoding="utf-8"))["texts"]
        if text is not None and text not in texts:
            raise ConfigError(f"{path} has no text {text!r}; it has {', '.join(texts)}")
        chosen = [texts[text]] if text is not None else list(texts.values())
        parts = [[layer["load"] for layer in entry["layers"]] for entry in chosen]
        rows = [float(entry["rows"]) for entry in chosen]
    except (OSError, ValueError, KeyError, TypeError) as err:
        reason = " ".join(str(err).split())[:120]
        raise ConfigError(
            f"{path} cannot be read as a load ({reason}); the README.md in the folder of"
            " routing loads (afd plan --list) describes the format"
        ) from None
    shapes = {(len(part), len(of_layer)) for part in parts for of_layer in part}
    if shapes != {(layers, num_experts)}:
        found = ", ".join(f"{a} layers of {b} experts" for a, b in sorted(shapes))
        raise ConfigError(
            f"{path} is for a model with {found}; this model has {layers} of {num_experts}"
        )
    return tuple(
        tuple(
            sum(n * part[layer][e] for n, part in zip(rows, parts, strict=True))
            for e in range(num_experts)
        )
        for layer in range(layers)
    )


@dataclass(frozen=True)
class Rebalance:
    """Arguments of `afd ctl rebalance`.

    over_s: seconds to measure the load; 0: use the load since the FFN instances started.
    out: file to write the placement to. dry: do not move experts.
    """

    policy: Policy = "auto"
    over_s: float = 0.0
    out: Path | None = None
    dry: bool = False
    deadline_s: float = 600.0


def rebalance(address: str, keys: ClientKeys | None, asked: Rebalance) -> int:
    """Measures the load, proposes a placement, moves the experts and waits for the last one.

    Raises:
        AfdError: the load cannot be read, or an instance cannot load its new experts.
    """
    members = operator.status(address, keys)
    contract = operator.contract(address, keys)
    if contract is None:
        raise ConfigError("no member holds experts yet; wait until the deployment is up")
    load = _measured(members, contract, asked.over_s)
    start = Placement(contract.expert_slots, contract.expert_map)
    places = settled(members, start, contract.moe_layers)
    now = Placement(start.bounds, tuple(table for _, table in places.values()))
    placement, maker = propose(load, now, asked.policy)
    print(f"policy {maker}; {gain(load, now, placement)}", flush=True)
    if asked.out is not None:
        save_placement(asked.out, placement)
        print(f"{asked.out} written; set ffn.placement to it to start with it")
    if asked.dry or placement == now:
        return 0
    operator.move_experts(address, keys, tables=placement.tables)
    wait_for_moves(address, keys, asked.deadline_s)
    print("experts have moved")
    return 0


def wait_for_moves(address: str, keys: ClientKeys | None, deadline_s: float) -> None:
    """Returns once all experts have moved. Raises DeadlineExceeded, AfdError."""
    end = time.monotonic() + deadline_s
    said = time.monotonic()
    while (members := operator.status(address, keys)).moves_left:
        if time.monotonic() > end:
            raise DeadlineExceeded(
                f"{members.moves_left} layers have not moved within {deadline_s:g} s; moving"
                " continues, see `afd ctl status`"
            )
        if time.monotonic() - said > _PROGRESS_S:
            said = time.monotonic()
            print(f"{members.moves_left} layers left", flush=True)
        time.sleep(_POLL_S)
    if members.move_fault:
        raise AfdError(f"experts could not be moved: {members.move_fault}; see that member's log")


def _measured(members: Members, contract: Contract, over_s: float) -> Load:
    heads = [m for m in members.of("ffn") if m.rank == 0]  # all ranks compute the same rows
    urls = {m.id: m.metrics_url for m in heads if m.metrics_url}
    if not urls:
        raise ConfigError(
            "no FFN instance has a metrics page, which counts the rows of every expert; set"
            " metrics.enabled: true"
        )
    before = _rows(urls) if over_s else {}
    time.sleep(over_s)
    after = _rows(urls)
    load = [
        [
            max(0.0, after.get((layer, e), 0.0) - before.get((layer, e), 0.0))
            for e in range(contract.num_experts)
        ]
        for layer in contract.moe_layers
    ]
    if not any(map(any, load)):
        raise ConfigError(
            "the experts have computed no rows yet; send requests first"
            if not over_s
            else f"the experts computed no rows in {over_s:g} s; send requests, or measure longer"
        )
    return load


def _rows(urls: Mapping[str, str]) -> dict[tuple[int, int], float]:
    """Returns the rows per (layer, expert), added over all instances. Raises AfdError."""
    from prometheus_client.parser import text_string_to_metric_families

    rows: dict[tuple[int, int], float] = {}
    for member, url in urls.items():
        try:
            with urllib.request.urlopen(url, timeout=5.0) as page:
                text = page.read().decode()
        except (urllib.error.URLError, OSError) as err:
            raise AfdError(
                f"{member} does not reply at {url} ({err}); check that it runs"
            ) from None
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == METRIC:
                    key = (int(sample.labels["layer"]), int(sample.labels["expert"]))
                    rows[key] = rows.get(key, 0.0) + sample.value
    return rows
