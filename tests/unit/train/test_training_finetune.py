"""The fine-tuning: its loss, where it rounds, and a complete run."""

import json
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")
torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")
pytest.importorskip("tokenizers")

from afd.records import read_records  # noqa: E402
from training import finetune, finetune_report  # noqa: E402
from training.export import export  # noqa: E402
from training.finetune import PairLoss, Taught, pair_loss_reference, rounded_half  # noqa: E402
from training.model import Model, ModelConfig  # noqa: E402
from training.routing import load_model  # noqa: E402

TINY = ModelConfig(
    vocab=64, hidden=128, layers=2, heads=2, kv_heads=1, head_dim=64, experts=4, top_k=2,
    intermediate=16, context=64,
)  # fmt: skip


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model(TINY)


@pytest.mark.parametrize("first, share", [(None, 1.0), (0, 1.0), (400, 0.3), (900, 1.0)])
def test_the_loss_equals_its_reference(first: int | None, share: float) -> None:
    """Also the gradients. 900 rows make chunks of 512 rows, of which the last is not full."""
    draw = torch.Generator().manual_seed(1)
    plain = torch.randn(900, 32, generator=draw, requires_grad=True)
    rounded = (plain.detach() + 0.1 * torch.randn(900, 32, generator=draw)).requires_grad_()
    head = torch.randn(50, 32, generator=draw, requires_grad=True)
    targets = torch.randint(50, (900,), generator=draw)
    taught = None
    if first is not None:
        hidden = torch.randn(900 - first, 32, generator=draw)
        taught = Taught(first, hidden, torch.randn(50, 32, generator=draw), share)
    total, entropy, kl = PairLoss.apply(plain, rounded, head, targets, taught, 3.0)
    expected = pair_loss_reference(plain, rounded, head, targets, taught, 3.0)
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(entropy + 3.0 * kl, total)
    inputs = (plain, rounded, head)
    slow = torch.autograd.grad(2.0 * expected, inputs)
    for ours, theirs in zip(torch.autograd.grad(2.0 * total, inputs), slow, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-7)


def test_only_the_second_half_is_rounded_and_only_inside_the_context(model: Model) -> None:
    ids = torch.randint(64, (2, 20), generator=torch.Generator().manual_seed(2))
    names = [name for name, _ in model.named_parameters()]
    with torch.no_grad():
        before = model.trunk(ids)[0]
        with rounded_half(model, 2.0):
            pair = model.trunk(ids.repeat(2, 1))[0]
        with rounded_half(model, 0.0):
            same = model.trunk(ids.repeat(2, 1))[0]
        after = model.trunk(ids)[0]
    torch.testing.assert_close(pair[:2], before)
    assert (pair[2:] - before).norm() > 1e-3 * before.norm()
    torch.testing.assert_close(same[2:], before)
    assert torch.equal(after, before)
    assert [name for name, _ in model.named_parameters()] == names


def test_gradients_pass_through_the_rounding(model: Model) -> None:
    with rounded_half(model, 1.0):
        hidden, _ = model.trunk(torch.randint(64, (2, 20)))
        hidden[1].square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.layers.parameters())


def test_it_continues_training_and_exports(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(model, tmp_path / "from")
    ids = np.random.default_rng(0).integers(0, 64, 400).astype(np.uint16)
    streams = [f"{s}.{p}" for s in finetune.Finetuner.streams for p in ("train", "heldout")]
    arrays = {f"{s}.starts": np.arange(0, 300, 10) for s in streams}
    np.savez(tmp_path / "tokens.npz", **arrays, **dict.fromkeys(streams, ids))
    line = [
        "finetune", str(tmp_path / "from"), str(tmp_path / "tokens.npz"), str(tmp_path / "to"),
        "--device", "cpu", "--steps", "2", "--row", "32", "--log-every", "2",
        "--state", str(tmp_path / "state.pt"),
    ]  # fmt: skip
    monkeypatch.setattr("sys.argv", line)
    finetune.main()
    trained = load_model(tmp_path / "to" / "checkpoint")
    assert not torch.equal(trained.lm_head.weight, load_model(tmp_path / "from").lm_head.weight)
    lines = [json.loads(x) for x in (tmp_path / "to" / "metrics.jsonl").read_text().splitlines()]
    assert {"loss", "kl", "balance"} <= {key for line in lines for key in line}
    assert lines[-1]["step"] == 2 and lines[-1]["kl.fresh"] >= 0.0
    assert (tmp_path / "state.pt").exists()

    monkeypatch.setattr(finetune_report, "RESULTS", tmp_path)
    (tmp_path / "finetuning.md").write_text("by hand\n" + finetune_report._MARKER + "\nold\n")
    runs = [str(tmp_path / "to")]
    monkeypatch.setattr("sys.argv", ["r", *runs, "--machine", "m", "--command", "c"])
    finetune_report.main()
    page = (tmp_path / "finetuning.md").read_text()
    assert page.startswith("by hand\n") and "old" not in page and "| to, last | 2 |" in page
    cases = {r.case for r in read_records(tmp_path / "finetuning.json")}
    assert cases == {
        "to, rows of the last steps",
        *(f"to, held-out {s}" for s in finetune.Finetuner.streams),
    }
