"""Writes the checkpoint of a slice: tens of gigabytes at the speed of the disk.

What a weight is does not matter to a timing, as long as it looks like a weight: all tensors of a
kind are cut from one block of random numbers, each beginning at a place of its own. So nothing but
copying is done, several files at a time, and no tensor is ever held in memory.
"""

import json
import math
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import ml_dtypes
import numpy as np

from afd.bench.gpu.slices import Slice
from afd.demo import weights
from afd.errors import ConfigError
from afd.models import family_of

_BLOCK = 1 << 22  # numbers of each kind
_THREADS = 8
_DONE = "slice.json"
_HOLE = "hole"


@dataclass(frozen=True)
class Tensor:
    """kind: of :func:`afd.demo.weights.deviations`, or a hole."""

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
    """A sink (afd/demo/weights.py) that only notes what there is to write."""

    tensors: list[Tensor] = field(default_factory=list)

    def projection(self, name: str, *shape: int) -> None:
        self.tensors.append(Tensor(name, "projection", shape))

    def router(self, name: str, *shape: int) -> None:
        self.tensors.append(Tensor(name, "router", shape))

    def embedding(self, name: str, *shape: int) -> None:
        self.tensors.append(Tensor(name, "embedding", shape))

    def norm(self, name: str, size: int) -> None:
        self.tensors.append(Tensor(name, "norm", (size,)))

    def router_bias(self, name: str, size: int) -> None:
        self.tensors.append(Tensor(name, "router_bias", (size,)))


def listing(piece: Slice) -> tuple[dict[str, object], list[Tensor]]:
    """config.json and tensors of a slice, bfloat16."""
    sink = Listing()
    config = weights.MAKERS[piece.family](sink, piece.sizes, "bfloat16")
    return config, sink.tensors


def make(name: str, piece: Slice, folder: Path, *, experts: bool = True) -> Path:
    """``folder/name-LAYERS``, written if it is not there whole.

    Args:
        experts: False leaves holes in the files in their place, which take no room and no time, for
            servers that do not read them (ffn.load: dummy); the folder ends in ``-dummy``.

    Raises:
        ConfigError: the disk has no room for it; the message says how much is missing.
    """
    path = folder / f"{name}-{piece.sizes.layers}{'' if experts else '-dummy'}"
    config, tensors = listing(piece)
    if not experts:
        is_expert = family_of(config).is_expert_weight
        tensors = [replace(t, kind=_HOLE) if is_expert(t.name) else t for t in tensors]
    told = json.dumps(config, sort_keys=True)
    done = path / _DONE
    if done.exists() and done.read_text(encoding="utf-8") == told:
        return path
    path.mkdir(parents=True, exist_ok=True)
    total = sum(tensor.nbytes for tensor in tensors if tensor.kind != _HOLE)
    free = os.statvfs(path).f_bavail * os.statvfs(path).f_frsize
    if total > free:
        raise ConfigError(
            f"{path} needs {total / 1e9:.1f} GB and the disk has {free / 1e9:.1f}; lower --layers, "
            "or name another folder by --models"
        )
    blocks = _blocks(piece.sizes.hidden)
    with ThreadPoolExecutor(_THREADS) as pool:
        jobs = [
            pool.submit(_write_file, path / f"{stem}.safetensors", part, blocks)
            for stem, part in _by_file(tensors).items()
        ]
        for job in jobs:
            job.result()
    (path / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    write_tokenizer(path, piece.sizes.vocab)
    done.write_text(told, encoding="utf-8")
    return path


def _by_file(tensors: list[Tensor]) -> dict[str, list[Tensor]]:
    """A file per layer, and one for what is outside of the layers."""
    files: dict[str, list[Tensor]] = {}
    for tensor in tensors:
        parts = tensor.name.split(".")
        stem = f"layer-{int(parts[2]):03d}" if parts[1] == "layers" else "outside"
        files.setdefault(stem, []).append(tensor)
    return files


def _blocks(hidden: int) -> dict[str, bytes]:
    """The random numbers of each kind, as they are stored, twice in a row."""
    draw = np.random.default_rng(0).standard_normal(_BLOCK, dtype=np.float32)
    found = {}
    for kind, std in weights.deviations(hidden).items():
        values = draw * np.float32(std) + np.float32(kind == "norm")
        dtype = np.float32 if kind == "router_bias" else ml_dtypes.bfloat16
        found[kind] = values.astype(dtype).tobytes() * 2
    return found


def _write_file(path: Path, tensors: list[Tensor], blocks: dict[str, bytes]) -> None:
    """In the format of afd/checkpoint.py."""
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
        file.truncate()  # a hole at the end


def write_tokenizer(path: Path, vocab: int) -> None:
    """A tokenizer of exactly ``vocab`` words, t0 to t<vocab - 1>: every id can be shown."""
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
