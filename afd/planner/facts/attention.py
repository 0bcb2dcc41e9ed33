"""What one attention layer costs per decoded token, for every attention kind.

Three kinds as frozen dataclasses with the same methods: ``GroupedQuery`` (MHA, GQA, MQA, MFA;
whole context, sliding or chunked window), ``Latent`` (MLA, weights absorbed as in decoding) and
``Recurrent`` (lightning and other linear attention with a matrix state).

``context`` is the number of tokens that the new token attends to, itself included; it may be a
mean, hence a float. FLOPs count a multiply-add as 2.
"""

from dataclasses import dataclass
from typing import Protocol

from afd.planner.facts.precision import dtype_bytes


@dataclass(frozen=True)
class Projection:
    """A weight matrix before or after attention. ``split``: tensor parallelism divides it."""

    name: str
    parameters: int
    split: bool


class Attention(Protocol):
    """What the cost model asks of an attention layer. All counts are per layer."""

    @property
    def kind(self) -> str:
        """mha, gqa, mqa, mfa, mla, sliding, chunked or linear."""

    def projections(self) -> tuple[Projection, ...]:
        """Weight matrices; each is used once per token."""

    def core_flops(self, context: float) -> float:
        """FLOPs per token without projections."""

    def kv_read_bytes(self, context: float, dtype: str) -> float:
        """Cache (or state) bytes moved to decode one token."""

    def kv_stored_bytes(self, context: float, dtype: str) -> float:
        """Cache (or state) bytes that one sequence of this length holds."""

    def kv_shards(self, tp: int) -> int:
        """Into how many parts ``tp`` GPUs divide one sequence's cache; the rest are copies."""

    def query_rows(self, tp: int) -> int:
        """Query heads that meet one key-value head on each of ``tp`` GPUs (0: no such product)."""


def projection_parameters(attention: Attention) -> int:
    """Parameters of all projections of a layer."""
    return sum(p.parameters for p in attention.projections())


def projection_parameters_per_gpu(attention: Attention, tp: int) -> float:
    """Parameters that each of ``tp`` GPUs holds and reads; what cannot be split is held by all."""
    return sum(p.parameters / (tp if p.split else 1) for p in attention.projections())


