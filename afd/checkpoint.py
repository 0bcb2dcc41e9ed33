"""Reads the headers of safetensors checkpoints: names, shapes and a fingerprint, without torch.

Format: 8 bytes little-endian header length N, N bytes of JSON, then the tensors' bytes
(github.com/huggingface/safetensors, "Format").
"""

import hashlib
import json
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

from afd.errors import ConfigError
from afd.models import Family, read_config

INDEX_FILE = "model.safetensors.index.json"
FINGERPRINT_TENSORS = 256
FINGERPRINT_BYTES = 64
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: `dtype` as in the header ("BF16", "F32"), `offset` from file start."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    offset: int


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Tensors of one safetensors file.

    Raises:
        ConfigError: the file is missing, cut short, or not safetensors; the message names it.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise ConfigError(_damaged(file, "its header is cut short"))
            entries = json.loads(stream.read(length))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    except ValueError:
        raise ConfigError(_damaged(file, "its header is not JSON")) from None
    try:
        entries.pop("__metadata__", None)
        table = {name: _info(file, 8 + length, entry) for name, entry in entries.items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ConfigError(_damaged(file, "its header has an entry of the wrong form")) from None
    end = max((info.offset + info.nbytes for info in table.values()), default=0)
    if end > size:
        raise ConfigError(_damaged(file, f"it has {size} bytes and its tensors need {end}"))
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
    """Safetensors files of a model directory: those of the index, else all of them, sorted.

    Raises:
        ConfigError: there are none, or the index is unreadable or names a file that is missing.
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
        raise ConfigError(f"{directory} has no *.safetensors files; other formats are not read")
    return files


def tensor_table(path: str | PathLike[str]) -> dict[str, TensorInfo]:
    """All tensors of a checkpoint directory by name. Raises ConfigError as `read_header` does."""
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


def only_experts_are_fp8(path: str | PathLike[str], family: Family) -> bool:
    """Whether some tensors are FP8, and all of them are experts'. Raises as `tensor_table` does."""
    fp8 = [name for name, info in tensor_table(path).items() if info.dtype.startswith("F8")]
    return bool(fp8) and all(family.is_expert_weight(name) for name in fp8)


def fingerprint(path: str | PathLike[str]) -> str:
    """SHA-256 (hex) that tells two checkpoints apart without reading their weights.

    Covers config.json as canonical JSON, (name, dtype, shape) of every tensor, and the first 64
    bytes of at most 256 tensors evenly chosen by name, which catches a fine-tune of equal shapes.
    How the tensors are spread over files does not matter.

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
