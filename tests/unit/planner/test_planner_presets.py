"""The presets equal the planner's current output, and `afd serve --check-file` accepts them."""

import re
from itertools import pairwise

import pytest

from afd.config.deployment import load_config
from afd.config.resolve import check_model, wire_fp8
from afd_launch import cli
from afd_launch.memory_check import check_memory
from afd_planner.facts.model_hf import load_model
from afd_planner.report.presets import (
    CONTEXTS_K,
    FOLDER,
    PRESET_ACCELERATORS,
    PRESET_MODELS,
    preset_files,
    write_presets,
)

ON_DISK = sorted(FOLDER.glob("*/*.yaml"))


@pytest.fixture(scope="module")
def generated():
    return preset_files()


def test_the_presets_equal_the_planners_output(generated):
    """If this fails after a planner change, run `afd plan --presets` and review the difference."""
    found = {p.relative_to(FOLDER).as_posix(): p.read_text() for p in FOLDER.rglob("*.*")}
    assert sorted(found) == sorted(generated)
    stale = [name for name, text in generated.items() if found[name] != text]
    assert not stale, f"{len(stale)} presets are stale, such as {stale[0]}; run afd plan --presets"


@pytest.mark.parametrize("path", ON_DISK, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_afd_serve_accepts_it(path):
    deployment = load_config(path)
    check_model(deployment)
    assert deployment.model == path.parent and deployment.served_model_name == path.parent.name
    arch = {"mi300x": "gfx942", "mi355x": "gfx950"}.get(path.stem.partition("-")[0])
    device = "rocm" if arch else "cuda"
    assert deployment.attention.device == deployment.ffn.device == device
    assert deployment.ffn.arch == (arch or "auto")
    other = arch == "gfx942" and deployment.wire.format != "exact"
    assert wire_fp8(deployment) == ("e4m3fnuz" if other else "e4m3fn")
    assert check_memory(deployment).startswith("; memory per GPU: attention")


@pytest.mark.parametrize("path", ON_DISK, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_its_cache_holds_the_planned_sequences(path):
    deployment, tokens = load_config(path), int(path.stem.rpartition("-")[2][:-1]) * 1024
    each = load_model(path.parent.name).kv_stored_bytes(tokens, "fp8")
    attention = deployment.attention
    assert attention.kv_cache_gib * 2**30 >= attention.max_num_seqs * each


def test_presets_name_every_host_and_fill_it():
    several = 0
    for path in ON_DISK:
        deployment = load_config(path)
        several += len(deployment.hosts) > 1
        for place in deployment.places():
            (host,) = [host for host in deployment.hosts if host.name == place.name]
            taken = len(place.attention) + len(place.ffn) * deployment.ffn.tp
            assert taken == host.accelerators.count, f"{path}: {host.name}"
            assert host.accelerators.kind == path.stem.rpartition("-")[0]
    assert several == 68


def test_check_says_that_weights_are_missing(capsys):
    assert cli.main(["serve", "--check-file", str(FOLDER / "step-3" / "h800-4k.yaml")]) == 0
    told = capsys.readouterr().out
    assert "is good: model step-3" in told and "holds no weights" in told
    assert "--set model=" in told


def test_every_model_and_accelerator_has_short_and_long_contexts():
    names = {path.relative_to(FOLDER).as_posix() for path in ON_DISK}
    for model in PRESET_MODELS:
        for accelerator in PRESET_ACCELERATORS:
            assert f"{model}/{accelerator}-{CONTEXTS_K[0]}k.yaml" in names
            assert f"{model}/{accelerator}-32k.yaml" in names
    assert f"deepseek-v3/h200-{CONTEXTS_K[-1]}k.yaml" in names


def test_longer_contexts_take_a_larger_share_of_attention():
    """A step may fall slightly, because instances are whole servers, and further where the depth
    changes: fewer micro-batches have more rows each, which keep the same FFN pool busy."""
    for model in PRESET_MODELS:
        for accelerator in PRESET_ACCELERATORS:
            shares = []
            for thousands in CONTEXTS_K:
                path = FOLDER / model / f"{accelerator}-{thousands}k.yaml"
                if path.is_file():
                    x, y = map(int, re.search(r"plan: (\d+)A(\d+)F", path.read_text()).groups())
                    shares.append((x / (x + y), load_config(path).pipeline.depth))
            assert shares[-1][0] >= shares[0][0]
            same = [(a, b) for (a, depth), (b, other) in pairwise(shares) if depth == other]
            assert same and all(b > a - 0.1 for a, b in same), shares


def test_the_summary_holds_every_preset():
    rows = [line for line in (FOLDER / "README.md").read_text().splitlines() if "K |" in line]
    assert sum(line.count("A") for line in rows) == len(ON_DISK)


def test_writing_again_changes_nothing(tmp_path, generated, monkeypatch):
    monkeypatch.setattr("afd_planner.report.presets.preset_files", lambda: generated)
    for name, text in generated.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    (tmp_path / "step-3" / "old.yaml").write_text("model: .\n")
    assert write_presets(tmp_path) == (len(generated), 1)
    assert not (tmp_path / "step-3" / "old.yaml").exists()
