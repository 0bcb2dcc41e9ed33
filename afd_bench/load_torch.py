"""A process of `afd bench load`: does the jobs that come on standard input, one JSON per line."""

import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from afd.models import read_model
from afd.models.checkpoint import INDEX_FILE, weight_files
from afd_bench.load import RESULT

Job = dict[str, object]
_NAME = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")


def write(job: Job) -> dict[str, float]:
    """Writes random experts, one file per layer, with config.json and an index."""
    folder = Path(str(job["folder"]))
    layers, experts, hidden, width = (
        int(str(job[name])) for name in ("layers", "experts", "hidden", "width")
    )
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "moe_intermediate_size": width,
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    # Slices of one random tensor: drawing all values would take longer than loading them.
    values = torch.randn(2 * hidden * width).bfloat16()
    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    weight_map: dict[str, str] = {}
    for layer in range(layers):
        tensors: dict[str, torch.Tensor] = {}
        for expert in range(experts):
            for projection, shape in shapes.items():
                name = f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight"
                first = (len(tensors) + layer) * 61 % (hidden * width)
                tensors[name] = values[first : first + hidden * width].reshape(shape).clone()
        file = f"model-{layer:05}.safetensors"
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    return {}


def load(job: Job) -> dict[str, float]:
    """Loads a rank's experts with one side's loader; returns the fields of a Cell."""
    folder, threads = Path(str(job["folder"])), int(str(job["threads"]))
    device = torch.device("cpu" if job["sink"] == "host" else "meta")
    shard = str(job["shard"])
    ranks = 1 if shard == "all" else int(shard[2:])
    instances, tp = (ranks, 1) if shard.startswith("ep") else (1, ranks)
    side = _ours if job["side"] == "afd" else _vllm
    run = side(folder, instances, tp, threads, device)
    reset_peak()
    before, began = resident("VmRSS"), time.monotonic()
    kept = run()
    seconds = time.monotonic() - began
    nbytes = sum(tensor.nbytes for tensor in kept) if device.type == "cpu" else 0
    peak = resident("VmHWM") - before - nbytes
    return {"seconds": seconds, "kept_bytes": nbytes, "peak_host_bytes": max(peak, 0)}


Run = Callable[[], list[torch.Tensor]]


def _ours(folder: Path, instances: int, tp: int, threads: int, device: torch.device) -> Run:
    from ffn_worker.experts.build import load_ffn_model

    family, model = read_model(folder)

    def run() -> list[torch.Tensor]:
        ffn = load_ffn_model(
            folder, family, model, instances=instances, index=0, tp=tp, rank=0,
            backend="torch", device=device, threads=threads,
        )  # fmt: skip
        held = [held for layer in model.moe_layers for held in ffn.banks.of(layer)]
        assert held
        return list(_weights(bank.backend for bank in held))

    return run


def _weights(backends: Iterable[object]) -> Iterator[torch.Tensor]:
    """Yields the tensors of the backend ``torch``."""
    from ffn_worker.moe.torch_grouped import TorchBackend

    for backend in dict.fromkeys(backends):
        assert isinstance(backend, TorchBackend)
        for pair in backend._weights.values():
            yield from (weight.codes for weight in pair)


def _vllm(folder: Path, instances: int, tp: int, _threads: int, device: torch.device) -> Run:
    from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator

    _, model = read_model(folder)
    hidden, width, experts = model.hidden, model.moe_intermediate // tp, model.num_experts
    count = experts // instances
    # A device reads the mapped pages: so does a copy into host memory that is used again and again.
    scratch = torch.empty(hidden * width, dtype=torch.bfloat16)

    def put(out: torch.Tensor, part: torch.Tensor) -> None:
        into = scratch[: part.numel()].view(part.shape) if device.type == "meta" else out
        into.copy_(part)

    files = [str(file) for file in weight_files(folder)]

    def run() -> list[torch.Tensor]:
        kept = {
            (layer, key): torch.empty(count, *shape, dtype=torch.bfloat16, device=device)
            for layer in model.moe_layers
            for key, shape in (("w13", (2 * width, hidden)), ("w2", (hidden, width)))
        }
        local = set(range(count)) if instances > 1 else None
        for name, tensor in safetensors_weights_iterator(files, False, None, local):
            found = _NAME.fullmatch(name)
            assert found is not None
            layer, expert, projection = int(found[1]), int(found[2]), found[3]
            if projection == "down":
                put(kept[layer, "w2"][expert], tensor.narrow(1, 0, width))
            else:
                first = 0 if projection == "gate" else width
                rows = kept[layer, "w13"][expert].narrow(0, first, width)
                put(rows, tensor.narrow(0, 0, width))
        return list(kept.values())

    return run


def reset_peak() -> None:
    """Sets the process's highest resident memory to what it is now (proc(5), clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")


def resident(which: str) -> int:
    """Returns ``VmRSS``, ``VmHWM`` or ``VmData`` of this process, bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(which + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(which)


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        job = json.loads(line)
        found = write(job) if job["what"] == "write" else load(job)
        print(RESULT + json.dumps(found), flush=True)  # other lines are vLLM's log


if __name__ == "__main__":
    main()
