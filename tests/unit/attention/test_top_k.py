"""Top-k with a selection bias, against a plain loop over rows."""

import pytest

torch = pytest.importorskip("torch")

from attention_worker.top_k import biased_top_k  # noqa: E402


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
