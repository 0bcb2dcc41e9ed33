"""What Transformers says about the tokens of an engine."""

from pathlib import Path
from typing import Any

import torch

from afd.models import read_model

TIE = 1e-4
"""Two logits closer than this may change places between implementations in float32."""


def disagreements(path: Path, prompts: list[list[int]], answers: list[list[int]]) -> list[str]:
    """Returns where Transformers would have chosen another token than ``answers``, in words.

    It reads each prompt with its answer in one pass.

    Raises:
        AssertionError: the checkpoint has tensors that Transformers misses or does not know.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert AutoConfig.from_pretrained(path).model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    loaded: Any = AutoModelForCausalLM.from_pretrained(  # its type leaves out the second value
        path, dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
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
    found = []
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
