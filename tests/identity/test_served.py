"""Every family and format through real servers: control plane, transport, FFN process, gateway.

Only one runs by default; the others: ``./run test -m long tests/identity``.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from drawn import beside_vllm, described

from afd.models import read_model
from afd_bench.families.cases import ALL, Model
from afd_bench.families.engines import TOKENS, Case, Result, prompts, settings
from afd_bench.families.hf import disagreements
from afd_bench.servers import Server, disaggregated
from afd_bench.workload import Request, run

pytest.importorskip("vllm", reason="the package vllm is not installed; ./run test installs it")
openai = pytest.importorskip("openai", reason="comes with vLLM; ./run test installs it")
pytestmark = pytest.mark.serve

_BY_DEFAULT = "deepseek_v3-fp8_block"
MODELS = [
    pytest.param(m, id=m.name, marks=[] if m.name == _BY_DEFAULT else pytest.mark.long)
    for m in ALL
    if not m.split
]


WITH_IMAGES = ("llama4", "step3_vl")
"""Layouts with an image encoder, which is not loaded."""
PIXEL = "data:image/gif;base64,R0lGODlhAQABAAAAACH5BAEKAAEALAAAAAABAAEAAAICTAEAOw=="


def refuses_images(server: Server) -> None:
    """A request with an image gets an error in OpenAI's form; the next request is answered."""
    content = [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": PIXEL}},
    ]
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

    def ask(content: Any) -> Any:
        messages = [{"role": "user", "content": content}]
        return client.chat.completions.create(model=server.model, messages=messages, max_tokens=2)

    with pytest.raises(openai.BadRequestError) as refused:
        ask(content)
    body = refused.value.body
    assert isinstance(body, dict) and set(body) >= {"message", "type", "param", "code"}
    assert "image" in body["message"] or "multimodal" in body["message"]
    assert ask("What is this?").choices[0].message.content is not None


@pytest.mark.parametrize("model", MODELS)
def test_served_tokens(
    model: Model, checkpoints: Path, colocated: Callable[[Model], Result], tmp_path: Path
) -> None:
    """1A1F answers concurrent requests with the tokens of vLLM alone, or of Transformers."""
    path, log = checkpoints / model.name, tmp_path / "serve.log"
    config = settings(Case(model.name, str(path), model.dtype, instances=1))
    requests = [Request(tuple(tokens), TOKENS, 0.0) for tokens in prompts()]
    with disaggregated(config, log=log) as server:
        found = [
            list(answer.tokens) for answer in run(server.url, server.model, requests, salt="s")
        ]
        if model.layout in WITH_IMAGES:
            refuses_images(server)
    if beside_vllm(model):
        assert found == colocated(model).tokens, described(model)
    if model.transformers:
        assert disagreements(checkpoints / "twin" / model.name, prompts(), found) == []
    text = log.read_text(errors="replace")
    family, _ = read_model(path)
    assert ("runs split, at depth 1" in text) is bool(family.split)
    print(f"{model.name}: {'split' if family.split else 'pipelined'}")
    print("\n".join(line for line in text.splitlines() if "experts: " in line or "decoded" in line))
