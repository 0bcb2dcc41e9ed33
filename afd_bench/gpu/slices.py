"""Model slices: models with full width and few layers, for checkpoints made on demand. Pure data.

A slice has the widths, experts and heads of a published model but fewer layers, because writing and
loading all weights takes too long. Disaggregation should gain most on these shapes:

- ``coarse`` slices keep the total and the activated parameters, in fewer and larger experts.
- ``-mqa`` slices have one key/value head.
- ``wide-coarse-mqa`` is not a published model: Step-3's width and attention with 16 experts, 4 per
  token. The cost model predicts the largest gain for it on four GPUs (docs/lab/notes.md).
"""

from dataclasses import dataclass, replace

from afd.errors import ConfigError
from afd_demo.sizes import Sizes


@dataclass(frozen=True)
class Slice:
    """A model slice.

    family: key of afd_demo.sizes. full_layers: layers of the published model. of: its name in
    afd_planner/data/models, "" if it has none. layout, stored_as: see
    afd_demo.published.make; layout "" for the family's own, in bfloat16.
    """

    family: str
    sizes: Sizes
    full_layers: int
    of: str = ""
    layout: str = ""
    stored_as: str = "plain"

    def with_layers(self, layers: int | None) -> "Slice":
        if layers is None:
            return self
        return replace(self, sizes=replace(self.sizes, layers=layers))


_QWEN_30B = Sizes(
    hidden=2048,
    layers=12,
    experts=128,
    top_k=8,
    intermediate=768,
    heads=32,
    kv_heads=4,
    head_dim=128,
    vocab=151_936,
    max_positions=40_960,
)
_STEP3 = Sizes(
    hidden=7168,
    layers=3,
    experts=48,
    top_k=3,
    intermediate=5120,
    dense_intermediate=18_432,
    heads=64,
    head_dim=256,
    share_q_dim=2048,
    vocab=128_815,
    max_positions=65_536,
)
_COARSE = replace(_QWEN_30B, experts=32, top_k=2, intermediate=3072)
_TINY = Sizes(max_positions=40_960)
# Small, but with widths that vLLM's FP8 and MLA kernels take.
_SMALL = replace(
    _TINY,
    hidden=1024,
    layers=4,
    experts=32,
    top_k=4,
    intermediate=512,
    dense_intermediate=2048,
    heads=16,
    kv_heads=2,
    head_dim=128,
)

SLICES: dict[str, Slice] = {
    "qwen3-30b": Slice("qwen3_moe", _QWEN_30B, 48, "qwen3-30b-a3b"),
    "qwen3-30b-coarse": Slice("qwen3_moe", _COARSE, 48),
    "qwen3-30b-coarse-mqa": Slice("qwen3_moe", replace(_COARSE, kv_heads=1), 48),
    "wide-coarse-mqa": Slice(
        "qwen3_moe",
        replace(
            _QWEN_30B,
            hidden=7168,
            experts=16,
            top_k=4,
            intermediate=2048,
            heads=64,
            kv_heads=1,
            head_dim=256,
        ),
        48,
    ),
    "qwen3-235b": Slice(
        "qwen3_moe",
        replace(_QWEN_30B, hidden=4096, layers=4, intermediate=1536, heads=64),
        94,
        "qwen3-235b-a22b",
    ),
    "deepseek-v3": Slice(
        "deepseek_v3",
        Sizes(
            hidden=7168,
            layers=3,
            experts=256,
            top_k=8,
            intermediate=2048,
            dense_intermediate=18_432,
            heads=128,
            vocab=129_280,
            max_positions=163_840,
            groups=8,
            top_groups=4,
            mla=(128, 64, 128, 512, 1536),
        ),
        61,
        "deepseek-v3",
    ),
    # Hugging Face deepseek-ai/DeepSeek-V2-Lite config.json, with all layers: the model is small
    "deepseek-v2-lite": Slice(
        "deepseek_v2",
        Sizes(
            hidden=2048,
            layers=27,
            experts=64,
            top_k=6,
            intermediate=1408,
            dense_intermediate=10_944,
            heads=16,
            vocab=102_400,
            max_positions=163_840,
            shared_experts=2,
            mla=(128, 64, 128, 512, 1536),
        ),
        27,
    ),
    "step-3": Slice("step3", _STEP3, 61, "step-3"),
    # for the long runs of `afd bench gpu jitter`
    "qwen3-30b-short": Slice("qwen3_moe", replace(_QWEN_30B, layers=4), 48, "qwen3-30b-a3b"),
    "small-fp8": Slice("qwen3_moe", _SMALL, 4, layout="qwen3_moe", stored_as="fp8_block"),
    "small-deepseek-fp8": Slice(
        "deepseek_v3",
        replace(_SMALL, heads=16, mla=(128, 64, 128, 512, 1536), groups=8, top_groups=4),
        4,
        layout="deepseek_v3",
        stored_as="fp8_block",
    ),
    "small-gpt-oss": Slice(
        "gpt_oss", replace(_SMALL, head_dim=64), 4, layout="gpt_oss", stored_as="mxfp4"
    ),
    "tiny": Slice("qwen3_moe", _TINY, _TINY.layers),
    "tiny-deepseek": Slice("deepseek_v2", _TINY, _TINY.layers),
    "tiny-step3": Slice("step3", _TINY, _TINY.layers),
}


def find(name: str, layers: int | None = None) -> Slice:
    """Returns the slice ``name``. layers: replaces its number of layers.

    Raises:
        ConfigError: the name is unknown.
    """
    if name not in SLICES:
        raise ConfigError(f"slice {name!r} is unknown; use one of {', '.join(SLICES)}")
    return SLICES[name].with_layers(layers)
