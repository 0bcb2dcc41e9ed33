"""Writes the checkpoint of a model slice: tens of gigabytes at the speed of the disk.

Timings do not depend on the values of weights, only on their distribution. All tensors of a kind
are cut from one block of random numbers, at different offsets. Writing is therefore plain copying,
several files at a time, and no whole tensor is held in memory.
"""

import json
import math
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import ml_dtypes
import numpy as np

from afd.errors import ConfigError
from afd.models import family_of
from afd_bench.gpu.slices import Slice
from afd_demo import weights
from afd_demo.published.make import make_published

_BLOCK = 1 << 22  # numbers of each kind
_THREADS = 8
_DONE = "slice.json"
_HOLE = "hole"


@dataclass(frozen=True)
class Tensor:
    """A tensor to write. kind: a key of :func:`afd_demo.weights.deviations`, or a hole."""

    name: str
    kind: str
    shape: tuple[int, ...]

    @property
    def dtype(self) -> str:
        return "F32" if self.kind == "router_bias" else "BF16"

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * (4 if self.dtype == "F32" else 2)


@dataclass
class Listing:
    """A sink (afd_demo/weights.py) that lists the tensors without writing them."""

    tensors: list[Tensor] = field(default_factory=list)

    def projection(self, name: str, *shape: int) -> None:
        self.tensors.append(Tensor(name, "projection", shape))

    def router(self, name: str, *shape: int) -> None:
        self.tensors.append(Tensor(name, "router", shape))

    def embedding(self, name: str, *shape: int) -> None:
        self.tensors.append(Tensor(name, "embedding", shape))

    def norm(self, name: str, size: int) -> None:
        self.tensors.append(Tensor(name, "norm", (size,)))

    def bias(self, name: str, *shape: int) -> None:
        self.tensors.append(Tensor(name, "bias", shape))

    def router_bias(self, name: str, *shape: int) -> None:
        self.tensors.append(Tensor(name, "router_bias", shape))


def listing(model_slice: Slice) -> tuple[dict[str, object], list[Tensor]]:
    """Returns the config.json and the tensors of a slice in bfloat16."""
    sink = Listing()
    config = weights.MAKERS[model_slice.family](sink, model_slice.sizes, "bfloat16")
    return config, sink.tensors


def make(name: str, model_slice: Slice, folder: Path, *, experts: bool = True) -> Path:
    """Returns ``folder/name-LAYERS``; writes the checkpoint unless it is complete.

    Args:
        experts: False leaves holes in place of the experts, which take no disk space and no time,
            for servers that do not read them (ffn.load: dummy). The folder's name then ends in
            ``-dummy``.

    Raises:
        ConfigError: the disk is too small.
    """
    path = folder / f"{name}-{model_slice.sizes.layers}{'' if experts else '-dummy'}"
    if model_slice.layout:
        return _published(path, model_slice)
    config, tensors = listing(model_slice)
    if not experts:
        is_expert = family_of(config).is_expert_weight
        tensors = [replace(t, kind=_HOLE) if is_expert(t.name) else t for t in tensors]
    description = json.dumps(config, sort_keys=True)
    done = path / _DONE
    if done.exists() and done.read_text(encoding="utf-8") == description:
        return path
    path.mkdir(parents=True, exist_ok=True)
    total = sum(tensor.nbytes for tensor in tensors if tensor.kind != _HOLE)
    free = os.statvfs(path).f_bavail * os.statvfs(path).f_frsize
    if total > free:
        raise ConfigError(
            f"{path} needs {total / 1e9:.1f} GB, the disk has {free / 1e9:.1f} GB free; lower"
            " --layers or use another folder with --models"
        )
    blocks = _blocks(model_slice.sizes.hidden)
    with ThreadPoolExecutor(_THREADS) as pool:
        jobs = [
            pool.submit(_write_file, path / f"{stem}.safetensors", part, blocks)
            for stem, part in _by_file(tensors).items()
        ]
        for job in jobs:
            job.result()
    (path / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    write_tokenizer(path, model_slice.sizes.vocab)
    done.write_text(description, encoding="utf-8")
    return path


def _published(path: Path, model_slice: Slice) -> Path:
    """Writes a checkpoint as published; it is small, and its experts are always there."""
    done = path / _DONE
    description = json.dumps(asdict(model_slice), sort_keys=True)
    if not done.exists() or done.read_text(encoding="utf-8") != description:
        make_published(model_slice.layout, path, model_slice.sizes, stored_as=model_slice.stored_as)
        done.write_text(description, encoding="utf-8")
    return path


def _by_file(tensors: list[Tensor]) -> dict[str, list[Tensor]]:
    """Groups the tensors into a file per layer and one for all others."""
    files: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        parts = tensor.name.split(".")
        stem = f"layer-{int(parts[2]):03d}" if parts[1] == "layers" else "outside"
        files.setdefault(stem, []).append(tensor)
    return files


def _blocks(hidden: int) -> dict[str, bytes]:
    """Returns the block of random numbers of each kind, encoded and repeated twice."""
    draw = np.random.default_rng(0).standard_normal(_BLOCK, dtype=np.float32)
    found = {}
    for kind, std in weights.deviations(hidden).items():
        values = draw * np.float32(std) + np.float32(kind == "norm")
        dtype = np.float32 if kind == "router_bias" else ml_dtypes.bfloat16
        found[kind] = values.astype(dtype).tobytes() * 2
    return found


def _write_file(path: Path, tensors: list[Tensor], blocks: dict[str, bytes]) -> None:
    """Writes a file in the safetensors format."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.nbytes
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb", buffering=0) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            if tensor.kind == _HOLE:
                file.seek(tensor.nbytes, os.SEEK_CUR)
                continue
            block = memoryview(blocks[tensor.kind])
            period = len(block) // 2
            start = zlib.crc32(tensor.name.encode()) % (period // 8) * 8
            left = tensor.nbytes
            while left:
                left -= file.write(block[start : start + min(left, period)])
        file.truncate()  # extends the file if it ends with a hole


def write_tokenizer(path: Path, vocab: int) -> None:
    """Writes a tokenizer of exactly ``vocab`` words, t0 to t<vocab - 1>, one per token id."""
    words = {f"t{i}": i for i in range(vocab)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "t0"},
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "t0",
        "eos_token": "t2",
        "pad_token": "t0",
    }
    (path / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
