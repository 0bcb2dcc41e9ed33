"""1A1F on a checkpoint whose experts are FP8 in blocks: the tokens of the decoded checkpoint.

Both sides compute in float32, where decoding is exact, so the tokens equal those that colocated
vLLM computes from a checkpoint with the decoded values (vLLM 0.26 has no FP8 experts on CPUs).
"""

import json
from pathlib import Path

import pytest
from deployments import BLOCK, SETTINGS, Models
from helpers import VOCAB

from afd.models import read_model
from afd_bench.servers import colocated, disaggregated
from afd_bench.workload import mixed, run

pytestmark = pytest.mark.serve

REQUESTS = mixed(11, vocab=VOCAB, count=16)


def write(source: Path, target: Path, tensors: dict, quantization: dict | None) -> None:
    from safetensors.torch import save_file

    target.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text())
    if quantization is not None:
        config["quantization_config"] = quantization
    (target / "config.json").write_text(json.dumps(config))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory, tiny_models: Models) -> tuple[Path, Path]:
    """The tiny Qwen3-MoE with experts in FP8 blocks, and one with their decoded values."""
    from safetensors.torch import load_file

    from afd.wire.layout import Tag
    from ffn_worker.moe.quantise import dequantise_weight, quantise_weight

    source = tiny_models("qwen3_moe")
    family, _ = read_model(source)
    stored = load_file(source / "model.safetensors")
    fp8, decoded = dict(stored), dict(stored)
    for name in filter(family.is_expert_weight, stored):
        weight = quantise_weight(stored[name].float(), Tag.E4M3FN)
        fp8[name], fp8[f"{name}_scale_inv"] = weight.codes, weight.scales
        decoded[name] = dequantise_weight(weight)
    root = tmp_path_factory.mktemp("fp8")
    blocks = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["self_attn", "mlp.gate", "lm_head"],
    }
    write(source, root / "blocks", fp8, blocks)
    write(source, root / "decoded", decoded, None)
    return root / "blocks", root / "decoded"


def test_tokens_are_those_of_the_decoded_checkpoint(checkpoints: tuple[Path, Path]) -> None:
    blocks, decoded = checkpoints
    with colocated(
        decoded,
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=32,
        kv_cache_gib=0.25,
        vllm_args=[BLOCK],
    ) as server:
        wanted = run(server.url, server.model, REQUESTS, salt="decoded")
    attention = {**SETTINGS, "max_num_batched_tokens": 128, "vllm_args": [BLOCK]}
    config = {
        "model": str(blocks),
        "attention": attention,
        "pipeline": {"depth": 3, "min_rows": 1},
    }
    with disaggregated(config) as served:
        found = run(served.url, served.model, REQUESTS, salt="blocks")
        log = served.log.read_text(errors="replace")
    assert [answer.tokens for answer in found] == [answer.tokens for answer in wanted]
    assert "experts: fp8_block in the checkpoint" in log
    assert "converted at load to float32 for backend vllm_cpu" in log
