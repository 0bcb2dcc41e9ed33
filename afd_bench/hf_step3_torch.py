"""A reference forward pass of Step-3 (text) in float32 torch, without KV cache or batching.

Written from the Step-3 report (arXiv 2507.19427: multi-matrix factorization attention, MoE with a
shared expert), independently of vLLM. transformers does not have Step-3.
"""

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from afd.models import read_config, read_model

_ROPE_THETA = 500_000.0  # of the released model; used if config.json has none


class Step3:
    """A checkpoint's weights in float32, and the forward pass of one sequence.

    to_ffn, from_ffn: applied to rows [length, hidden] before and after the experts of a MoE layer,
    to emulate a wire format. The router reads the unchanged rows.
    """

    def __init__(
        self,
        path: Path,
        *,
        to_ffn: Callable[[torch.Tensor], torch.Tensor] = lambda rows: rows,
        from_ffn: Callable[[torch.Tensor], torch.Tensor] = lambda rows: rows,
    ) -> None:
        self._to_ffn, self._from_ffn = to_ffn, from_ffn
        self._config = read_config(path)
        _, self._model = read_model(path)
        self._weights = {
            name: tensor.float()
            for file in sorted(path.glob("*.safetensors"))
            for name, tensor in load_file(file).items()
        }

    @torch.inference_mode()
    def greedy(self, prompt: tuple[int, ...], new_tokens: int) -> tuple[int, ...]:
        """Returns ``new_tokens`` greedy tokens after ``prompt``; ignores EOS."""
        tokens = list(prompt)
        for _ in range(new_tokens):
            tokens.append(int(self.logits(torch.tensor(tokens)).argmax()))
        return tuple(tokens[len(prompt) :])

    @torch.inference_mode()
    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the logits of the next token: int64 [length] -> float32 [vocabulary]."""
        x = self._weights["model.embed_tokens.weight"][tokens]
        for layer in range(self._model.num_layers):
            prefix = f"model.layers.{layer}."
            x = x + self._attention(prefix, self._norm(f"{prefix}input_layernorm", x))
            x = x + self._ffn(layer, self._norm(f"{prefix}post_attention_layernorm", x))
        return self._linear("lm_head", self._norm("model.norm", x[-1]))

    def _attention(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        """MFA: low-rank query projection, many query heads and one key/value head."""
        p = f"{prefix}self_attn."
        length, heads = x.shape[0], self._int("num_attention_heads")
        low_rank = self._norm(f"{p}inter_norm", self._linear(f"{p}q_proj", x))
        q = self._linear(f"{p}wq", low_rank).view(length, heads, -1).transpose(0, 1)
        k = self._linear(f"{p}k_proj", x).unsqueeze(0)  # [1, length, head_dim]
        v = self._linear(f"{p}v_proj", x).unsqueeze(0)
        q, k = self._rotate(q), self._rotate(k)
        scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        out = scores.masked_fill(~causal, -torch.inf).softmax(-1) @ v
        return self._linear(f"{p}o_proj", out.transpose(0, 1).reshape(length, -1))

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Applies rotary embedding to [heads, length, head_dim], halves paired ("neox" style)."""
        theta = self._config.get("rope_theta", _ROPE_THETA)
        assert isinstance(theta, float)
        length, size = x.shape[-2:]
        frequency = theta ** (-torch.arange(0, size, 2, dtype=torch.float32) / size)
        angle = torch.arange(length, dtype=torch.float32).unsqueeze(1) * frequency
        cos, sin = angle.cos(), angle.sin()
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def _ffn(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        prefix = f"model.layers.{layer}."
        if layer not in self._model.moe_layers:
            return self._mlp(f"{prefix}mlp.", x)
        weights, ids = self._linear(f"{prefix}moe.gate", x).softmax(-1).topk(self._model.top_k)
        if self._config.get("norm_expert_weight"):
            weights = weights / weights.sum(-1, keepdim=True)
        gate, up, down = (
            self._weights[f"{prefix}moe.{name}_proj.weight"] for name in ("gate", "up", "down")
        )
        x = self._to_ffn(x)
        out = self._mlp(f"{prefix}share_expert.", x)
        for expert in range(self._model.num_experts):
            rows, slot = (ids == expert).nonzero(as_tuple=True)
            mid = F.silu(x[rows] @ gate[expert].T) * (x[rows] @ up[expert].T)
            out[rows] += weights[rows, slot].unsqueeze(1) * (mid @ down[expert].T)
        return self._from_ffn(out)

    def _mlp(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        gate = F.silu(self._linear(f"{prefix}gate_proj", x))
        return self._linear(f"{prefix}down_proj", gate * self._linear(f"{prefix}up_proj", x))

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weights[f"{name}.weight"])

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight, eps = self._weights[f"{name}.weight"], self._config["rms_norm_eps"]
        assert isinstance(eps, float)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight

    def _int(self, key: str) -> int:
        value = self._config[key]
        assert isinstance(value, int)
        return value
