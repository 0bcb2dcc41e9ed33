"""Arguments of vLLM that a deployment file must not set."""

import json
from pathlib import Path

import pytest

from afd.config.deployment import load_config
from afd.config.sections import Attention
from afd.config.vllm_arguments import REFUSED, SHORT, refusal
from afd.errors import ConfigError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("[--port=9000]", "attention.vllm_args has --port, which AFD sets; use attention.port"),
        ("[--seed=1, --port, '9000']", "has --port, which AFD sets; use attention.port"),
        ("[--max_num_seqs=4]", "has --max_num_seqs, which AFD sets; use attention.max_num_seqs"),
        ("[--served-model-name, x]", "which AFD sets; use served_model_name"),
        ("[--ssl-certfile=a]", "the gateway speaks plain HTTP"),
        ("[-tp=2]", "has -tp, which AFD sets; use attention.tp"),
        ("[-tp2]", "has -tp2, which AFD sets; use attention.tp"),
        ("[-dpl, '2']", "has -dpl, which attention instances do not support"),
        ("[--data_parallel_size_local=2]", "use attention.instances"),
        ("[--tensor-par=2]", "use attention.tp"),
        ("[--speculative-config.method=ngram]", "which AFD sets; use attention.speculation"),
        ("[--spec-method=ngram]", "which AFD sets; use attention.speculation"),
        ("[--default-mm-loras=x]", "LoRA adapters outside attention"),
        ("[--lora-target-modules, q_proj]", "which AFD sets to the attention projections"),
        ("[--cudagraph-capture-sizes, '8']", "to what both sides capture; use pipeline.graphs"),
        (
            "[--kv-transfer-config.kv_connector=NixlConnector]",
            "which AFD sets; use the section prefill",
        ),
        (
            '[--kv-transfer-config, \'{"kv_connector": "x"}\']',
            "which AFD sets; use the section prefill",
        ),
        ("[--kv_offloading_size=4]", "(KV offloading, transfer of encoder outputs); remove it"),
        ("[--worker-cls=x.Y]", "which AFD sets; remove it"),
    ],
)
def test_an_argument_that_breaks_an_instance_is_refused_with_a_remedy(tmp_path, arguments, message):
    path = tmp_path / "demo.yaml"
    path.write_text(f"model: m\nattention: {{vllm_args: {arguments}}}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_other_arguments_are_passed():
    connector = {"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both"}
    allowed = (
        "--api-key=--port",
        "--block-size=16",
        "--chat-template",
        "--port of a template",
        "--compilation-config.cudagraph_capture_sizes=[1]",
        "--config-format=hf",
        "--distributed-executor-backend=mp",
        "--enable-auto-tool-choice",
        "--gpu-memory-utilization=0.4",
        "--enable-lora",
        "--kv-cache-dtype",
        "fp8",
        f"--kv-transfer-config={json.dumps(connector)}",
        "--lora-modules",
        "name=folder",
        "--max-logprobs=20",
        "--max-loras=2",
        "--model-impl=auto",
        "--num-gpu-blocks-override=64",
        "--seed=1",
        "--skip-tokenizer-init",
        "--tool-call-parser",
        "hermes",
        "-O3",
        "-1",
    )
    assert refusal(allowed) is None
    assert Attention(vllm_args=allowed).vllm_args == allowed


def test_every_remedy_names_an_existing_key():
    for reason in REFUSED.values():
        *_, key = reason.partition("use attention.")
        assert not key or key in Attention.model_fields


def test_short_names_stand_for_refused_ones():
    for short, long in SHORT.items():
        assert refusal([short]) is not None and refusal([f"{short}=1"]) is not None
        assert refusal([long]) is not None


def test_the_documentation_lists_what_is_refused():
    """Replace the part between the marks by what this test expects if it fails."""
    page = Path(__file__).parents[3] / "docs" / "vllm-features.md"
    _, _, listed = page.read_text().partition("<!-- refused: begin -->\n")
    listed, _, _ = listed.partition("<!-- refused: end -->")
    rows = [f"| `{name}` | {reason} |" for name, reason in sorted(REFUSED.items())]
    assert listed == "\n".join(["| argument | reason |", "|---|---|", *rows, ""])
