"""The sigmoid gates on shared experts (Qwen2-MoE). One row per layer, so every rank holds all."""

from os import PathLike

import torch
from safetensors import safe_open

from afd.errors import ConfigError
from afd.models import Family, MoeModel
from afd.models.checkpoint import tensor_table


def read_gates(
    path: str | PathLike[str], family: Family, model: MoeModel, device: torch.device
) -> dict[int, torch.Tensor]:
    """Returns by layer the weight [1, hidden] of the gate, float32; {}: the family has none.

    Raises:
        ConfigError: a gate is missing or has another shape.
    """
    if not family.shared_gate or not model.shared_intermediate:
        return {}
    table = tensor_table(path)
    gates: dict[int, torch.Tensor] = {}
    for layer in model.moe_layers:
        name = family.shared_gate.format(layer=layer)
        if name not in table:
            raise ConfigError(f"{path} has no tensor {name}; finish or repeat the download")
        with safe_open(str(table[name].file), framework="pt") as file:
            weight = file.get_tensor(name)
        if weight.numel() != model.hidden:
            raise ConfigError(
                f"tensor {name} in {table[name].file} has shape {list(weight.shape)}, config.json "
                f"asks for [1, {model.hidden}]; use the config.json that belongs to these weights"
            )
        gates[layer] = weight.float().view(1, model.hidden).to(device)
    return gates


def gated(output: torch.Tensor, hidden: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
    """Returns sigmoid(hidden @ gate.T) * output, in the dtype of output; gate None: output.

    All in that dtype, as in vLLM 0.26 (models/qwen2_moe.py, `Qwen2MoeMLP`).

    Args:
        output, hidden: [rows, hidden]. gate: float32 [1, hidden].
    """
    if gate is None:
        return output
    logits = torch.nn.functional.linear(hidden, gate.to(hidden.dtype))
    return torch.sigmoid(logits) * output
