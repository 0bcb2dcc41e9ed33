"""Reads the headers of safetensors checkpoints: tensor names, shapes and a fingerprint. No torch.

Format: header length N in 8 bytes, little-endian; N bytes of JSON; the tensors' bytes
(github.com/huggingface/safetensors, "Format").
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from afd.errors import ConfigError
from afd.models import read_config
from afd.models.weight_format import Part, WeightFormat, tensor_name

INDEX_FILE = "model.safetensors.index.json"
FINGERPRINT_TENSORS = 256
FINGERPRINT_BYTES = 64
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class TensorInfo:
    """One tensor in a file. `dtype`: as in the header ("BF16"). `offset`: bytes from file start."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    offset: int


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Returns the tensors of one safetensors file by name.

    Raises:
        ConfigError: the file is missing, truncated, or not a safetensors file.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise ConfigError(_damaged(file, "its header is truncated"))
            entries = json.loads(stream.read(length))
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read ({error.strerror}); check the path and its permissions"
        ) from None
    except ValueError:
        raise ConfigError(_damaged(file, "its header is not JSON")) from None
    try:
        entries.pop("__metadata__", None)
        table = {name: _info(file, 8 + length, entry) for name, entry in entries.items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ConfigError(_damaged(file, "its header has a malformed entry")) from None
    end = max((info.offset + info.nbytes for info in table.values()), default=0)
    if end > size:
        raise ConfigError(_damaged(file, f"it has {size} bytes but its tensors need {end}"))
    return table


def _info(file: Path, data_start: int, entry: dict[str, list[int]]) -> TensorInfo:
    begin, end = entry["data_offsets"]
    shape = tuple(int(n) for n in entry["shape"])
    if not 0 <= begin <= end:
        raise ValueError(f"data_offsets {begin}, {end}")
    return TensorInfo(file, str(entry["dtype"]), shape, end - begin, data_start + begin)


def _damaged(file: Path, why: str) -> str:
    return f"{file} is not a complete safetensors file ({why}); download it again"


def weight_files(path: str | PathLike[str]) -> tuple[Path, ...]:
    """Returns the safetensors files of a checkpoint folder: those in its index, else all; sorted.

    Raises:
        ConfigError: there are none, the index is unreadable, or a file in the index is missing.
    """
    directory = Path(path)
    index = directory / INDEX_FILE
    if index.is_file():
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = tuple(directory / name for name in sorted(set(weight_map.values())))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(f"{index} has no readable weight_map; download it again") from None
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ConfigError(
                f"{directory} lacks {len(missing)} of the {len(files)} weight files in its index "
                f"(first: {missing[0]}); finish the download"
            )
    else:
        files = tuple(sorted(directory.glob("*.safetensors")))
    if not files:
        raise ConfigError(
            f"{directory} has no *.safetensors files; use a checkpoint in that format"
        )
    return files


def tensor_table(path: str | PathLike[str]) -> dict[str, TensorInfo]:
    """Returns all tensors of a checkpoint folder by name. Raises ConfigError as `read_header`."""
    table: dict[str, TensorInfo] = {}
    for file in weight_files(path):
        for name, info in read_header(file).items():
            if name in table:
                raise ConfigError(
                    f"tensor {name} is in both {table[name].file.name} and {file.name} of {path}; "
                    f"remove one of them or add {INDEX_FILE}"
                )
            table[name] = info
    return table


def check_parts(
    table: Mapping[str, TensorInfo],
    path: object,
    weight: str,
    stored: WeightFormat,
    parts: Mapping[str, Part],
    stacked: tuple[int, ...] = (),
) -> None:
    """Checks the headers of all tensors of one weight.

    Args:
        weight: its name in an unquantised checkpoint. parts: as ``stored.parts`` returns them.
        stacked: leading dimensions of the tensors.

    Raises:
        ConfigError: a tensor is missing or has another shape or dtype. The message names it and
            its file.
    """
    for suffix, part in parts.items():
        name = tensor_name(weight, suffix)
        info = table.get(name)
        if info is None:
            raise ConfigError(f"{path} has no tensor {name}; finish or repeat the download")
        if info.dtype not in part.dtypes:
            raise ConfigError(
                f"tensor {name} in {info.file} is stored as {info.dtype}, but a weight in {stored} "
                f"needs {' or '.join(part.dtypes)}; use the config.json that belongs to these "
                "weights"
            )
        allowed = [(*stacked, *shape) for shape in part.shapes]
        if info.shape not in allowed:
            raise ConfigError(
                f"tensor {name} in {info.file} has shape {list(info.shape)}, config.json asks for "
                f"{list(allowed[0])}; use the config.json that belongs to these weights"
            )


def fingerprint(path: str | PathLike[str]) -> str:
    """Returns a SHA-256 (hex) that distinguishes checkpoints without reading all weights.

    Covers config.json as canonical JSON, (name, dtype, shape) of every tensor, and the first 64
    bytes of at most 256 tensors, evenly spaced by name. The latter detects a fine-tune of equal
    shapes. The distribution of tensors over files does not matter.

    Raises:
        ConfigError: as `read_config` and `tensor_table` do.
    """
    config = read_config(path)
    table = sorted(tensor_table(path).items())
    digest = hashlib.sha256(_canonical(config))
    digest.update(_canonical([[name, info.dtype, list(info.shape)] for name, info in table]))
    count = min(len(table), FINGERPRINT_TENSORS)
    for i in range(count):
        _, info = table[i * len(table) // count]
        with info.file.open("rb") as stream:
            stream.seek(info.offset)
            digest.update(stream.read(min(info.nbytes, FINGERPRINT_BYTES)))
    return digest.hexdigest()


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
