"""Times decode attention on one device: our kernel and vLLM's FlashAttention 3."""

from collections.abc import Callable

import torch

from afd.errors import ConfigError
from afd_bench.moe.timing import cpu_clock, graph_seconds
from attention_worker.kernels.decode_attention import decode_attention, reference_decode_attention
from attention_worker.kernels.decode_plan import plan_decode

_PAGE = 64
_L2_BYTES = 160 << 20
"""Total bytes of the caches that are used in turn: more than any L2 cache."""

Launch = Callable[[int], object]


class Caches:
    """Several random FP8 caches of the same requests, used in turn, in vLLM's layout.

    A token's key and value are adjacent, and pages are in random order.
    """

    def __init__(self, lengths: tuple[int, ...], heads: int, dim: int, device: str) -> None:
        generator = torch.Generator(device).manual_seed(0)
        requests, per = len(lengths), -(-max(lengths) // _PAGE)
        least = _L2_BYTES if device != "cpu" else 0
        count = max(2, -(-least // (2 * dim * sum(lengths))))
        shape = (requests * per, _PAGE, 1, 2 * dim)
        # The mask leaves only codes of numbers below 1; arbitrary codes would include NaN.
        self.each = [
            torch.empty(shape, dtype=torch.uint8, device=device)
            .random_(0, 256, generator=generator)
            .bitwise_and_(0xB7)
            .view(torch.float8_e4m3fn)
            .split(dim, -1)
            for _ in range(count)
        ]
        order = torch.randperm(requests * per, generator=generator, device=device)
        self.table = order.int().view(requests, per)
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.longest = max(lengths)
        draw = torch.randn(requests, heads, dim, generator=generator, device=device)
        self.q = draw.to(torch.float8_e4m3fn)
        self.out = torch.empty(self.q.shape, dtype=torch.bfloat16, device=device)
        self.one = torch.ones(1, device=device)
        self.scale = dim**-0.5

    def turn(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = self.each[number % len(self.each)]
        return keys, values


def measure(lengths: tuple[int, ...], heads: int, dim: int, device: str) -> tuple[float, float]:
    """Returns (ours, FlashAttention 3) in us per launch; on CPU the reference twice (a dry run).

    Raises:
        ConfigError: vLLM's kernels are missing.
    """
    caches = Caches(lengths, heads, dim, device)
    if device == "cpu":
        ours, theirs = (1e6 * cpu_clock(lambda: _reference(caches), 1) for _ in range(2))
        return ours, theirs
    try:
        peer = _fa3(caches)
    except ImportError as err:
        raise ConfigError(
            f"the comparison needs vLLM with FlashAttention 3 ({err}); install vllm==0.26.0"
        ) from None
    count = max(4, len(caches.each))
    ours, theirs = (1e6 * graph_seconds(f, count, 1) for f in (_ours(caches, device), peer))
    return ours, theirs


def _ours(caches: Caches, device: str) -> Launch:
    requests, heads, dim = caches.q.shape
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    plan = plan_decode(requests, 1, heads, dim, 1, processors)
    one = caches.one

    def launch(number: int) -> None:
        keys, values = caches.turn(number)
        decode_attention(
            caches.q, keys, values, caches.table, caches.lengths, caches.out, caches.scale, plan,
            one, one, one,
        )  # fmt: skip

    return launch


def _fa3(caches: Caches) -> Launch:
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

    requests = len(caches.q)
    starts = torch.arange(requests + 1, dtype=torch.int32, device=caches.q.device)
    ones = caches.one.expand(requests, 1)

    def launch(number: int) -> None:
        keys, values = caches.turn(number)
        flash_attn_varlen_func(
            caches.q,
            keys,
            values,
            max_seqlen_q=1,
            cu_seqlens_q=starts,
            max_seqlen_k=caches.longest,
            seqused_k=caches.lengths,
            block_table=caches.table,
            softmax_scale=caches.scale,
            causal=True,
            out=caches.out,
            fa_version=3,
            q_descale=ones,
            k_descale=ones,
            v_descale=ones,
        )

    return launch


def _reference(caches: Caches) -> torch.Tensor:
    keys, values = caches.turn(0)
    return reference_decode_attention(
        caches.q, keys, values, caches.table, caches.lengths, caches.scale
    )
