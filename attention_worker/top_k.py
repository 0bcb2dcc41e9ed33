"""Top-k of the router on the host."""

import torch


def softmax_top_k(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns weights float32 and expert ids int32, both [rows, top_k]; a row's weights add up
    to 1. In no order.

    As vLLM's router for CPUs, bit for bit, which makes an object per call.

    Args:
        logits: [rows, experts].
    """
    chosen, ids = logits.topk(top_k, dim=-1, sorted=False)
    return chosen.softmax(dim=-1).float(), ids.int()


def biased_top_k(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    *,
    scoring: str,
    renormalise: bool,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns weights float32 and expert ids int32, both [rows, top_k]. vLLM 0.26 has this for GPUs
    only.

    The bias decides which experts are chosen; their weights come from the scores without it
    (vllm/model_executor/layers/fused_moe/router/fused_topk_bias_router.py).

    Args:
        logits: [rows, experts]. bias: float32 [experts], or any shape of that size; None: 0.
        scoring: "softmax" or "sigmoid". renormalise: the weights of a row add up to 1.
        scaling: factor on the weights.
    """
    scores = logits.float().sigmoid() if scoring == "sigmoid" else logits.float().softmax(dim=-1)
    choice = scores if bias is None else scores + bias.float().view(1, -1)
    ids = choice.topk(top_k, dim=-1).indices
    weights = scores.gather(1, ids)
    if renormalise:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights * scaling, ids.int()
