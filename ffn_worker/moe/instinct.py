"""The order of MoE backends on AMD Instinct, by architecture: ffn_worker/data/backends/ARCH.json.

One backend is chosen for the life of an FFN instance, and not one per batch as on Hopper: AITER's
weights are shuffled, so two backends would hold all experts twice. Pure; no torch.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from afd.errors import ConfigError
from afd.host.package_data import data_folder

FOLDER = data_folder("ffn_worker") / "backends"


@dataclass(frozen=True)
class Order:
    """What "auto" tries on one architecture.

    measured: whether ``triton_below_pairs`` comes from measurements. order: backends by weight
    scheme, first choice first. triton_below_pairs: by scheme, the mean pairs (row, expert) per
    expert of the largest decode step below which ``triton`` is tried first; None: never.
    """

    arch: str
    measured: bool
    source: str
    order: Mapping[str, tuple[str, ...]]
    triton_below_pairs: Mapping[str, float | None]

    def of(self, scheme: str, pairs: float | None = None) -> tuple[str, ...]:
        """The backends to try for weights in ``scheme``. pairs: as above; None: unknown."""
        names = self.order[scheme]
        below = self.triton_below_pairs[scheme]
        if below is None or pairs is None or pairs >= below:
            return names
        return ("triton", *(name for name in names if name != "triton"))


@cache
def order_of(arch: str, folder: Path = FOLDER) -> Order:
    """The order of an architecture such as "gfx942".

    Raises:
        ConfigError: there is no file of this architecture, or it is damaged.
    """
    file = folder / f"{arch}.json"
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        orders = {scheme: tuple(names) for scheme, names in data.pop("order").items()}
        return Order(order=orders, **data)
    except FileNotFoundError:
        known = ", ".join(sorted(path.stem for path in folder.glob("*.json")))
        raise ConfigError(
            f"ffn.backend auto knows the AMD architectures {known}, not {arch}; set ffn.backend to"
            " triton or torch"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file} is damaged ({error!r}); reinstall afd") from None
