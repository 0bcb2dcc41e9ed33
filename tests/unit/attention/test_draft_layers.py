"""Draft layers (MTP) over the wire: each is a step of one layer, between the steps."""

import json
import threading
import time
from dataclasses import replace

import pytest
import torch
from remote_support import deploying, random_rows, run_step
from safetensors.torch import load_file, save_file
from torch.nn.functional import silu

from afd.config.deployment import Deployment
from afd.config.resolve import resolve
from afd.errors import ConfigError
from afd.models.checkpoint import INDEX_FILE
from afd_demo.published.eagle import make_eagle
from afd_demo.published.make import make_published
from afd_demo.sizes import Sizes
from attention_worker.draft_layer import run_draft_layer
from attention_worker.stored_weights import AttentionTensors
from attention_worker.vllm_hooks.command import speculative_config
from ffn_worker.experts.build import load_ffn_model

SIZES = Sizes(hidden=64, layers=3, experts=4, intermediate=32, dense_intermediate=64, heads=4)
ATTENTION = {
    "dtype": "float32",
    "max_num_batched_tokens": 64,
    "max_num_seqs": 16,
    "speculation": {"method": "mtp", "num_speculative_tokens": 3},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mtp") / "model"
    make_published("deepseek_v3_mtp", folder, SIZES, dtype="float32")
    return folder


@pytest.fixture
def deploy(checkpoint):
    with deploying() as start:

        def make(x, y, **sections):
            attention = {**ATTENTION, "instances": x}
            return start(checkpoint, x, y, attention=attention, **sections)

        yield make


@pytest.fixture(scope="module")
def expected(checkpoint):
    """All experts, in float32."""
    deployment = Deployment.from_plain({"model": str(checkpoint), "attention": ATTENTION})
    r = resolve(deployment)
    return load_ffn_model(
        deployment.model, r.family, r.model, instances=1, index=0, backend="reference"
    )


class DraftLayer:
    """A decoder layer whose attention half adds 1 to its input, which becomes the residual."""

    is_remote = True

    def __init__(self, index, ids, weights):
        self.index = index
        self._routed = weights, ids

    def attention_half(self, positions, hidden, residual):
        assert residual is None
        return hidden + 1, hidden, None

    def route(self, hidden):
        return self._routed


def run_draft(client, resolved, expected, rows, seed):
    """Runs a draft layer, and checks what it returns."""
    (index,) = resolved.model.draft_layers
    x, ids, weights = random_rows(resolved, rows, seed)
    layer = DraftLayer(index, ids, weights)
    output, residual = run_draft_layer(layer, client, torch.arange(rows), x, None)
    want = expected.forward(index, x + 1, ids, weights)
    torch.testing.assert_close(output, want, rtol=1e-5, atol=1e-5)
    assert residual is x


def in_threads(work, count):
    errors = []

    def run(i):
        try:
            work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize(("x", "y"), [(1, 1), (2, 1), (2, 2)])
def test_drafts_between_steps_equal_the_reference(deploy, expected, x, y):
    deployed = deploy(x, y)
    resolved = deployed.resolved
    assert resolved.model.step_layers == (1, 2)
    assert resolved.model.draft_layers == (3,)

    def work(i):
        for step in range(4):
            run_step(deployed.clients[i], resolved, expected, [2 + i] * (1 + step % 3), step)
            for draft in range(step):
                run_draft(deployed.clients[i], resolved, expected, 1 + i, draft)
        deployed.clients[i].leave()

    in_threads(work, x)
    for client in deployed.clients:
        assert sum(client._observer.metrics.steps) == 4, "a draft counts as a step"
    for loop in deployed.loops.values():
        assert loop.rank.metrics.late_peers == 0


def test_instances_share_the_calls_of_a_draft_layer(deploy, expected):
    deployed = deploy(2, 1, ffn={"step_wait_ms": 500.0})
    resolved = deployed.resolved
    together = threading.Barrier(2)

    def work(i):
        run_step(deployed.clients[i], resolved, expected, [2], 0)
        together.wait()
        for draft in range(3):
            run_draft(deployed.clients[i], resolved, expected, 4, draft)

    in_threads(work, 2)
    calls = deployed.loops[0].rank.metrics.rows_per_ffn_call.snapshot()
    assert calls.total == 2 * (2 * 2 + 3 * 4)
    # The first step may be shared or not; from then on both instances are active.
    assert calls.count <= 2 * 2 + 3


def test_a_draft_does_not_wait_for_an_instance_that_begins_a_step(deploy, expected):
    """Nor does the step, once the other instance has no more drafts and leaves."""
    deployed = deploy(2, 1, ffn={"step_wait_ms": 5000.0, "late_ms": 5000.0})
    drafts, begins = deployed.clients
    resolved = deployed.resolved

    def work(i):
        run_step(deployed.clients[i], resolved, expected, [2], i)
        if i == 0:
            for draft in range(3):
                run_draft(drafts, resolved, expected, 2, draft)
            drafts.leave()
        else:
            run_step(begins, resolved, expected, [3], 1)
            begins.leave()

    began = time.monotonic()
    in_threads(work, 2)
    assert time.monotonic() - began < 4.0


def test_time_before_a_draft_is_no_bubble(deploy, expected):
    deployed = deploy(1, 1)
    client, metrics = deployed.clients[0], deployed.loops[0].rank.metrics
    run_step(client, deployed.resolved, expected, [2], 0)
    before = metrics.bubble_seconds
    time.sleep(0.3)  # attention samples
    run_draft(client, deployed.resolved, expected, 2, 0)
    assert metrics.bubble_seconds - before < 0.1


def test_a_lost_ffn_gets_the_draft_again(deploy, expected):
    deployed = deploy(1, 1)
    client, resolved = deployed.clients[0], deployed.resolved
    run_step(client, resolved, expected, [2], 0)
    deployed.stop_ffn(0)
    deployed.start_ffn(0)
    run_draft(client, resolved, expected, 2, 0)
    run_step(client, resolved, expected, [2, 2], 1)


def test_an_eagle_head_is_given_to_vllm(tmp_path):
    speculation = {"method": "eagle3", "model": str(tmp_path / "head")}
    deployment = Deployment.from_plain({"model": "m", "attention": {"speculation": speculation}})
    with pytest.raises(ConfigError, match=r"head has no config\.json; set attention\.speculation"):
        speculative_config(deployment)
    make_eagle("eagle3", tmp_path / "head", SIZES)
    assert speculative_config(deployment) == {
        **speculation,
        "num_speculative_tokens": 3,
        "enforce_eager": True,
    }


def test_a_model_that_shows_no_layer_inputs_refuses_eagle3(tmp_path):
    make_published("mixtral", tmp_path / "model", SIZES)
    speculation = {"method": "eagle3", "model": str(tmp_path / "head")}
    deployment = Deployment.from_plain(
        {"model": str(tmp_path / "model"), "attention": {"speculation": speculation}}
    )
    with pytest.raises(ConfigError, match="MixtralForCausalLM is not served with EAGLE-3 heads"):
        resolve(deployment)


def test_qwen3_next_has_a_draft_layer_with_names_of_its_own(tmp_path):
    """Its numbers begin at 0 again, and config.json does not mention it."""
    make_published("qwen3_next", tmp_path, replace(SIZES, layers=4), dtype="float32")
    deployment = Deployment.from_plain({"model": str(tmp_path), "attention": ATTENTION})
    r = resolve(deployment)
    assert (r.model.step_layers, r.model.draft_layers) == ((0, 1, 2, 3), (4,))
    stored = {k: v for file in tmp_path.glob("*.safetensors") for k, v in load_file(file).items()}
    drafts = AttentionTensors(tmp_path, decoding=True, drafts=True)
    others = AttentionTensors(tmp_path, decoding=True)
    names = {
        "fc",
        "layers.0.mlp.gate",
        "layers.0.mlp.shared_expert_gate",
        "layers.0.self_attn.q_proj",
    }
    assert {f"mtp.{name}.weight" for name in names} <= dict(drafts).keys()
    assert not any("mlp.experts" in name for name in dict(drafts))
    assert not any(name.startswith("mtp.") for name in dict(others))

    ffn = load_ffn_model(
        deployment.model, r.family, r.model, instances=1, index=0, backend="reference"
    )
    x = torch.randn(5, SIZES.hidden, generator=torch.Generator().manual_seed(1))
    for expert in range(SIZES.experts):
        gate, up, down = (
            stored[f"mtp.layers.0.mlp.experts.{expert}.{name}_proj.weight"]
            for name in ("gate", "up", "down")
        )
        want = (silu(x @ gate.T) * (x @ up.T)) @ down.T
        ids = torch.full((5, r.model.top_k), expert, dtype=torch.int32)
        weights = torch.full((5, r.model.top_k), 1 / r.model.top_k)
        found = ffn.forward(4, x, ids, weights)
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)


