"""`afd ctl rebalance` and `afd placement`: loads, balancers, and members that move experts."""

from __future__ import annotations

import contextlib
import json

import pytest
from control_support import KEYS, contract_with, control_server, eventually
from hypothesis import given, settings
from hypothesis import strategies as st

from afd.config.deployment import Deployment
from afd.control.client import ControlClient
from afd.control.messages import Timing
from afd.errors import AfdError, ConfigError
from afd.metrics.role import RoleMetrics
from afd.metrics.server import serve_metrics
from afd.placement.tables import contiguous, load_placement, problem, slot_bounds
from afd_launch.balance import imbalance
from afd_launch.cli import main
from afd_launch.rebalance import Rebalance, place, propose, rebalance, routing_load
from afd_planner.facts.files import NATURAL_LOADS

BOUNDS = slot_bounds(8, 2, redundant=1)
START = contiguous(8, BOUNDS, 3)
CONTRACT = contract_with(
    expert_slots=BOUNDS, expert_map=START.tables, attention_instances=1, ffn_instances=2
)
LOAD = {layer: [90, 10, 10, 10, 5, 5, 5, 5] for layer in CONTRACT.moe_layers}


def test_recorded_loads_become_a_placement_file(tmp_path, tiny_models, capsys):
    routing = json.loads(NATURAL_LOADS.read_text())
    load = routing_load(NATURAL_LOADS, 32, 8, "prose")
    prose = routing["texts"]["prose"]
    assert load[0][:2] == tuple(prose["rows"] * n for n in prose["layers"][0]["load"][:2])
    with pytest.raises(ConfigError, match="no text 'verse'; it has prose"):
        routing_load(NATURAL_LOADS, 32, 8, "verse")
    with pytest.raises(ConfigError, match="8 layers of 32 experts; this model has 3 of 8"):
        routing_load(NATURAL_LOADS, 8, 3, None)

    model = tiny_models("qwen3_moe")
    deployment = Deployment.from_plain(
        {
            "model": str(model),
            "served_model_name": "m",
            "ffn": {"instances": 2, "redundant_experts": 1},
        }
    )
    from afd.config.resolve import resolve

    resolved = resolve(deployment)
    experts, layers = resolved.model.num_experts, len(resolved.model.moe_layers)
    entry = {"rows": 10, "layers": [{"load": [2.0**-e for e in range(experts)]}] * layers}
    (tmp_path / "load.json").write_text(json.dumps({"texts": {"some": entry}}))
    out = tmp_path / "placement.json"
    assert place(deployment, tmp_path / "load.json", None, "greedy", out) == 0
    found = load_placement(out, experts, resolved.placement.bounds, layers)
    ratio = imbalance(found.tables[0], found.bounds, entry["layers"][0]["load"])
    assert ratio < imbalance(resolved.placement.tables[0], found.bounds, entry["layers"][0]["load"])
    assert "policy greedy" in capsys.readouterr().out

    plain = deployment.plain()
    plain["ffn"]["placement"] = str(out)
    again = resolve(Deployment.from_plain(plain))
    assert again.placement == found and again.contract.expert_map == found.tables


