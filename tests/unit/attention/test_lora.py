"""Which modules a LoRA adapter may change."""

import pytest

pytest.importorskip("vllm", reason="the package vllm is not installed; ./run test installs it")
torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402

from afd.errors import ConfigError  # noqa: E402
from attention_worker.vllm_hooks.lora import check_adapter, outside, unpacked  # noqa: E402

ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
LAYER = "base_model.model.model.layers.0."


def test_names_of_adapters_are_those_before_vllm_packs_them():
    packed = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
    assert unpacked(packed, ["o_proj", "qkv_proj"]) == ATTENTION


@pytest.mark.parametrize(
    ("module", "found"),
    [
        ("self_attn.q_proj", []),
        ("mlp.down_proj", ["down_proj"]),
        ("mlp.gate", ["gate"]),
        ("mlp.experts.3.up_proj", ["experts"]),
        ("mlp.experts.base_layer", ["experts"]),
        ("mlp.experts", ["experts"]),
        ("mlp.shared_experts.gate_proj", ["gate_proj"]),
    ],
)
def test_modules_outside_attention_are_found(module, found):
    names = [f"{LAYER}{module}.lora_{part}.weight" for part in "AB"]
    assert outside([*names, f"{LAYER}self_attn.o_proj.lora_A.weight"], ATTENTION) == found


def test_an_adapter_of_experts_is_refused_with_its_name_and_a_remedy(tmp_path):
    tensor = torch.zeros(2, 2)
    names = [
        f"{LAYER}mlp.experts.0.up_proj.lora_A.weight",
        f"{LAYER}self_attn.q_proj.lora_A.weight",
    ]
    save_file({name: tensor.clone() for name in names}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ConfigError) as caught:
        check_adapter("chat", tmp_path, ATTENTION)
    text = str(caught.value)
    assert text.startswith(f"LoRA adapter chat ({tmp_path}) changes experts, but")
    assert "train it with target_modules of attention" in text and "\n" not in text


def test_rows_without_an_adapter_stay_as_they_are_beside_others():
    """Against a plain loop over rows, through vLLM's own entry point."""
    from vllm.lora.layers import LoRAMapping

    from attention_worker.vllm_hooks.cpu_runner import CpuAdapterRows

    torch.manual_seed(0)
    rows, hidden, width, rank, slots = 9, 16, 12, 4, 3
    of_rows = (0, 7, 7, 0, 5, 0, 5, 9, 0)  # ids of adapters; 0: none
    ids = [7, 5, 9]  # of slot 0, 1, 2
    wrapper = CpuAdapterRows(64, 64, torch.device("cpu"))
    mapping = LoRAMapping(of_rows, of_rows, is_prefill=True)
    wrapper.update_metadata(mapping, ids, slots, 100)
    x, base = torch.randn(rows, hidden), torch.randn(rows, width)
    down, up = torch.randn(slots, 1, rank, hidden), torch.randn(slots, 1, width, rank)
    found = base.clone()
    wrapper.add_lora_linear(found, x, (down,), (up,), 0.5, (width,))
    for row, adapter in enumerate(of_rows):
        want = base[row]
        if adapter:
            slot = ids.index(adapter)
            want = want + 0.5 * (up[slot, 0] @ (down[slot, 0] @ x[row]))
        torch.testing.assert_close(found[row], want)
