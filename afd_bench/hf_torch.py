"""Generates greedy tokens of a checkpoint with code that shares no model code with vLLM.

Optionally inserts the fp8 wire format's rounding where the rows of a MoE layer are sent to the FFN
and returned. The result is what a deployment with that wire format must generate.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig

from afd.wire.codecs_torch import dequantise_fp8, quantise_fp8
from afd_bench.hf_step3_torch import Step3
from afd_bench.workload import Request

Tokens = list[tuple[int, ...]]


def version() -> str:
    return f"transformers {transformers.__version__}"


def to_ffn(rows: torch.Tensor) -> torch.Tensor:
    """Returns rows [..., hidden] as an FFN instance decodes them: e4m3fn, scales of 128 columns."""
    codes, scales = quantise_fp8(rows.reshape(-1, rows.shape[-1]))
    return dequantise_fp8(codes, scales, rows.dtype).view(rows.shape)


def from_ffn(rows: torch.Tensor) -> torch.Tensor:
    """Returns rows as one FFN instance returns them: rounded to bfloat16."""
    return rows.bfloat16().to(rows.dtype)


def transformers_greedy(path: Path, requests: Sequence[Request], *, fp8: bool) -> Tokens:
    """Runs transformers' ``generate()`` in float32, one request at a time; ignores EOS.

    fp8: inserts the rounding of the fp8 wire format.
    """
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    # generate() would stop at the end token that the checkpoint's generation config names.
    model.generation_config = GenerationConfig(bos_token_id=0, pad_token_id=0)
    if fp8:
        put_on_wire(model)
    answers = []
    for request in requests:
        prompt = torch.tensor([request.prompt])
        with torch.inference_mode():
            out = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=request.new_tokens,
                do_sample=False,
            )
        answers.append(tuple(out[0, len(request.prompt) :].tolist()))
    return answers


def put_on_wire(model: nn.Module) -> int:
    """Inserts the wire's rounding into every MoE block of a Qwen3-MoE or DeepSeek model.

    Returns the number of MoE blocks.
    """

    def inbound(_: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (to_ffn(args[0]), *args[1:])

    def outbound(_: nn.Module, __: tuple[torch.Tensor, ...], out: torch.Tensor) -> torch.Tensor:
        return from_ffn(out)

    blocks = 0
    for block in model.modules():
        children = dict(block.named_children())
        if "experts" not in children or "gate" not in children:
            continue
        for name in ("experts", "shared_experts"):
            if name in children:
                children[name].register_forward_pre_hook(inbound)
        block.register_forward_hook(outbound)
        blocks += 1
    return blocks


def step3_greedy(path: Path, requests: Sequence[Request], *, fp8: bool) -> Tokens:
    """Runs the reference of :mod:`afd_bench.hf_step3_torch`; as :func:`transformers_greedy`."""
    torch.set_num_threads(1)
    model = Step3(path, to_ffn=to_ffn, from_ffn=from_ffn) if fp8 else Step3(path)
    return [model.greedy(request.prompt, request.new_tokens) for request in requests]
