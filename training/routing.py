"""Measures the expert loads of a checkpoint: `python -m training.routing CHECKPOINT OUT.json`.

Runs the training model in float32 on the CPU over the checkpoint's held-out texts.
afd_planner/data/routing/README.md describes the file. Planner and benchmarks use it instead of even
routing.
"""

import argparse
import json
import math
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from afd.models import read_config
from afd.models.checkpoint import fingerprint
from training.export import load_hf_tensors
from training.model import Model, ModelConfig

TEXTS = {"prose": "heldout.txt", "chat": "heldout-chat.txt"}
ROWS = (16, 64, 256, 1024)  # sizes of the windows
MAX_TOKENS = 60 * 1024


def load_model(checkpoint: Path) -> Model:
    """Returns the checkpoint as a training model in float32."""
    config = read_config(checkpoint)
    names = {
        "vocab": "vocab_size", "hidden": "hidden_size", "layers": "num_hidden_layers",
        "heads": "num_attention_heads", "kv_heads": "num_key_value_heads", "head_dim": "head_dim",
        "experts": "num_experts", "top_k": "num_experts_per_tok",
        "intermediate": "moe_intermediate_size", "context": "max_position_embeddings",
    }  # fmt: skip
    sizes = {ours: int(str(config[theirs])) for ours, theirs in names.items()}
    model = Model(ModelConfig(**sizes))
    load_hf_tensors(model, load_file(checkpoint / "model.safetensors"))
    return model.eval()


@torch.no_grad()
def chosen_experts(model: Model, ids: Tensor) -> Tensor:
    """Returns the experts that each of ids [rows] chose: [layers, rows, experts] bool."""
    found = []
    for row in ids.split(model.c.context):
        _, routings = model(row[None])
        found.append(torch.stack([r.chosen.bool() for r in routings]))
    return torch.cat(found, 1)


def layer_statistics(chosen: Tensor) -> dict[str, object]:
    """Of one layer's [rows, experts] bool: shares of the load, its entropy, the imbalance.

    Imbalance is the load of the busiest expert over the mean, in windows of so many rows: the
    median and the 95th percentile over the windows. `used` is the mean number of experts that
    get any row in a window.
    """
    load = chosen.float().sum(0)
    share = load / load.sum()
    windows: dict[str, dict[str, float]] = {}
    for rows in ROWS:
        count = len(chosen) // rows
        if not count:
            continue
        loads = chosen[: count * rows].view(count, rows, -1).float().sum(1)
        ratio = loads.amax(1) / loads.mean(1)
        windows[str(rows)] = {
            "imbalance_p50": round(ratio.median().item(), 3),
            "imbalance_p95": round(ratio.quantile(0.95).item(), 3),
            "used": round((loads > 0).float().sum(1).mean().item(), 2),
        }
    entropy = -(share * share.clamp_min(1e-12).log()).sum().item() / math.log(len(share))
    return {
        "load": [round(s, 5) for s in share.tolist()],
        "entropy": round(entropy, 4),
        "imbalance": round((share.max() * len(share)).item(), 3),
        "windows": windows,
    }


def statistics(model: Model, checkpoint: Path) -> dict[str, object]:
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    texts: dict[str, object] = {}
    for name, file in TEXTS.items():
        ids = torch.tensor(tokenizer.encode((checkpoint / file).read_text()).ids[:MAX_TOKENS])
        chosen = chosen_experts(model, ids)
        texts[name] = {
            "rows": len(ids),
            "layers": [layer_statistics(layer) for layer in chosen],
        }
    return {
        "model": checkpoint.name,
        "fingerprint": fingerprint(checkpoint),
        "experts": model.c.experts,
        "top_k": model.c.top_k,
        "layers": model.c.layers,
        "texts": texts,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the load of the experts.")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    found = statistics(load_model(args.checkpoint), args.checkpoint)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{args.out}: {found['layers']} layers, {', '.join(TEXTS)}")


if __name__ == "__main__":
    main()
