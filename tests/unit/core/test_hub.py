"""Models by their name on the Hub: from the cache, without network."""

import pytest

from afd.config.deployment import load_config
from afd.config.resolve import check_model
from afd.errors import ConfigError
from afd.models.hub import is_hub_name

constants = pytest.importorskip("huggingface_hub.constants")

NAME = "deepseek-ai/DeepSeek-V3"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    root = tmp_path / "hub"
    repository = root / "models--deepseek-ai--DeepSeek-V3"
    for revision, name in (("a" * 40, "main"), ("b" * 40, "v2")):
        (repository / "refs").mkdir(parents=True, exist_ok=True)
        (repository / "refs" / name).write_text(revision)
        snapshot = repository / "snapshots" / revision
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text("{}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(root))
    return repository / "snapshots"


def write(folder, text):
    file = folder / "d.yaml"
    file.write_text(text)
    return load_config(file)


def test_a_name_is_a_folder_of_the_cache(cache, tmp_path):
    found = write(tmp_path, f"model: {NAME}")
    assert found.model == cache / ("a" * 40) and found.served_model_name == NAME
    other = write(tmp_path, f"model: {NAME}@v2\nserved_model_name: other")
    assert other.model == cache / ("b" * 40) and other.served_model_name == "other"


def test_a_folder_comes_first(cache, tmp_path):
    (tmp_path / NAME).mkdir(parents=True)
    found = write(tmp_path, f"model: {NAME}")
    assert found.model == tmp_path / NAME and found.served_model_name == "DeepSeek-V3"


@pytest.mark.parametrize("offline", [True, False])
def test_what_is_not_in_the_cache(cache, tmp_path, monkeypatch, offline):
    """Nothing is downloaded, offline or not: the message says how to."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    for name in ("a/b", f"{NAME}@v9"):
        deployment = write(tmp_path, f"model: {name}")
        assert deployment.model == tmp_path / name
        with pytest.raises(ConfigError, match=r"is not a folder; .* after hf download NAME"):
            check_model(deployment)


def test_paths_are_not_names():
    assert is_hub_name(NAME) and is_hub_name("Qwen/Qwen3-30B-A3B@refs/pr/1")
    for path in ("/data/model", "./a/b", "../a/b", "a/b/c", "model", "~/a"):
        assert not is_hub_name(path)
