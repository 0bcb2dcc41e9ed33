"""The rounding formats that are compared with the wire's, and rounding inside a model."""

import pytest

torch = pytest.importorskip("torch")

from training.model import Model, ModelConfig  # noqa: E402
from training.rounding import (  # noqa: E402
    FORMATS,
    Code,
    bfloat16,
    divergence,
    fp8,
    fp8_best_scale,
    fp8_wire,
    identity,
    int8,
    run,
)

CONFIG = ModelConfig(
    vocab=64, hidden=128, layers=2, heads=2, kv_heads=1, head_dim=64, experts=4, top_k=2,
    intermediate=16, context=32,
)  # fmt: skip


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model(CONFIG).eval()


@pytest.fixture
def rows() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(64, (20,), generator=draw) for _ in range(3)]


def error(code: Code, x: torch.Tensor) -> float:
    return ((code(x) - x).norm() / x.norm()).item()


def test_the_wires_own_rounding_is_fp8_per_128_columns() -> None:
    x = torch.randn(9, 256, generator=torch.Generator().manual_seed(0))
    assert torch.equal(fp8_wire(x), fp8(128)(x))


def test_errors_of_formats_are_ordered_by_precision() -> None:
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    assert error(bfloat16, x) < error(int8(32), x) < error(int8(128), x) < error(fp8_wire, x) / 2
    assert error(fp8_best_scale, x) < error(fp8_wire, x)
    assert error(fp8(128, power_of_two=True), x) == pytest.approx(error(fp8_wire, x), rel=0.1)
    assert all(code(x).shape == x.shape for code in FORMATS.values())


def test_rounding_one_layer_or_all(model: Model, rows: list[torch.Tensor]) -> None:
    with torch.no_grad():
        plain = [model(row[None])[0][0, :-1].log_softmax(-1) for row in rows]
    base = run(model, rows, identity)
    assert all(torch.equal(a, b) for a, b in zip(plain, base.logprobs, strict=True))
    assert base.error == 0.0
    every = divergence(base, run(model, rows, fp8_wire), rows)
    one = divergence(base, run(model, rows, fp8_wire, only=1), rows)
    assert 0.0 < one.kl < every.kl
    again = divergence(base, run(model, rows, identity), rows)
    assert (again.kl, again.top1, again.perplexity) == (0.0, 1.0, 0.0), "rounding changed the model"


def test_the_choice_of_experts_can_be_kept(model: Model, rows: list[torch.Tensor]) -> None:
    base = run(model, rows, identity)
    kept = run(model, rows, lambda x: x + 0.5 * x.roll(1, -1), like=base)
    own = run(model, rows, lambda x: x + 0.5 * x.roll(1, -1))
    same = run(model, rows, identity, like=base)
    assert divergence(base, same, rows).kl < 1e-6
    assert divergence(base, kept, rows).kl != divergence(base, own, rows).kl
