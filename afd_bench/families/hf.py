"""What Transformers says about the tokens of an engine, and its next-token distributions."""

from pathlib import Path
from typing import Any

import torch

from afd.models import read_model
from afd_bench.agreement import Position

TIE = 1e-4
"""Two logits closer than this may change places between implementations in float32."""


def disagreements(path: Path, prompts: list[list[int]], answers: list[list[int]]) -> list[str]:
    """Returns where Transformers would have chosen another token than ``answers``, in words.

    It reads each prompt with its answer in one pass.

    Raises:
        AssertionError: the checkpoint has tensors that Transformers misses or does not know.
    """
    model, found = _load(path, torch.float32), []
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        best = logits.max(dim=-1)
        chosen = logits.gather(1, torch.tensor(answer).unsqueeze(1)).squeeze(1)
        for place in (best.values - chosen > TIE).nonzero().flatten().tolist():
            gap = float(best.values[place] - chosen[place])
            found.append(
                f"prompt {number}, token {place}: {answer[place]} instead of "
                f"{int(best.indices[place])}, whose logit is {gap:.4f} higher"
            )
    return found


def distributions(
    path: Path, texts: list[list[int]], dtype: torch.dtype, top: int
) -> list[list[Position]]:
    """Returns the ``top`` likeliest tokens behind every token of every text but the last.

    Raises:
        AssertionError: as :func:`disagreements`.
    """
    model = _load(path, dtype)
    scores: list[list[Position]] = []
    for text in texts:
        with torch.inference_mode():
            logits = model(torch.tensor([text])).logits[0, :-1].float()
        best = logits.log_softmax(dim=-1).topk(top, dim=-1)
        rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        scores.append([dict(zip(*row, strict=True)) for row in rows])
    return scores


def _load(path: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert AutoConfig.from_pretrained(path).model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    loaded: Any = AutoModelForCausalLM.from_pretrained(  # its type leaves out the second value
        path, dtype=dtype, output_loading_info=True, attn_implementation="eager"
    )
    model, loading = loaded
    family, described = read_model(path)
    draft = f"model.layers.{described.num_layers}."
    unknown = [
        name
        for name in loading["unexpected_keys"]
        if not name.startswith(draft) and family.attention_name(described.architecture, name)
    ]
    assert not loading["missing_keys"] and not unknown, loading
    return model