@dataclass(frozen=True)
class GroupedQuery:
    """Softmax attention with ``heads`` query heads on ``kv_heads`` key-value heads.

    query_rank: width of the low-rank query of MFA (0: full-rank query). window: tokens that a layer
    sees (0: all); chunked: windows are fixed chunks (Llama 4), of which a token sees up to all.
    output_gate: queries come with a gate of the same width. Sources: Step-3 report section 2; vLLM
    models/qwen3_moe.py, step3_text.py, llama4.py.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    query_rank: int = 0
    window: int = 0
    chunked: bool = False
    output_gate: bool = False

    @property
    def kind(self) -> str:
        if self.window:
            return "chunked" if self.chunked else "sliding"
        if self.query_rank:
            return "mfa"
        if self.kv_heads == self.heads:
            return "mha"
        return "mqa" if self.kv_heads == 1 else "gqa"

    def projections(self) -> tuple[Projection, ...]:
        q_width = self.heads * self.head_dim
        kv_width = self.kv_heads * 2 * self.head_dim
        if self.query_rank:
            query = (
                Projection("q_down", self.hidden * self.query_rank, split=False),
                Projection("q_up", self.query_rank * q_width, split=True),
            )
        else:
            query = (Projection("q", self.hidden * q_width * (1 + self.output_gate), split=True),)
        return (
            *query,
            Projection("kv", self.hidden * kv_width, split=self.kv_heads > 1),
            Projection("o", self.heads * self.head_dim * self.hidden, split=True),
        )

    def _span(self, context: float) -> float:
        return min(context, self.window) if self.window else context

    def core_flops(self, context: float) -> float:
        return 4.0 * self.heads * self.head_dim * self._span(context)

    def kv_read_bytes(self, context: float, dtype: str) -> float:
        width = self.kv_heads * 2 * self.head_dim
        return width * self._span(context) * dtype_bytes(dtype)

    def kv_stored_bytes(self, context: float, dtype: str) -> float:
        return self.kv_read_bytes(context, dtype)

    def kv_shards(self, tp: int) -> int:
        return min(tp, self.kv_heads)

    def query_rows(self, tp: int) -> int:
        heads_per_gpu = max(1, self.heads // tp)
        return max(1, heads_per_gpu * self.kv_shards(tp) // self.kv_heads)


@dataclass(frozen=True)
class Latent:
    """MLA as decoded: queries and values are absorbed into the latent space, one shared cache row.

    Per token and head the core is a product with the row (rank + rope wide) and one with its latent
    part (value_rank wide; equals ``rank`` in exact arithmetic). The Step-3 report counts rank +
    rope for both. query_rank 0: full-rank query. Source: DeepSeek-V2 report section 2.1.
    """

    hidden: int
    heads: int
    rank: int
    rope_dim: int
    nope_dim: int
    head_value_dim: int
    query_rank: int = 0
    value_rank: int = 0

    @property
    def kind(self) -> str:
        return "mla"

    def projections(self) -> tuple[Projection, ...]:
        q_width = self.heads * (self.nope_dim + self.rope_dim)
        if self.query_rank:
            query = (
                Projection("q_a", self.hidden * self.query_rank, split=False),
                Projection("q_b", self.query_rank * q_width, split=True),
            )
        else:
            query = (Projection("q", self.hidden * q_width, split=True),)
        absorbed = self.rank * self.heads * (self.nope_dim + self.head_value_dim)
        return (
            *query,
            Projection("kv_a", self.hidden * (self.rank + self.rope_dim), split=False),
            Projection("kv_b", absorbed, split=True),
            Projection("o", self.heads * self.head_value_dim * self.hidden, split=True),
        )

    def core_flops(self, context: float) -> float:
        value = self.value_rank or self.rank
        return 2.0 * self.heads * (self.rank + self.rope_dim + value) * context

    def kv_read_bytes(self, context: float, dtype: str) -> float:
        return (self.rank + self.rope_dim) * context * dtype_bytes(dtype)

    def kv_stored_bytes(self, context: float, dtype: str) -> float:
        return self.kv_read_bytes(context, dtype)

    def kv_shards(self, tp: int) -> int:
        return 1

    def query_rows(self, tp: int) -> int:
        return max(1, self.heads // tp)


@dataclass(frozen=True)
class Recurrent:
    """Linear attention with a [heads, key_dim, value_dim] state per sequence, whatever its length.

    A step reads and writes the state once. input_width: output columns of all projections before
    the recurrence (queries, keys, values, gates). flops_per_state: operations per state element;
    a decaying sum of outer products needs 5 (decay, product and its addition, product with the
    query), a delta rule 7 (one more product with the key). Short convolutions are left out.
    Sources: MiniMax-01 report section 2.2 and vLLM models/minimax_text_01.py (lightning attention);
    vLLM models/qwen3_next.py (gated delta net).
    """

    hidden: int
    heads: int
    key_dim: int
    value_dim: int
    input_width: int
    state_dtype: str = "float32"
    flops_per_state: int = 5

    @property
    def kind(self) -> str:
        return "linear"

    def projections(self) -> tuple[Projection, ...]:
        return (
            Projection("input", self.hidden * self.input_width, split=True),
            Projection("o", self.heads * self.value_dim * self.hidden, split=True),
        )

    @property
    def _state(self) -> int:
        return self.heads * self.key_dim * self.value_dim

    def core_flops(self, context: float) -> float:
        return float(self._state * self.flops_per_state)

    def kv_read_bytes(self, context: float, dtype: str) -> float:
        return 2 * self.kv_stored_bytes(context, dtype)

    def kv_stored_bytes(self, context: float, dtype: str) -> float:
        return self._state * dtype_bytes(self.state_dtype)

    def kv_shards(self, tp: int) -> int:
        return min(tp, self.heads)

    def query_rows(self, tp: int) -> int:
        return 0
