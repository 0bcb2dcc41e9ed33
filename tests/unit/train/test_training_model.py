"""The training model: dropless MoE, exported weights, and agreement with Transformers."""

import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")

import torch
from safetensors.torch import load_file

from afd.models import read_model
from training.export import export, load_hf_tensors
from training.model import Model, ModelConfig, Moe, auxiliary_losses
from training.train import TrainConfig, learning_rate

TINY = ModelConfig(
    vocab=300, hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, experts=8, top_k=2,
    intermediate=32, context=64,
)  # fmt: skip


def random_model(seed: int = 0) -> Model:
    """Returns a model with far larger weights than at initialisation, so that errors show."""
    torch.manual_seed(seed)
    model = Model(TINY)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter) * 0.15
            parameter.copy_(1 + noise if parameter.ndim == 1 else noise)
    return model.eval()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_moe_equals_the_expert_by_expert_reference(seed):
    torch.manual_seed(seed)
    moe = Moe(TINY)
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(3, 7, TINY.hidden)
    out, routing = moe(x)
    torch.testing.assert_close(out, moe.reference(x), rtol=1e-5, atol=1e-5)
    rows = x.flatten(0, 1)
    wide = moe.wide(rows, moe.route(rows)[0]).view_as(x)
    torch.testing.assert_close(out, wide, rtol=1e-5, atol=1e-5)
    assert routing.chosen.sum(-1).eq(TINY.top_k).all()


def test_gradients_equal_those_of_the_reference():
    """In float64: in float32, sums of thousands that cancel are off by more than small gradients.

    How much depends on the CPU's kernels. What both sides compute in float32 (the router, the sum
    over experts) is off by 1e-7 of the largest gradient.
    """
    torch.manual_seed(3)
    moe = Moe(TINY).double()
    for parameter in moe.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = torch.randn(2, 5, TINY.hidden, dtype=torch.float64)
    fast = torch.autograd.grad(moe(x)[0].square().sum(), list(moe.parameters()))
    slow = torch.autograd.grad(moe.reference(x).square().sum(), list(moe.parameters()))
    for a, b in zip(fast, slow, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6 * float(b.abs().max()))


def test_exported_model_equals_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    model = random_model()
    export(model, tmp_path, dtype="float32")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ids = torch.randint(0, TINY.vocab, (2, 48))
    with torch.no_grad():
        ours = model(ids)[0]
        expected = theirs.eval()(ids).logits
    assert ours.std() > 0.1
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_export_and_load_are_inverse(tmp_path):
    model, other = random_model(0), random_model(1)
    export(model, tmp_path, dtype="float32")
    load_hf_tensors(other, load_file(tmp_path / "model.safetensors"))
    ids = torch.randint(0, TINY.vocab, (1, 20))
    with torch.no_grad():
        assert torch.equal(model(ids)[0], other(ids)[0])
    assert json.loads((tmp_path / "config.json").read_text())["norm_topk_prob"] is True
    family, described = read_model(tmp_path)
    assert (family.name, described.num_experts, described.top_k) == ("qwen3_moe", 8, 2)


def test_even_routing_has_balance_one():
    model = random_model()
    _, routings = model(torch.randint(0, TINY.vocab, (2, 32)))
    balance, z = auxiliary_losses(routings, TINY.top_k)
    assert balance > 0.95 and z > 0
    even = [
        type(r)(torch.full_like(r.probabilities, 1 / 8), torch.full_like(r.chosen, 2 / 8), r.logits)
        for r in routings
    ]
    assert auxiliary_losses(even, TINY.top_k)[0].item() == pytest.approx(1.0)


def test_learning_rate_warms_up_stays_and_ends_at_zero():
    config = TrainConfig(steps=1000, warmup=100, decay_share=0.25, lr=1e-3)
    assert learning_rate(config, 0.0) == pytest.approx(1e-5)
    assert learning_rate(config, 0.5) == pytest.approx(1e-3)
    assert learning_rate(config, 0.875) == pytest.approx(5e-4)
    assert learning_rate(config, 1.0) == 0.0
