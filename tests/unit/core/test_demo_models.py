"""Random checkpoints: reproducible, readable by their family, with a working chat template."""

import json
import subprocess
import sys

import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")

from tokenizers import Tokenizer

from afd.errors import ConfigError
from afd.models import read_config, read_model
from afd.models.checkpoint import fingerprint, tensor_table
from afd_demo.make_model import main, make_model
from afd_demo.sizes import FAMILIES, PRESETS, resolve
from afd_demo.tokenizer import CHAT_TEMPLATE, MARKUP

SMALL = {"hidden": 64, "layers": 4, "experts": 4, "intermediate": 64, "vocab": 512}


@pytest.mark.parametrize("family", FAMILIES)
def test_written_model_is_read_back(family, tmp_path):
    nbytes = make_model(family, tmp_path, resolve(family, "tiny", **SMALL))
    described, model = read_model(tmp_path)
    assert (model.hidden, model.num_layers, model.num_experts) == (64, 4, 4)
    assert model.moe_layers == (tuple(range(4)) if family == "qwen3_moe" else (1, 2, 3))
    assert model.dtype == "bfloat16"
    table = tensor_table(tmp_path)
    assert sum(info.nbytes for info in table.values()) == nbytes
    experts = [name for name in table if described.is_expert_weight(name)]
    layers = {int(name.split(".")[2]) for name in experts}
    assert layers == set(model.moe_layers)


def test_same_seed_same_model(tmp_path):
    sizes = resolve("deepseek_v3", "tiny", **SMALL)
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_model("deepseek_v3", tmp_path / name, sizes, seed=seed)
    prints = [fingerprint(tmp_path / name) for name in "abc"]
    assert prints[0] == prints[1] != prints[2]
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in "ab"]
    assert weights[0] == weights[1]
    tokenizers = [(tmp_path / name / "tokenizer.json").read_text() for name in "ab"]
    assert tokenizers[0] == tokenizers[1]


def test_step3_with_a_dense_last_layer(tmp_path):
    sizes = resolve("step3", "tiny", **SMALL, dense_last=True)
    make_model("step3", tmp_path, sizes, dtype="float32")
    _, model = read_model(tmp_path)
    assert read_config(tmp_path)["moe_layers_enum"] == "1,2"
    assert (model.moe_layers, model.dtype) == ((1, 2), "float32")
    table = tensor_table(tmp_path)
    assert "model.layers.3.mlp.down_proj.weight" in table
    assert {info.dtype for info in table.values()} == {"F32"}


def test_tokenizer_round_trip_and_ids(tmp_path):
    make_model("qwen3_moe", tmp_path, resolve("qwen3_moe", "tiny", **SMALL))
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() <= 512
    text = "Ünïcode, numbers 123 and\n\ttabs <tool_call> too"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    for token in MARKUP:
        assert len(tokenizer.encode(token).ids) == 1
    config = read_config(tmp_path)
    assert tokenizer.token_to_id("<|im_end|>") == config["eos_token_id"] == 2
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 0, "eos_token_id": 2}


def render(**values):
    jinja2 = pytest.importorskip("jinja2")
    # The settings that Transformers renders chat templates with.
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = json.dumps
    return environment.from_string(CHAT_TEMPLATE).render(**values)


def test_chat_template_plain():
    text = render(
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello"},
            {"role": "user", "content": "Bye"},
        ],
        add_generation_prompt=True,
    )
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_chat_template_tools():
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    text = render(
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "1+1?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "2"},
        ],
        tools=[tool],
        add_generation_prompt=True,
    )
    assert text.count("<|im_start|>system") == 1
    assert text.startswith("<|im_start|>system\nBe brief.\n\nYou may call")
    assert f"<tools>\n{json.dumps(tool)}\n</tools>" in text
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>' in text
    assert "<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n" in text
    assert text.endswith("<|im_start|>assistant\n")
    # Arguments that arrive as a JSON string are not encoded twice.
    call["function"]["arguments"] = '{"a": 1}'
    again = render(messages=[{"role": "assistant", "content": "", "tool_calls": [call]}])
    assert '"arguments": {"a": 1}}' in again


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("gpt", {}, "family 'gpt'"),
        ("step3", {"layers": 1}, "at least 2 layers"),
        ("step3", {"layers": 2, "dense_last": True}, "at least 3 layers"),
        ("qwen3_moe", {"top_k": 9}, "top_k 9"),
        ("qwen3_moe", {"hidden": 0}, "hidden is 0"),
        ("qwen3_moe", {"dense_last": True}, "step3 only"),
        ("deepseek_v3", {"experts": 7}, "2 groups"),
    ],
)
def test_impossible_sizes(family, changes, words):
    with pytest.raises(ConfigError, match=words):
        resolve(family, "tiny", **changes)


def test_presets():
    assert (PRESETS["tiny"].hidden, PRESETS["tiny"].vocab) == (256, 2048)
    with pytest.raises(ConfigError, match="preset 'huge'"):
        resolve("qwen3_moe", "huge")
    demo = PRESETS["demo"]
    experts = demo.layers * demo.experts * 3 * demo.hidden * demo.intermediate
    assert 2 * experts < 100e6


def test_command_line(tmp_path, capsys):
    arguments = ["step3", str(tmp_path / "m"), "--hidden", "64", "--experts", "4"]
    assert main([*arguments, "--vocab", "512", "--dense-last", "--seed", "7"]) == 0
    assert "step3" in capsys.readouterr().out
    assert read_model(tmp_path / "m")[1].moe_layers == (1, 2)
    assert main([*arguments, "--vocab", "100"]) == 2
    assert "afd: error: vocab 100 is too small" in capsys.readouterr().err


def test_needs_no_torch(tmp_path):
    code = (
        "import sys; from afd_demo.make_model import main; "
        f"assert main(['qwen3_moe', {str(tmp_path)!r}, '--hidden', '64', '--vocab', '512']) == 0; "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
