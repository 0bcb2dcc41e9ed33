"""Loads the experts of one FFN rank, layer by layer, straight to the device that computes them.

Threads read the weights of a layer in parallel; each weight is decoded or converted on the device,
if it has to be, as soon as it has been read. Beside the weights that the rank holds, host memory
holds the layer that is being loaded if it is bound for the CPU, and one weight per thread if it is
bound for a GPU.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from os import PathLike

import torch

from afd.errors import ConfigError
from afd.models import Family, MlpNames, MoeModel, Quantization, read_quantization
from afd.models.checkpoint import tensor_table
from afd.models.weight_format import Range, WeightFormat, tensor_name
from afd.placement.tables import EMPTY
from afd.wire.layout import MX_BLOCK, SCALE_BLOCK, Tag
from ffn_worker.experts.shard import DTYPES, LayerWeights, Shard
from ffn_worker.experts.stored_weight import StoredWeight, stored_format
from ffn_worker.experts.tensor_files import Table, TensorFiles
from ffn_worker.moe.quantise import Weight
from ffn_worker.moe.scheme import Scheme
from ffn_worker.moe.stored import held_as

Progress = Callable[[int, int, int], None]
"""Called with (layers loaded, number of layers, bytes read so far), by one thread at a time."""

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Mlp:
    """The tensors of one gated MLP, or of all experts of a layer, stacked.

    gate_up: gate and up [I, H], or one tensor [2*I, H].
    """

    names: MlpNames
    gate_up: tuple[StoredWeight, ...]
    down: StoredWeight

    @property
    def weights(self) -> tuple[StoredWeight, ...]:
        return (*self.gate_up, self.down)


class Checkpoint:
    """The experts of a checkpoint folder: what is stored where, and how.

    Raises:
        ConfigError: the folder has no readable config.json or weights, or no routed experts.
    """

    def __init__(self, path: str | PathLike[str], family: Family, model: MoeModel) -> None:
        self.path = path
        self.model = model
        self.table: Table = tensor_table(path)
        self._quantization: Quantization = read_quantization(path)
        self._family = family
        self._routed = self._layout()

    def _layout(self) -> MlpNames:
        """Returns the first of the family's layouts that this checkpoint uses."""
        layer = self.model.moe_layers[0]
        for names in self._family.routed_names:
            down = names.for_layer(layer, expert=0).down
            stored = stored_format(self._quantization, self.table, down)
            if tensor_name(down, stored.codes) in self.table:
                return names
        down = self._family.routed_names[0].for_layer(layer, expert=0).down
        stored = stored_format(self._quantization, self.table, down)
        raise ConfigError(
            f"{self.path} has no tensor {tensor_name(down, stored.codes)}: it is incomplete or not "
            f"of the family {self._family.name}; download it again, or correct config.json"
        )

    def experts(self, layer: int, experts: Sequence[int]) -> list[Mlp]:
        """Returns the routed experts' MLPs; one for all of them if they are stacked.

        An empty slot has the names of expert 0; nothing is read for it.
        """
        if not self._routed.per_expert:
            names = self._names(layer)
            return [self._mlp(names, self.model.moe_intermediate, self.model.num_experts)]
        each = (self._names(layer, max(expert, 0)) for expert in experts)
        return [self._mlp(names, self.model.moe_intermediate) for names in each]

    def _names(self, layer: int, expert: int | None = None) -> MlpNames:
        prefix, first = self._family.draft_prefix, self.model.num_layers
        if not prefix or layer < first:
            return self._routed.for_layer(layer, expert)
        return self._routed.for_layer(layer - first, expert).below(prefix)

    def shared(self, layer: int) -> Mlp | None:
        """Returns the shared expert's MLP; None: there is none."""
        if self._family.shared_names is None or not self.model.shared_intermediate:
            return None
        names = self._family.shared_names.for_layer(layer)
        return self._mlp(names, self.model.shared_intermediate)

    def _mlp(self, names: MlpNames, width: int, stacked: int = 0) -> Mlp:
        def weight(name: str, n: int, k: int) -> StoredWeight:
            stored = stored_format(self._quantization, self.table, name)
            turned = names.transposed and not stored.is_quantised
            return StoredWeight(name, n, k, stored, stacked, turned)

        rows, hidden = 2 * width // len(names.gate_up), self.model.hidden
        gate_up = tuple(weight(name, rows, hidden) for name in names.gate_up)
        return Mlp(names, gate_up, weight(names.down, hidden, width))

    def format(self) -> WeightFormat:
        """Returns the format of the routed experts, of the first layer if layers differ."""
        layer = self.model.moe_layers[0]
        return self.experts(layer, (0,))[0].down.stored

    def scheme(self) -> Scheme:
        """Returns the scheme that holds all routed experts as stored; PLAIN: there is none."""
        hidden, width = self.model.hidden, self.model.moe_intermediate
        found = set()
        for layer in self.model.moe_layers:
            for weight in self.experts(layer, (0,))[0].weights:
                found.add(held_as(weight.stored, hidden, width))
        return found.pop() if len(found) == 1 else Scheme.PLAIN

    def check(self, shard: Shard, layer: int) -> None:
        """Checks the headers of all tensors of a layer that the shard needs. Raises ConfigError."""
        mlps = self.experts(layer, shard.experts[layer])
        first = mlps[0].down
        for weight in (weight for mlp in mlps for weight in mlp.weights):
            if weight.stored != first.stored:
                raise ConfigError(
                    f"tensor {weight.name} of {self.path} is stored as {weight.stored} and "
                    f"{first.name} as {first.stored}; the experts of a layer must be stored alike"
                )
        shared = self.shared(layer) if shard.shared is not None else None
        for mlp in (*mlps, *([] if shared is None else [shared])):
            for weight in mlp.weights:
                weight.check(self.table, self.path)


