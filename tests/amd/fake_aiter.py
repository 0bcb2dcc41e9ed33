"""A fake AITER that checks how it is called and computes the same results as AITER would.

Every function first binds its arguments to the recorded signature. The fake undoes the layouts as
AITER defines them (AITER e4048607, ops/shuffle.py, fused_moe.py), so that a wrong shuffle, scale
layout, mask or format in our backend gives a wrong result.
"""

import enum
import json
import sys
import types
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from signatures import DATA, load

from afd.wire.codecs_torch import dequantise_fp8, dequantise_mxfp4
from afd.wire.layout import Tag
from ffn_worker.moe.quantise import Weight, dequantise_weight

_ENUMS = json.loads(DATA.read_text())["libraries"]["aiter"]["enums"]
_SIGNATURES = load()


@dataclass
class FakeAiter:
    """The fake modules for sys.modules, and a record of the calls."""

    fp8: torch.dtype
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)

    def modules(self) -> dict[str, types.ModuleType]:
        out = {name: types.ModuleType(name) for name in ("aiter", "aiter.ops")}
        root = out["aiter"]
        for name, members in _ENUMS.items():
            setattr(root, name, enum.IntEnum(name, members))
        for module, functions in {
            "aiter.fused_moe": {"fused_moe": self._fused_moe},
            "aiter.ops.shuffle": {
                "shuffle_weight": self._shuffle_weight,
                "shuffle_scale": self._shuffle_scale,
            },
        }.items():
            out[module] = types.ModuleType(module)
            for name, function in functions.items():
                setattr(out[module], name, self._checked(f"{module}.{name}", function))
        return out

    def _checked(self, name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = _SIGNATURES[name].bind(*args, **kwargs)
            self.calls.append((name, dict(bound.arguments)))
            return function(bound.arguments)

        return call

    def _shuffle_weight(self, given: dict[str, Any]) -> torch.Tensor:
        x, layout = given["x"], given["layout"]
        assert layout == (16, 16)
        data = x.view(torch.uint8) if x.element_size() == 1 else x
        rows, columns = data.shape[-2], data.shape[-1]
        per = 16 // data.element_size()
        assert rows % 16 == 0 and columns % 32 == 0
        tiles = data.reshape(-1, rows // 16, 16, columns // 32, 32 // per, per)
        out = tiles.permute(0, 1, 3, 4, 2, 5).reshape(data.shape).contiguous().view(x.dtype)
        out.is_shuffled = True
        return out

    def _unshuffle_weight(self, x: torch.Tensor) -> torch.Tensor:
        assert x.is_shuffled
        data = x.view(torch.uint8) if x.element_size() == 1 else x
        rows, columns = data.shape[-2], data.shape[-1]
        per = 16 // data.element_size()
        tiles = data.reshape(-1, rows // 16, columns // 32, 32 // per, 16, per)
        return tiles.permute(0, 1, 4, 2, 3, 5).reshape(data.shape).contiguous().view(x.dtype)

    def _shuffle_scale(self, given: dict[str, Any]) -> torch.Tensor:
        scale = given["src"]
        assert scale.ndim == 2 and scale.dtype == torch.float8_e8m0fnu
        rows, columns = scale.shape
        padded = torch.zeros(-(-rows // 256) * 256, -(-columns // 8) * 8, dtype=torch.uint8)
        padded[:rows, :columns] = scale.view(torch.uint8)
        tiles = padded.view(padded.shape[0] // 32, 2, 16, padded.shape[1] // 8, 2, 4)
        return tiles.permute(0, 3, 5, 2, 4, 1).reshape(padded.shape).view(torch.float8_e8m0fnu)

    def _unshuffle_scale(self, scale: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        data = scale.view(torch.uint8)
        tiles = data.view(data.shape[0] // 32, data.shape[1] // 8, 4, 16, 2, 2)
        return tiles.permute(0, 5, 3, 1, 4, 2).reshape(data.shape)[:rows, :columns].contiguous()

    def _weights(self, codes: torch.Tensor, scale: torch.Tensor | None, kind: Any) -> torch.Tensor:
        codes = self._unshuffle_weight(codes)
        experts, rows, columns = codes.shape
        if kind.name == "No":
            assert scale is None and codes.dtype in (torch.bfloat16, torch.float16)
            return codes.float()
        if kind.name == "per_1x128":
            assert codes.dtype == self.fp8 and scale.dtype == torch.float32
            assert scale.shape == (experts, rows // 128, columns // 128)
            return dequantise_weight(Weight(Tag.E4M3FN, codes, scale))
        assert kind.name == "per_1x32" and codes.dtype == torch.float4_e2m1fn_x2
        flat = self._unshuffle_scale(scale, experts * rows, columns * 2 // 32)
        return dequantise_weight(
            Weight(Tag.E2M1, codes.view(torch.uint8), flat.view(experts, rows, -1))
        )

    def _rows(self, x: torch.Tensor, scale: torch.Tensor | None, kind: Any) -> torch.Tensor:
        if scale is None:
            assert x.dtype in (torch.bfloat16, torch.float16)
            return x.float()
        if kind.name == "per_1x128":
            assert x.dtype == self.fp8 and scale.dtype == torch.float32
            return dequantise_fp8(x, scale, torch.float32)
        assert kind.name == "per_1x32" and x.dtype == torch.float4_e2m1fn_x2
        return dequantise_mxfp4(x.view(torch.uint8), scale.view(torch.uint8), torch.float32)

    def _fused_moe(self, given: dict[str, Any]) -> torch.Tensor:
        """Computes silu(x gate) * (x up), down, and the weighted sum over local experts. AITER does
        not write rows beyond num_local_tokens; here they are NaN, so that any use shows."""
        ids, weight, mask = given["topk_ids"], given["topk_weight"], given["expert_mask"]
        assert ids.dtype == torch.int32 and weight.dtype == torch.float32
        assert mask.dtype == torch.int32 and mask.ndim == 1
        assert given["activation"].name == "Silu"
        kind = given["quant_type"]
        w1 = self._weights(given["w1"], given.get("w1_scale"), kind)
        w2 = self._weights(given["w2"], given.get("w2_scale"), kind)
        assert int(mask.sum()) == len(w1) and w1.shape[1] == 2 * w2.shape[2]
        local = torch.cumsum(mask, 0) - 1
        dtype = given.get("dtype") or given["hidden_states"].dtype
        assert dtype in (torch.bfloat16, torch.float16)
        x = self._rows(given["hidden_states"], given.get("a1_scale"), kind)
        rows = given.get("num_local_tokens")
        count = len(ids) if rows is None else int(rows)
        out = torch.full((len(ids), w2.shape[1]), torch.nan)
        out[:count] = 0
        for row in range(count):
            for k in range(ids.shape[1]):
                expert = int(ids[row, k])
                assert 0 <= expert < len(mask)
                if mask[expert]:
                    gate, up = (w1[local[expert]] @ x[row]).chunk(2)
                    out[row] += weight[row, k] * (w2[local[expert]] @ (F.silu(gate) * up))
        return out.to(dtype)


def install(monkeypatch: Any, fp8: torch.dtype) -> FakeAiter:
    """Makes `import aiter` find the fake for the duration of a test."""
    fake = FakeAiter(fp8)
    for name, module in fake.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    return fake