@settings(max_examples=25)
@given(st.data())
def test_greedy_is_within_its_bound_of_vllms_balancer(data):
    pytest.importorskip("vllm.distributed.eplb.policy.default", reason="vLLM's balancer")
    instances = data.draw(st.integers(2, 4))
    experts = instances * data.draw(st.integers(2, 6))
    redundant = data.draw(st.integers(0, min(2, experts - experts // instances)))
    bounds = slot_bounds(experts, instances, redundant)
    load = [[data.draw(st.integers(0, 1000)) for _ in range(experts)]]
    start = contiguous(experts, bounds, 1)
    ratios = {}
    for policy in ("vllm", "greedy"):
        placement, maker = propose(load, start, policy)
        assert problem(placement.tables[0], bounds, experts) is None and policy in maker
        ratios[policy] = imbalance(placement.tables[0], bounds, load[0])
    assert ratios["greedy"] <= 1.34 * ratios["vllm"] + 1e-9  # 4/3 is the bound of greedy packing


def test_auto_says_why_it_did_not_use_vllms_balancer():
    uneven = contiguous(7, slot_bounds(7, 2, 0), 1)
    load = [[9, 9, 9, 1, 1, 1, 1]]
    placement, maker = propose(load, uneven, "auto")
    assert maker.startswith("greedy (") and placement != uneven
    with pytest.raises(ConfigError, match="equal size"):
        propose(load, uneven, "vllm")


class Obedient(ControlClient):
    """A member that reports every move as done at once, or as failed with ``fault``."""

    def __init__(self, server, role, index, fault=""):
        super().__init__(
            server.address, KEYS.member(f"{role}-{index}"),
            role=role, index=index, contract=CONTRACT,
            timing=Timing(interval_s=0.05, timeout_s=1.0),
        )  # fmt: skip
        self._metrics = RoleMetrics("ffn" if role == "ffn" else "attention")
        if role == "ffn":
            # Instance 0 reports all rows; the other instances report none.
            self._metrics.expert_rows = lambda: {
                layer: [n if index == 0 else 0 for n in rows] for layer, rows in LOAD.items()
            }
        self.page = serve_metrics(self._metrics)
        self._move_fault = fault
        self.on_change(self._obey)
        self.join(metrics_url=self.page.url, deadline_s=5.0)

    def _obey(self, members):
        from afd.control.moves import followed

        if self.role == "attention":
            self.report_move(followed(members))
        elif self._move_fault and members.moving is not None:
            self.report_move(members.moves - 1, self._move_fault)
        else:
            self.report_move(members.moves)


@pytest.fixture
def members():
    with contextlib.ExitStack() as stack:

        def make(**faults):
            timing = Timing(interval_s=0.05, timeout_s=1.0)
            server = stack.enter_context(control_server(timing=timing))
            made = []
            for role, index in (("ffn", 0), ("ffn", 1), ("attention", 0)):
                fault = faults.get(f"{role}_{index}", "")
                made.append(stack.enter_context(Obedient(server, role, index, fault)))
                stack.callback(made[-1].page.close)
            return server, made

        yield make


def test_a_deployment_is_rebalanced_from_its_measured_loads(members, tmp_path, capsys):
    server, _ = members()
    keys = str(tmp_path / "operator.keys")
    KEYS.operator.save(keys)
    out = tmp_path / "p.json"
    assert rebalance(server.address, KEYS.operator, Rebalance("greedy", dry=True, out=out)) == 0
    assert server.members.moves == 0
    assert rebalance(server.address, KEYS.operator, Rebalance("greedy")) == 0
    found = server.members
    assert (found.moves, found.moves_left, found.moving) == (3, 0, None)
    wanted = load_placement(out, 8, BOUNDS, 3)
    assert tuple(move.experts for move in found.moved) == wanted.tables
    assert {move.bank for move in found.moved} == {1}
    text = capsys.readouterr().out
    assert "after moving 3 of 3 layers" in text and "experts have moved" in text
    assert main(["ctl", "--control", server.address, "--keys", keys, "status"]) == 0
    assert "experts: 3 layers moved since the start" in capsys.readouterr().out
    assert (
        main(
            ["ctl", "--control", server.address, "--keys", keys, "rebalance", "--policy", "greedy"]
        )
        == 0
    )
    assert "after moving 0 of 3 layers" in capsys.readouterr().out  # nothing left to move


def test_an_instance_that_cannot_read_its_experts_cancels_the_moves(members, capsys):
    server, _ = members(ffn_1="no such file")
    with pytest.raises(AfdError, match="ffn-1: no such file"):
        rebalance(server.address, KEYS.operator, Rebalance("greedy"))
    assert (server.members.moved, server.members.moving) == ((), None)


def test_moves_are_forgotten_when_all_members_have_left(members):
    server, made = members()
    rebalance(server.address, KEYS.operator, Rebalance("greedy"))
    assert server.members.moved
    for one in made:
        one.close()
    eventually(lambda: not server.members.members, 5.0)
    assert server.members.moved == ()  # new members start with their contract's placement


def test_an_invalid_table_is_refused_with_one_sentence(members):
    server, _ = members()
    from afd.control import operator

    with pytest.raises(ConfigError, match="experts not moved: there are 1 tables for 3"):
        operator.move_experts(server.address, KEYS.operator, tables=(START.tables[0],))
    assert operator.contract(server.address, KEYS.operator) == CONTRACT