class ShardLoader:
    """Loads ``shard`` of every MoE layer, or of some.

    Checks all names and shapes against the file headers before it reads any weight. Weights have
    the scheme that was asked for; FP8 is e4m3fn.

    Raises:
        ConfigError: a tensor is missing, or its shape or dtype is not what config.json says.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        shard: Shard,
        *,
        scheme: Scheme = Scheme.PLAIN,
        device: torch.device = _CPU,
        threads: int = 4,
    ) -> None:
        self._checkpoint = checkpoint
        self._model = checkpoint.model
        self._shard = shard
        self._scheme = scheme
        self._device = device
        self._threads = threads
        self._files = TensorFiles(checkpoint.table)
        for layer in shard.experts:
            checkpoint.check(shard, layer)

    @property
    def bytes_read(self) -> int:
        """Tensor bytes that were read from files so far."""
        return self._files.bytes_read

    def layers(self, progress: Progress | None = None) -> Iterator[tuple[int, LayerWeights]]:
        """Yields the weights of one layer after the other, in the order of ``shard.experts``.

        Reads a layer only when it is asked for, so a caller that drops or repacks each layer holds
        one at a time.
        """
        count = len(self._shard.experts)
        pool = ThreadPoolExecutor(self._threads, thread_name_prefix="load")
        with pool, self._files:
            for done, layer in enumerate(self._shard.experts, 1):
                weights = self._layer(pool, layer)
                if progress is not None:
                    progress(done, count, self.bytes_read)
                yield layer, weights
                del weights  # the next layer is read without this one

    def _layer(self, pool: ThreadPoolExecutor, layer: int) -> LayerWeights:
        shard, model, hidden = self._shard, self._model, self._model.hidden
        experts, width = shard.experts[layer], shard.width[1] - shard.width[0]
        w13 = self._empty(self._scheme, len(experts), 2 * width, hidden)
        w2 = self._empty(self._scheme, len(experts), hidden, width)
        mlps = self._checkpoint.experts(layer, experts)
        tasks: list[Callable[[], None]] = []
        for slot, expert in enumerate(experts):
            if expert == EMPTY:
                for weight in (w13[slot], w2[slot]):
                    weight.clear()
                continue
            mlp = mlps[0] if mlps[0].down.stacked else mlps[slot]
            tasks += self._tasks(mlp, w13[slot], w2[slot], shard.width, expert)
        biases = self._biases(layer, experts) if model.expert_bias else (None, None)
        shared: tuple[Weight | None, Weight | None] = None, None
        mlp_shared = self._checkpoint.shared(layer)
        if shard.shared is not None and mlp_shared is not None:
            shared = self._shared(mlp_shared, shard.shared, tasks)
        # On the stream of this thread, so that what it does before and after is in order with them.
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None

        def run(task: Callable[[], None]) -> None:
            with torch.cuda.stream(stream):
                task()

        for future in [pool.submit(run, task) for task in tasks]:
            future.result()
        return LayerWeights(w13, w2, *shared, *biases)

    def _shared(
        self, mlp: Mlp, cut: Range, tasks: list[Callable[[], None]]
    ) -> tuple[Weight, Weight]:
        hidden, narrow = self._model.hidden, cut[1] - cut[0]
        scheme = mlp.down.held_as((0, hidden), cut)
        gate_up = self._empty(scheme, 2 * narrow, hidden)
        down = self._empty(scheme, hidden, narrow)
        tasks += self._tasks(mlp, gate_up, down, cut, 0)
        return gate_up, down

    def _tasks(
        self, mlp: Mlp, gate_up: Weight, down: Weight, cut: Range, expert: int
    ) -> Iterator[Callable[[], None]]:
        """Yields one function per read that fills the weights of an expert."""
        hidden, width = (0, self._model.hidden), cut[1] - cut[0]

        def read(
            weight: StoredWeight, out: Weight, rows: Range, columns: Range, woven: bool = False
        ) -> Callable[[], None]:
            return lambda: weight.read_into(
                self._files, out, rows, columns, expert=expert, interleaved=woven
            )

        if mlp.names.interleaved:
            yield read(mlp.gate_up[0], gate_up, (2 * cut[0], 2 * cut[1]), hidden, True)
        else:
            # A checkpoint stores gate and up as two tensors, or as one with the gate rows first.
            one = len(mlp.gate_up) == 1
            for half, first in enumerate((0, mlp.gate_up[0].n // 2 if one else 0)):
                rows = first + cut[0], first + cut[1]
                out = rows_of(gate_up, (half * width, (half + 1) * width))
                yield read(mlp.gate_up[0 if one else half], out, rows, hidden)
        yield read(mlp.down, down, hidden, cut)

    def _biases(self, layer: int, experts: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the biases of a layer's experts (stacked tensors only, as in gpt-oss).

        Only the rank with the first columns adds the bias of ``down``: ranks' results are summed.
        """
        dtype = DTYPES[self._model.dtype]
        names = self._checkpoint.experts(layer, experts)[0].names
        first, second = (
            self._files.read(tensor_name(name, "bias"))[list(experts)]
            for name in (names.gate_up[0], names.down)
        )
        begin, end = self._shard.width
        gate, up = first[:, 0::2], first[:, 1::2]
        if not names.interleaved:
            gate, up = first.chunk(2, dim=1)
        both = torch.cat([gate[:, begin:end], up[:, begin:end]], dim=1)
        if begin:
            second = torch.zeros_like(second)
        return both.to(self._device, dtype), second.to(self._device, dtype)

    def _empty(self, scheme: Scheme, *shape: int) -> Weight:
        """Allocates a weight on the device."""
        *leading, n, k = shape

        def empty(*size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty((*leading, *size), dtype=dtype, device=self._device)

        if scheme is Scheme.PLAIN:
            return Weight.of(empty(n, k, dtype=DTYPES[self._model.dtype]))
        if scheme is Scheme.MXFP4:
            codes, scales = (
                empty(n, k // 2, dtype=torch.uint8),
                empty(n, k // MX_BLOCK, dtype=torch.uint8),
            )
            return Weight(Tag.E2M1, codes, scales)
        scales = empty(n // SCALE_BLOCK, k // SCALE_BLOCK, dtype=torch.float32)
        return Weight(Tag.E4M3FN, empty(n, k, dtype=torch.float8_e4m3fn), scales)


def rows_of(weight: Weight, rows: Range) -> Weight:
    """Returns a view of rows of [N, K], between blocks."""
    begin, end = rows
    if weight.scheme is not Scheme.FP8_BLOCK:
        return weight[slice(begin, end)]
    assert weight.scales is not None
    blocks = slice(begin // SCALE_BLOCK, end // SCALE_BLOCK)
    return Weight(weight.tag, weight.codes[begin:end], weight.scales[blocks])


def load_layer(
    checkpoint: Checkpoint, shard: Shard, layer: int, scheme: Scheme, device: torch.device
) -> LayerWeights:
    """Loads the routed experts that ``shard`` names for one layer; the shared parts are None.

    Raises:
        ConfigError: as :class:`ShardLoader`.
    """
    alone = replace(shard, shared=None, experts={layer: shard.experts[layer]})
    loader = ShardLoader(checkpoint, alone, scheme=scheme, device=device)
    (_, weights), *_ = loader.layers()
    return weights