def test_a_checkpoint_without_its_draft_layer_is_refused(tmp_path):
    """As some quantised checkpoints are."""
    make_published("qwen3_next", tmp_path, replace(SIZES, layers=4), dtype="float32")
    for file in tmp_path.glob("*.safetensors"):
        kept = {k: v for k, v in load_file(file).items() if not k.startswith("mtp.")}
        save_file(kept, file)
    index = tmp_path / INDEX_FILE
    plain = json.loads(index.read_text())
    plain["weight_map"] = {k: v for k, v in plain["weight_map"].items() if not k.startswith("mtp.")}
    index.write_text(json.dumps(plain))
    r = resolve(Deployment.from_plain({"model": str(tmp_path), "attention": ATTENTION}))
    with pytest.raises(ConfigError, match=r"mtp\.layers\.0\.mlp\.experts\.0\.gate_proj\.weight"):
        load_ffn_model(tmp_path, r.family, r.model, instances=1, index=0)


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        ("kimi_k2", "has no draft layers"),
        ("mixtral", "is not served with its draft layers"),
    ],
)
def test_other_models_are_refused_in_one_sentence(tmp_path, layout, why):
    make_published(layout, tmp_path / "model", SIZES)
    deployment = Deployment.from_plain({"model": str(tmp_path / "model"), "attention": ATTENTION})
    with pytest.raises(ConfigError, match=f"{why}; set attention.speculation.method to ngram"):
        resolve(deployment)
