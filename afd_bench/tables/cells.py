"""What `afd bench kernels` measures, most valuable cells first. Pure.

The sizes come from afd_planner/data/models and, for the cells that check the planner against
docs/results/gpu.md, from afd_bench/gpu/slices.py. A cell is one entry of the written table: its
fields are the entry's keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from afd_bench.gpu.slices import find
from afd_planner.cost.kernels import core_key
from afd_planner.facts.attention import projection_parameters_per_gpu
from afd_planner.facts.ffn import MoeFfn
from afd_planner.facts.model import ModelSpec
from afd_planner.facts.model_hf import load_model
from afd_planner.facts.precision import dtype_bytes

MODELS = ("deepseek-v3", "qwen3-235b-a22b", "kimi-k2", "step-3", "glm-4.6", "qwen3-30b-a3b")
CHECKED = ("qwen3-30b", "qwen3-30b-coarse-mqa")
"""Slices that docs/results/gpu.md measured from end to end with all their layers' widths."""
GPUS = (8, 16, 32, 64)
TPS = (1, 2, 4, 8)
REQUESTS = (16, 64, 256, 512)
TILES = (80, 96, 128, 160, 192)
"""Requests times key-value heads of further cells of grouped-query attention, of equal lengths. A
kernel divides the cache of such a tile among few multiprocessors, so around their number its time
is a staircase: on an H200 (132) 80 tiles of 16K tokens take 1.55 times as long as 64."""
CONTEXTS = (1024, 4096, 16384, 65536)
ROWS = (64, 256, 1024, 4096, 16384)
MORE_ROWS = (128, 512, 2048, 8192)
LARGE_ROWS = (1024, 4096, 16384)
STEP_ROWS = (16, 64, 256, 512, 1024)
MOST_CACHE_BYTES = 4e9
"""Largest cache of one layer. The cache of all layers of a model fills a GPU long before that."""
_BLOCK = 128


@dataclass(frozen=True)
class AttentionCell:
    """The attention kernel of one layer: cache read, softmax, weighted sum.

    head_dim: columns of a key; value_dim: of a value. MLA ("mla") has one cache row per token, of
    which the values are the first value_dim columns. cache: dtype of the cache. rows: requests.
    context: tokens of each in the cache.
    """

    kind: str
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    cache: str
    rows: int
    context: int

    @property
    def cache_bytes(self) -> float:
        width = self.head_dim if self.kind == "mla" else 2 * self.head_dim
        return self.rows * self.context * self.kv_heads * width * dtype_bytes(self.cache)


@dataclass(frozen=True)
class MixedCell(AttentionCell):
    """The same for requests of different lengths, as in service: half to one and a half times
    ``context``, evenly distributed. The kernel divides such a cache less evenly than an equal
    one."""


@dataclass(frozen=True)
class DenseCell:
    """All of an attention stage but the attention kernel: norms, projections, router.

    model: name of afd_planner/data/models or of a slice. tp: GPUs that divide the heads.
    parameters: of these products on one GPU; the planner looks the entry up by them.
    """

    model: str
    tp: int
    parameters: int
    rows: int


@dataclass(frozen=True)
class ExpertCell:
    """The routed experts of one layer on one GPU.

    experts: held here, of num_experts. width: of an expert here. rows: of the micro-batch over all
    GPUs; the rows' experts are drawn from all experts. backend: of ffn_worker.
    """

    hidden: int
    width: int
    experts: int
    num_experts: int
    top_k: int
    scheme: str
    backend: str
    rows: int


@dataclass(frozen=True)
class RestCell:
    """Final norm, LM head and sampling of ``rows`` tokens. vocab: columns of the LM head here."""

    hidden: int
    vocab: int
    rows: int


Cell = AttentionCell | DenseCell | ExpertCell | RestCell
STAGE = {
    AttentionCell: "attention",
    MixedCell: "mixed_attention",
    DenseCell: "dense",
    ExpertCell: "experts",
    RestCell: "rest",
}
"""Key of a cell's list in the table."""


def spec_of(name: str) -> ModelSpec:
    """Returns a model of afd_planner/data/models, or a slice of afd_bench/gpu/slices.py."""
    if name not in CHECKED:
        return load_model(name)
    from afd_bench.planner.compare import model_of  # it reads the slice's config.json

    return model_of(name, find(name).sizes.layers)


