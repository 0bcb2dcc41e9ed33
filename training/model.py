"""Qwen3-MoE in plain torch, for training. Parameter names follow the Hugging Face checkpoint.

On a GPU, every expert computes every row, and the router's weights are zero for experts that a row
did not choose. This is exact, drops no rows and needs no sorting. For 32 narrow experts it is
faster than a grouped product, because one wide matrix product replaces 32 small ones. On a CPU,
where arithmetic dominates, an expert computes only the rows that chose it. vLLM 0.26
models/qwen3_moe.py and Transformers' Qwen3MoeForCausalLM compute the same function.
"""

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_GROUP = 64


@dataclass(frozen=True)
class ModelConfig:
    vocab: int = 8192
    hidden: int = 256
    layers: int = 8
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    experts: int = 32
    top_k: int = 4
    intermediate: int = 64  # of one expert
    context: int = 1024
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6

    def asdict(self) -> dict[str, float]:
        return asdict(self)


class RmsNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight).to(x.dtype)


def rope_tables(config: ModelConfig, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns cos and sin, each [length, head_dim] float32, with repeated halves (NeoX style)."""
    half = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32)
    frequency = config.rope_theta ** (-half / config.head_dim)
    angle = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequency)
    angle = torch.cat((angle, angle), -1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns x [batch, heads, length, head_dim] with rotary embedding."""
    left, right = x.chunk(2, -1)
    return (x * cos + torch.cat((-right, left), -1) * sin).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.c = c
        self.q_proj = nn.Linear(c.hidden, c.heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden, c.kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden, c.kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.heads * c.head_dim, c.hidden, bias=False)
        self.q_norm = RmsNorm(c.head_dim, c.norm_eps)
        self.k_norm = RmsNorm(c.head_dim, c.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(batch, length, self.c.heads, -1)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(batch, length, self.c.kv_heads, -1)).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, self.c.kv_heads, -1).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        result: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        return result


@dataclass
class Routing:
    """The router's result, tensors [rows, experts], for auxiliary losses and statistics."""

    probabilities: Tensor  # float32 softmax over all experts
    chosen: Tensor  # float32, 1 where the expert is among the top k
    logits: Tensor  # float32


