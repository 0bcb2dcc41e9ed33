"""Which weights of the attention half are quantised. Imports neither torch nor vLLM.

The process that starts vLLM asks this, and must stay small.
"""

from dataclasses import dataclass
from os import PathLike

from afd.models import Quantization, read_model, read_quantization
from afd.models.checkpoint import TensorInfo, tensor_table
from afd.models.family import Family
from afd.models.weight_format import FLOATS, WeightFormat, tensor_name

Table = dict[str, TensorInfo]


@dataclass(frozen=True)
class StoredLinear:
    """A quantised weight [n, k]. name: that of an unquantised checkpoint."""

    name: str
    stored: WeightFormat
    n: int
    k: int

    @property
    def parts(self) -> dict[str, str]:
        """The names of its tensors, by their last part."""
        return {part: tensor_name(self.name, part) for part in self.stored.parts(self.n, self.k)}


def quantised_linears(
    table: Table, quantization: Quantization, family: Family
) -> dict[str, StoredLinear]:
    """Returns the quantised weights that are no experts', by the name of the tensor of codes."""
    found: dict[str, StoredLinear] = {}
    if not quantization.formats:
        return found
    for name, info in table.items():
        module, _, suffix = name.rpartition(".")
        stored = quantization.of(module)
        if not stored.is_quantised or suffix != stored.codes or family.is_expert_weight(name):
            continue
        if info.dtype not in FLOATS:
            found[name] = StoredLinear(f"{module}.weight", stored, *stored.size(info.shape))
    return found


def attention_is_quantised(path: str | PathLike[str]) -> bool:
    """Whether weights that attention instances read are quantised. Raises ConfigError."""
    family, _ = read_model(path)
    return bool(quantised_linears(tensor_table(path), read_quantization(path), family))