def cells() -> list[Cell]:
    """Returns every cell once, in the order in which they are measured."""
    checked = [spec_of(name) for name in CHECKED]
    models = [load_model(name) for name in MODELS]
    fp8 = [shard for gpus in GPUS for model in models for shard in _shards(model, gpus)]
    plain_ep = [s for s in fp8 if s.width == _moe_of(models, s).intermediate]
    divided = [s for s in fp8 if s.width != _moe_of(models, s).intermediate]
    small = [
        _expert(_moe(model), ep, tp, "plain")
        for model in checked
        for ep, tp in ((1, 1), (2, 1), (1, 2))
    ]
    order: list[Iterable[Cell]] = [
        # the cells of docs/results/gpu.md
        _attention(checked[0], 1, "bfloat16"),
        _attention(checked[1], 1, "fp8"),
        *(_dense(name, 1) for name in (CHECKED[1], *MODELS[-1:])),
        *(_at(shard, "triton", ROWS[:4]) for shard in small),
        *(_rest(model, 1) for model in checked[:1]),
        # the map: attention data-parallel, experts under EP
        *(_attention(model, 1, "fp8") for model in models),
        *(_dense(name, 1) for name in MODELS),
        *(_at(shard, "triton", ROWS) for shard in plain_ep),
        *(_rest(model, 1) for model in models),
        # many rows per expert: the kernels with tensor copies
        *(_at(shard, "grouped", LARGE_ROWS) for shard in (*small, *plain_ep)),
        *(_attention(model, 1, "bfloat16") for model in models),
        # TP in the experts, then in colocated attention
        *(_at(shard, "triton", ROWS) for shard in divided),
        *(_attention(model, 8, "fp8") for model in models),
        *(_dense(name, 8) for name in MODELS),
        *(_rest(model, 8) for model in models),
        *(_at(shard, "triton", MORE_ROWS) for shard in plain_ep),
        *(_at(shard, "grouped", LARGE_ROWS) for shard in divided),
        # the staircases of attention
        _attention(checked[0], 1, "bfloat16", TILES),
        _attention(checked[1], 1, "fp8", TILES),
        *(_attention(model, 1, "fp8", TILES) for model in models),
        *(_attention(model, 1, "bfloat16", TILES) for model in models),
        *(_attention(model, 8, "fp8", TILES) for model in models),
    ]
    return list(dict.fromkeys(cell for some in order for cell in some))


def shrunk(cell: Cell) -> Cell:
    """Returns a cell small enough for a CPU, for a dry run."""
    if isinstance(cell, AttentionCell):
        return replace(cell, rows=min(cell.rows, 3), context=min(cell.context, 70))
    if isinstance(cell, DenseCell):
        return replace(cell, rows=min(cell.rows, 3))
    if isinstance(cell, ExpertCell):
        return replace(
            cell, hidden=256, width=128, experts=min(cell.experts, 4), num_experts=8, top_k=2,
            backend="torch", rows=min(cell.rows, 8),
        )  # fmt: skip
    return replace(cell, hidden=64, vocab=128, rows=min(cell.rows, 3))


def _moe(model: ModelSpec) -> MoeFfn:
    return next(group.ffn for group in model.groups if isinstance(group.ffn, MoeFfn))


def _moe_of(models: Iterable[ModelSpec], cell: ExpertCell) -> MoeFfn:
    found = (_moe(model) for model in models)
    key = cell.hidden, cell.num_experts
    return next(ffn for ffn in found if (ffn.hidden, ffn.experts) == key)


def _expert(ffn: MoeFfn, ep: int, tp: int, scheme: str) -> ExpertCell:
    held, width = -(-ffn.experts // ep), ffn.intermediate // tp
    return ExpertCell(ffn.hidden, width, held, ffn.experts, ffn.top_k, scheme, "triton", 0)


def _shards(model: ModelSpec, gpus: int) -> Iterator[ExpertCell]:
    """Yields the FP8 shards of experts on ``gpus`` GPUs: EP, and EP times TP."""
    ffn = _moe(model)
    for tp in TPS:
        ep, width = gpus // tp, ffn.intermediate // tp
        if ep <= ffn.experts and ffn.intermediate % tp == 0 and width % _BLOCK == 0:
            yield _expert(ffn, ep, tp, "fp8_block")


def _at(shard: ExpertCell, backend: str, rows: Iterable[int]) -> Iterator[ExpertCell]:
    for count in rows:
        yield replace(shard, backend=backend, rows=count)


def _attention(
    model: ModelSpec, tp: int, cache: str, tiles: Sequence[int] = ()
) -> Iterator[AttentionCell]:
    """Yields the cells of REQUESTS, with equal and with mixed lengths; or those of ``tiles``, of
    equal lengths, which latent attention has none of."""
    key = core_key(model.groups[-1].attention, tp)
    if key is None:
        return
    base = AttentionCell(*key, cache, 0, 0)
    requests: Sequence[int] = REQUESTS
    if tiles:
        requests = [n // base.kv_heads for n in tiles] if base.kind == "gqa" else []
    for context in CONTEXTS:
        for rows in requests:
            cell = replace(base, rows=rows, context=context)
            if cell.cache_bytes > MOST_CACHE_BYTES:
                continue
            yield cell
            if not tiles:
                yield MixedCell(**asdict(cell))


def _dense(name: str, tp: int) -> Iterator[DenseCell]:
    group = spec_of(name).groups[-1]
    held = projection_parameters_per_gpu(group.attention, tp) + group.ffn.router_parameters
    for rows in STEP_ROWS:
        yield DenseCell(name, tp, int(held), rows)


def _rest(model: ModelSpec, tp: int) -> Iterator[RestCell]:
    for rows in STEP_ROWS:
        yield RestCell(model.hidden, model.vocab // tp, rows)