class Moe(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.c = c
        self.gate = nn.Linear(c.hidden, c.experts, bias=False)
        self.gate_proj = nn.Parameter(torch.empty(c.experts, c.intermediate, c.hidden))
        self.up_proj = nn.Parameter(torch.empty(c.experts, c.intermediate, c.hidden))
        # Transposed on export. This layout allows one flat product in ``wide``.
        self.down_proj = nn.Parameter(torch.empty(c.experts, c.intermediate, c.hidden))

    def route(self, x: Tensor) -> tuple[Tensor, Routing]:
        """Routes x [rows, hidden].

        Returns weights [rows, experts] float32, whose rows sum to 1, and the routing.
        """
        with torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.float(), self.gate.weight.float())
        probabilities = logits.softmax(-1)
        top, ids = probabilities.topk(self.c.top_k, -1)
        top = top / top.sum(-1, keepdim=True)
        weights = torch.zeros_like(probabilities).scatter(-1, ids, top)
        chosen = torch.zeros_like(probabilities).scatter(-1, ids, 1.0)
        return weights, Routing(probabilities, chosen, logits)

    def forward(self, x: Tensor) -> tuple[Tensor, Routing]:
        rows = x.reshape(-1, self.c.hidden)
        weights, routing = self.route(rows)
        return self.experts(rows, weights).view_as(x), routing

    def experts(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Returns [rows, hidden] for rows [rows, hidden] and weights [rows, experts]."""
        return self.wide(rows, weights) if rows.is_cuda else self.grouped(rows, weights)

    def grouped(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Computes each expert on its own rows, zero-padded to the rows of the busiest expert."""
        kept, ids = weights.topk(self.c.top_k, -1)
        order = ids.flatten().argsort(stable=True)
        expert = ids.flatten()[order]
        counts = torch.bincount(expert, minlength=self.c.experts)
        place = torch.arange(len(order), device=rows.device) - (counts.cumsum(0) - counts)[expert]
        # Rounding up gives few different sizes, so that the library prepares its kernels once.
        size = -(-int(counts.max()) // _GROUP) * _GROUP
        slot = expert * size + place
        source = torch.full((self.c.experts * size,), len(rows), device=rows.device)
        source[slot] = order // self.c.top_k
        scale = kept.new_zeros(self.c.experts * size).index_copy(0, slot, kept.flatten()[order])
        groups = F.pad(rows, (0, 0, 0, 1))[source].view(self.c.experts, size, -1)
        both = torch.bmm(groups, torch.cat((self.gate_proj, self.up_proj), 1).transpose(1, 2))
        gate, up = both.chunk(2, -1)
        inner = F.silu(gate) * up * scale.view(self.c.experts, size, 1).to(both.dtype)
        out = torch.bmm(inner, self.down_proj).flatten(0, 1)
        total = rows.new_zeros(len(rows) + 1, out.shape[-1], dtype=torch.float32)
        return total.index_add(0, source, out.float())[:-1].to(out.dtype)

    def wide(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Computes every expert on every row."""
        inner = F.silu(F.linear(rows, self.gate_proj.flatten(0, 1))) * F.linear(
            rows, self.up_proj.flatten(0, 1)
        )
        inner = inner.view(-1, self.c.experts, self.c.intermediate) * weights[..., None].to(
            inner.dtype
        )
        return inner.flatten(1) @ self.down_proj.flatten(0, 1).to(inner.dtype)

    def reference(self, x: Tensor) -> Tensor:
        """Computes the same as ``forward``, expert by expert over the rows that chose it."""
        rows = x.reshape(-1, self.c.hidden)
        weights, _ = self.route(rows)
        out = torch.zeros_like(rows)
        for e in range(self.c.experts):
            mine = weights[:, e].nonzero().flatten()
            part = rows[mine]
            inner = F.silu(part @ self.gate_proj[e].T) * (part @ self.up_proj[e].T)
            out[mine] += weights[mine, e, None] * (inner @ self.down_proj[e])
        return out.view_as(x)


class Layer(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(c.hidden, c.norm_eps)
        self.self_attn = Attention(c)
        self.post_attention_layernorm = RmsNorm(c.hidden, c.norm_eps)
        self.mlp = Moe(c)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Routing]:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out, routing = self.mlp(self.post_attention_layernorm(x))
        return x + out, routing


class Model(nn.Module):
    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        self.c = c
        self.embed_tokens = nn.Embedding(c.vocab, c.hidden)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.layers))
        self.norm = RmsNorm(c.hidden, c.norm_eps)
        self.lm_head = nn.Linear(c.hidden, c.vocab, bias=False)
        self.initialise()

    def initialise(self) -> None:
        """Draws normal weights; those that write to the residual stream are 1/sqrt(2 L) smaller."""
        std = 0.02
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                last = name.endswith(("o_proj.weight", "down_proj"))
                nn.init.normal_(parameter, std=std / (2 * self.c.layers) ** 0.5 if last else std)

    def forward(self, ids: Tensor) -> tuple[Tensor, list[Routing]]:
        """Returns logits [batch, length, vocab] and the routing per layer; ids [batch, length]."""
        hidden, routings = self.trunk(ids)
        return self.lm_head(hidden), routings

    def trunk(self, ids: Tensor) -> tuple[Tensor, list[Routing]]:
        """Returns the head's input [batch, length, hidden] and the routing per layer."""
        cos, sin = rope_tables(self.c, ids.shape[1], ids.device)
        x = self.embed_tokens(ids)
        routings = []
        for layer in self.layers:
            x, routing = layer(x, cos, sin)
            routings.append(routing)
        return self.norm(x), routings


def auxiliary_losses(routings: list[Routing], top_k: int) -> tuple[Tensor, Tensor]:
    """Returns (balance, z), means over the layers.

    balance = experts * sum_e load_e * mean probability_e is 1 for an even load (Switch
    Transformers, section 2.2; load is the share of rows * top_k). z is the mean squared logsumexp
    of the router's logits (ST-MoE, section 3); it keeps them in range for bfloat16.
    """
    balance = torch.stack([
        r.chosen.mean(0).div(top_k).mul(r.probabilities.mean(0)).sum() * r.chosen.shape[-1]
        for r in routings
    ]).mean()  # fmt: skip
    z = torch.stack([r.logits.logsumexp(-1).square().mean() for r in routings]).mean()
    return balance, z
