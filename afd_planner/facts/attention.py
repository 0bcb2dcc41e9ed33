"""Cost of one attention layer per decoded token, for every kind of attention.

Three frozen dataclasses implement the protocol ``Attention``: ``GroupedQuery`` (MHA, GQA, MQA, MFA;
whole context, sliding or chunked window), ``Latent`` (MLA, weights absorbed as in decoding) and
``Recurrent`` (lightning and other linear attention with a matrix state).

``context`` is the number of tokens that the new token attends to, including itself. It may be a
mean and is therefore a float. A multiply-add counts as 2 FLOPs.
"""

from dataclasses import dataclass
from typing import Protocol

from afd_planner.facts.precision import dtype_bytes


@dataclass(frozen=True)
class Projection:
    """A weight matrix before or after attention. ``split``: whether TP divides it."""

    name: str
    parameters: int
    split: bool


class Attention(Protocol):
    """What the cost model needs to know about an attention layer. All counts are per layer."""

    @property
    def kind(self) -> str:
        """One of mha, gqa, mqa, mfa, mla, sliding, chunked and linear."""

    def projections(self) -> tuple[Projection, ...]:
        """Returns the weight matrices; a token uses each once."""

    def core_flops(self, context: float) -> float:
        """Returns the FLOPs per decoded token, excluding projections."""

    def prompt_flops(self, context: float) -> float:
        """Returns the FLOPs per prompt token, excluding projections."""

    def kv_read_bytes(self, context: float, dtype: str) -> float:
        """Returns the bytes of cache (or state) moved to decode one token."""

    def kv_stored_bytes(self, context: float, dtype: str) -> float:
        """Returns the bytes of cache (or state) of one sequence of this length."""

    def kv_shards(self, tp: int) -> int:
        """Returns the number of distinct cache shards on ``tp`` GPUs; further GPUs hold copies."""

    def query_rows(self, tp: int) -> int:
        """Returns the query heads per key-value head on each GPU; 0 for linear attention."""


def projection_parameters(attention: Attention) -> int:
    """Returns the number of parameters of all projections of a layer."""
    return sum(p.parameters for p in attention.projections())


def projection_parameters_per_gpu(attention: Attention, tp: int) -> float:
    """Returns the parameters that each of ``tp`` GPUs holds; every GPU holds unsplit matrices."""
    return sum(p.parameters / (tp if p.split else 1) for p in attention.projections())


@dataclass(frozen=True)
class GroupedQuery:
    """Softmax attention with ``heads`` query heads on ``kv_heads`` key-value heads.

    Attributes:
        query_rank: Width of MFA's low-rank query; 0 for a full-rank query.
        window: Tokens that a layer attends to; 0 for all.
        chunked: Whether windows are fixed chunks (Llama 4). A chunk is priced as full.
        output_gate: Whether the query projection also computes a gate of the same width.

    Sources: Step-3 report section 2; vLLM models/qwen3_moe.py, step3_text.py, llama4.py.
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
        query: tuple[Projection, ...]
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

    def prompt_flops(self, context: float) -> float:
        return self.core_flops(context)

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
    """MLA in decoding: queries and values are absorbed into the latent space.

    All heads share one cache row per token. Per token and head, the core multiplies with the whole
    row (rank + rope_dim columns) and with its latent part (value_rank columns; 0 means ``rank``,
    the exact value). The Step-3 report counts rank + rope_dim for both. A query_rank of 0 means a
    full-rank query. Source: DeepSeek-V2 report section 2.1.
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
        query: tuple[Projection, ...]
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

    def prompt_flops(self, context: float) -> float:
        # Prompts use the keys and values of each head, not the latent row (DeepSeek-V2 report 2.1).
        width = self.nope_dim + self.rope_dim + self.head_value_dim
        return 2.0 * self.heads * width * context

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
    """Linear attention with a state of fixed shape [heads, key_dim, value_dim] per sequence.

    A step reads and writes the state once. Short convolutions are not counted.

    Attributes:
        input_width: Output columns of all projections before the recurrence (queries, keys, values,
            gates).
        flops_per_state: FLOPs per state element: 5 for a decaying sum of outer products (decay,
            outer product and its addition, product with the query), 7 for a delta rule (one more
            product with the key).

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

    def prompt_flops(self, context: float) -> float:
        return self.core_flops(context)

    def kv_read_bytes(self, context: float, dtype: str) -> float:
        return 2 * self.kv_stored_bytes(context, dtype)

    def kv_stored_bytes(self, context: float, dtype: str) -> float:
        return self._state * dtype_bytes(self.state_dtype)

    def kv_shards(self, tp: int) -> int:
        return min(tp, self.heads)

    def query_rows(self, tp: int) -> int:
        return 0
