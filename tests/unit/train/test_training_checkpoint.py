"""The shipped model: shape, size, documentation, and quality."""

import hashlib
import json
from pathlib import Path

import pytest

from afd.models import read_config, read_model
from afd.models.checkpoint import fingerprint, tensor_table

ROOT = Path(__file__).parents[3]
CHECKPOINT = ROOT / "afd_launch/data/demo/afd-tiny-chat"
MIB = 2**20


def test_architecture_is_the_documented_one():
    family, model = read_model(CHECKPOINT)
    assert family.name == "qwen3_moe"
    assert (model.hidden, model.num_layers, model.num_experts, model.top_k) == (256, 8, 32, 4)
    assert model.dtype == "bfloat16" and model.moe_layers == tuple(range(8))
    config = read_config(CHECKPOINT)
    assert config["norm_topk_prob"] is True and config["hidden_size"] % 128 == 0


def test_folder_stays_below_40_mib_and_each_text_below_1_mib():
    sizes = {file.name: file.stat().st_size for file in CHECKPOINT.iterdir()}
    assert sum(sizes.values()) <= 40 * MIB
    assert all(size <= MIB for name, size in sizes.items() if name != "model.safetensors")


def test_weights_equal_the_documented_ones():
    digest = hashlib.sha256((CHECKPOINT / "model.safetensors").read_bytes()).hexdigest()
    assert digest in (ROOT / "docs" / "model.md").read_text()
    table = tensor_table(CHECKPOINT)
    assert {info.dtype for info in table.values()} == {"BF16"}
    assert sum(info.nbytes for info in table.values()) == 2 * 19_469_568


def test_routing_statistics_belong_to_this_checkpoint():
    found = json.loads((ROOT / "afd_planner/data/routing" / "afd-tiny-chat.json").read_text())
    assert found["fingerprint"] == fingerprint(CHECKPOINT)
    for text in found["texts"].values():
        assert len(text["layers"]) == 8
        for layer in text["layers"]:
            assert len(layer["load"]) == 32
            assert sum(layer["load"]) == pytest.approx(1.0, abs=1e-3)
            assert 0.7 < layer["entropy"] < 1.0  # neither even nor collapsed
            assert layer["imbalance"] >= 1.0


def test_tokenizer_fits_the_model_and_renders_chats():
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    config = read_config(CHECKPOINT)
    assert tokenizer.get_vocab_size() == config["vocab_size"]
    assert tokenizer.token_to_id("<|im_end|>") == config["eos_token_id"]
    text = (CHECKPOINT / "heldout-chat.txt").read_text()[:5000]
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert len(text) / len(ids) > 2.5  # characters per token


def test_it_predicts_heldout_conversations():
    """Perplexity in float32 is far below that of an untrained model, which is 8,192."""
    torch = pytest.importorskip("torch")
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("safetensors")
    from training.routing import load_model

    model = load_model(CHECKPOINT)
    tokenizer = tokenizers.Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    text = (CHECKPOINT / "heldout-chat.txt").read_text().replace("\n\n---\n\n", "\n<|endoftext|>")
    ids = torch.tensor(tokenizer.encode(text).ids[:257])
    with torch.no_grad():
        logits, _ = model(ids[None, :-1])
    loss = torch.nn.functional.cross_entropy(logits[0], ids[1:])
    assert loss.exp().item() < 2.5
