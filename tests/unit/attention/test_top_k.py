"""Top-k with a selection bias, against a plain loop over rows; without one, against vLLM's."""

import importlib

import pytest

torch = pytest.importorskip("torch")

from attention_worker.top_k import biased_top_k, softmax_top_k  # noqa: E402


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_weights_and_experts_of_each_row(scoring, renormalise, biased):
    torch.manual_seed(0)
    logits, bias = torch.randn(9, 6), torch.randn(6) if biased else None
    weights, ids = biased_top_k(
        logits, bias, 3, scoring=scoring, renormalise=renormalise, scaling=1.5
    )
    assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
    for row in range(9):
        scores = logits[row].sigmoid() if scoring == "sigmoid" else logits[row].softmax(-1)
        choice = (scores if bias is None else scores + bias).tolist()
        best = sorted(range(6), key=lambda expert: -choice[expert])[:3]
        wanted = torch.stack([scores[expert] for expert in best])
        if renormalise:
            wanted = wanted / wanted.sum()
        assert ids[row].tolist() == best
        torch.testing.assert_close(weights[row], wanted * 1.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "experts", "top_k"), [(1, 8, 2), (17, 16, 4), (33, 128, 8)])
def test_without_a_bias_bits_are_those_of_vllm(rows, experts, top_k, dtype):
    pytest.importorskip("vllm")
    from attention_worker.vllm_hooks.versions import layout

    select = importlib.import_module(layout().cpu_top_k_module).select_experts
    torch.manual_seed(rows)
    logits = torch.randn(rows, experts).to(dtype)
    wanted = select(
        hidden_states=logits,
        router_logits=logits,
        top_k=top_k,
        use_grouped_topk=False,
        renormalize=True,
    )
    for ours, theirs in zip(softmax_top_k(logits, top_k), wanted, strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
