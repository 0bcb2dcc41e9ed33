"""Safetensors headers: tables, fingerprints, and damaged files."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

from afd.errors import ConfigError
from afd.models.checkpoint import INDEX_FILE, fingerprint, read_header, tensor_table, weight_files


def tensors(seed=0, count=5):
    random = np.random.default_rng(seed)
    return {f"t{i}": random.standard_normal((4, i + 3)).astype(np.float32) for i in range(count)}


@pytest.fixture
def checkpoint(tmp_path):
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text('{"architectures": ["A"], "hidden_size": 4}')
    save_file(tensors(), directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_table_matches_the_tensors(checkpoint):
    table = tensor_table(checkpoint)
    assert set(table) == set(tensors())
    for name, array in tensors().items():
        info = table[name]
        assert (info.dtype, info.shape, info.nbytes) == ("F32", array.shape, array.nbytes)
        raw = info.file.read_bytes()[info.offset : info.offset + info.nbytes]
        assert raw == array.tobytes()


def shard(checkpoint, with_index=True):
    (checkpoint / "model.safetensors").unlink()
    items = list(tensors().items())
    names = {"model-1-of-2.safetensors": items[:2], "model-2-of-2.safetensors": items[2:]}
    for file, part in names.items():
        save_file(dict(part), checkpoint / file)
    if with_index:
        weight_map = {name: file for file, part in names.items() for name, _ in part}
        (checkpoint / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("with_index", [True, False])
def test_sharding_changes_neither_names_nor_fingerprint(checkpoint, with_index):
    whole, names = fingerprint(checkpoint), set(tensor_table(checkpoint))
    shard(checkpoint, with_index)
    assert len(weight_files(checkpoint)) == 2
    assert set(tensor_table(checkpoint)) == names
    assert fingerprint(checkpoint) == whole


def test_files_outside_of_the_index_are_ignored(checkpoint):
    shard(checkpoint)
    save_file(tensors(), checkpoint / "consolidated.safetensors")
    assert len(weight_files(checkpoint)) == 2


def test_fingerprint_sees_a_fine_tune_and_a_config_change(checkpoint, tmp_path):
    original = fingerprint(checkpoint)
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    assert fingerprint(copy) == original
    # Formatting of config.json does not matter, its content does.
    (copy / "config.json").write_text('{"hidden_size":4,\n"architectures":["A"]}')
    assert fingerprint(copy) == original
    (copy / "config.json").write_text('{"hidden_size":8,"architectures":["A"]}')
    assert fingerprint(copy) != original
    shutil.copy(checkpoint / "config.json", copy / "config.json")
    save_file(tensors(seed=1), copy / "model.safetensors", metadata={"format": "pt"})
    assert fingerprint(copy) != original


def test_fingerprint_of_many_tensors_reads_few_of_them(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    many = {f"t{i:04}": np.full((20,), i, np.float32) for i in range(700)}
    save_file(many, tmp_path / "model.safetensors")
    assert len(fingerprint(tmp_path)) == 64


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "truncated"),
        (b"\x10\x00", "truncated"),
        (b"version https://git-lfs.github.com/spec/v1\n", "truncated"),
        ((4).to_bytes(8, "little") + b"[1,2", "not JSON"),
        ((2).to_bytes(8, "little") + b"[]", "malformed entry"),
        ((6).to_bytes(8, "little") + b'{"a":1', "not JSON"),
        ((8).to_bytes(8, "little") + b'{"a": 1}', "malformed entry"),
    ],
)
def test_damaged_headers_name_the_file(tmp_path, content, why):
    file = tmp_path / "bad.safetensors"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"bad\.safetensors .*{why}.*download it again"):
        read_header(file)


def test_truncated_data_is_noticed(checkpoint):
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ConfigError, match=r"model\.safetensors .*its tensors need"):
        tensor_table(checkpoint)


def test_missing_weights(checkpoint):
    shard(checkpoint)
    (checkpoint / "model-2-of-2.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"lacks 1 of the 2 .*model-2-of-2\.safetensors"):
        tensor_table(checkpoint)
    (checkpoint / INDEX_FILE).write_text("{}")
    with pytest.raises(ConfigError, match="weight_map"):
        tensor_table(checkpoint)
    (checkpoint / INDEX_FILE).unlink()
    (checkpoint / "model-1-of-2.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        fingerprint(checkpoint)


def test_duplicate_tensor_is_refused(checkpoint):
    save_file({"t0": np.zeros(3, np.float32)}, checkpoint / "extra.safetensors")
    with pytest.raises(ConfigError, match=r"t0 is in both extra\.safetensors and model"):
        tensor_table(checkpoint)
