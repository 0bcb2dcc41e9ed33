"""Finds attention tensors whose shapes do not fit the others. Reads headers only. Pure.

vLLM knows every shape of its model classes, and would stop while it loads. This finds what can be
found without building the model.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping

from afd.models.checkpoint import TensorInfo

_LAYER = re.compile(r"\.layers\.(\d+)\.")
_NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")
_FEWEST = 3
"""Layers needed to say which one is the odd one."""


def odd_tensor(
    table: Mapping[str, TensorInfo], is_expert: Callable[[str], bool], hidden: int
) -> str | None:
    """Returns which tensor has a wrong shape, with its file; None if no such tensor is found.

    A norm of a layer's rows has ``hidden`` values. Tensors of one name have one shape in most
    layers; fewer than half of the layers may not have another one.

    Args:
        is_expert: whether a tensor belongs to the experts, which have a check of their own.
    """
    alike: dict[str, list[str]] = defaultdict(list)
    for name, info in table.items():
        if is_expert(name) or not _LAYER.search(name):
            continue
        if name.endswith(_NORMS) and info.shape != (hidden,):
            return _words(name, info, f"config.json asks for [{hidden}]")
        alike[_LAYER.sub(".layers.*.", name)].append(name)
    for names in alike.values():
        counted = Counter(table[name].shape for name in names)
        (usual, count), *others = counted.most_common()
        if others and len(names) >= _FEWEST and 2 * count > len(names):
            odd = next(name for name in names if table[name].shape != usual)
            return _words(odd, table[odd], f"it has {list(usual)} in {count} other layers")
    return None


def _words(name: str, info: TensorInfo, expected: str) -> str:
    return (
        f"tensor {name} in {info.file} has shape {list(info.shape)}, but {expected}; "
        "download the file again"
    )
