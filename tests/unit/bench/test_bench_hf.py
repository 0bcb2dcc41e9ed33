"""The independent references: Step-3 in plain torch, and the wire's rounding inside a model."""

from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from afd_bench.hf import compared, differences, page  # noqa: E402
from afd_bench.hf_step3_torch import Step3  # noqa: E402
from afd_bench.hf_torch import from_ffn, put_on_wire, to_ffn  # noqa: E402
from afd_bench.workload import Answer  # noqa: E402


def test_step3_looks_back_only_and_decodes_greedily(tiny_models: Callable[[str], Path]) -> None:
    model = Step3(tiny_models("step3"))
    prompt = (20, 30, 40, 50)
    tokens = model.greedy(prompt, 3)
    assert tokens[0] == int(model.logits(torch.tensor(prompt)).argmax())
    assert tokens[2] == int(model.logits(torch.tensor([*prompt, *tokens[:2]])).argmax())
    assert model.logits(torch.tensor(prompt)).shape == (2048,)


def test_step3_depends_on_order_and_position(tiny_models: Callable[[str], Path]) -> None:
    model = Step3(tiny_models("step3"))
    one, other = model.logits(torch.tensor([20, 30, 40])), model.logits(torch.tensor([30, 20, 40]))
    assert not torch.allclose(one, other, atol=1e-3)
    # With rotary embeddings only distances count; without a begin token a repeat is a repeat.
    again = model.logits(torch.tensor([25, 25, 25]))
    assert torch.allclose(again, model.logits(torch.tensor([25])), atol=1e-3)


def test_step3_rounds_only_what_goes_to_the_experts(tiny_models: Callable[[str], Path]) -> None:
    path, tokens = tiny_models("step3"), torch.tensor([20, 30, 40])
    seen: list[torch.Tensor] = []

    def keep(rows: torch.Tensor) -> torch.Tensor:
        seen.append(rows)
        return rows

    plain = Step3(path, to_ffn=keep).logits(tokens)
    assert [rows.shape for rows in seen] == [(3, 256)] * 2  # two of the layers have experts
    assert torch.equal(plain, Step3(path).logits(tokens))
    rounded = Step3(path, to_ffn=to_ffn, from_ffn=from_ffn).logits(tokens)
    change = (rounded - plain).norm() / plain.norm()
    assert 0.001 < change < 0.5


def test_rows_on_the_wire_lose_what_e4m3_loses() -> None:
    rows = torch.randn(4, 5, 256, generator=torch.Generator().manual_seed(0))
    there = to_ffn(rows)
    assert there.shape == rows.shape
    relative = ((there - rows).abs() / rows.abs().clamp_min(1e-2)).max()
    assert 0.01 < relative < 0.07  # three mantissa bits: at most 1/16
    back = from_ffn(rows)
    assert back.dtype == rows.dtype
    assert torch.equal(back, rows.bfloat16().float())


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2", "deepseek_v3"])
def test_every_moe_block_of_transformers_is_found(
    family: str, tiny_models: Callable[[str], Path]
) -> None:
    config = transformers.AutoConfig.from_pretrained(tiny_models(family))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    tokens = torch.tensor([[20, 30, 40]])
    with torch.inference_mode():
        plain = model(tokens).logits
        assert put_on_wire(model) == 2
        assert not torch.equal(model(tokens).logits, plain)


def test_comparison_names_the_request_and_its_gap() -> None:
    ours = [Answer((1, 2), (0.5, 0.25)), Answer((3,), (0.125,))]
    record = compared("step3 float32 colocated", "match", "torch", ours, [(1, 9), (3,)], "c")
    assert record.value == record.ratio == 0.5
    notes = differences("step3", ours, [(1, 9), (3,)])
    assert notes == [
        "step3: request 0 differs from token 1 of 2 on; there the two best tokens are 0.25 nats"
        " apart"
    ]
    text = page([record], notes)
    assert "| step3 float32 colocated | torch | 0.500 |  |" in text
    assert f"- {notes[0]}" in text
