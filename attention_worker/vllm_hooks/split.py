"""A vLLM model class with remote experts and vLLM's own ``forward``: the split form.

It serves every model whose MoE layer is vLLM's (``FusedMoE``), whatever its decoder layer looks
like. Each step is one micro-batch, so attention waits for every answer. Shared experts, output
scaling and transforms stay on the attention instance, in vLLM's own MoE layer.
"""

import torch
from torch import nn
from vllm.config import VllmConfig

from attention_worker.draft_layer import DraftExperts
from attention_worker.vllm_hooks.draft import DraftModel
from attention_worker.vllm_hooks.routing import connect


def split(base: type[nn.Module], *, sparse: str = "", drafts: bool = False) -> type[nn.Module]:
    """Returns a subclass of the vLLM model class ``base`` whose routed experts are remote.

    sparse: config key whose presence makes vLLM build sparse attention; it is removed, so that
        attention is over all tokens. "": none.
    drafts: ``base`` is vLLM's class of draft layers. Its forward runs one draft layer, which is a
        step of its own.
    """
    bases = (base, DraftModel) if drafts else (base,)

    class Split(*bases):  # type: ignore[misc]  # known at run time only
        """The model without expert weights. Its MoE layers call the FFN over the transport."""

        def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
            vars(vllm_config.model_config.hf_config).pop(sparse, None)
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            self.remote: DraftExperts | None = None

        def attach(self, remote: DraftExperts, moe_layers: tuple[int, ...]) -> None:
            """Connects the model to the FFN instances. Called once, after the weights are in."""
            self.remote = remote
            connect(self, remote, moe_layers)

        def forward(self, *args: object, **kwargs: object) -> torch.Tensor:
            """Returns what vLLM's forward returns: the final hidden states, of a draft layer those
            for the next draft."""
            assert self.remote is not None, "attach() has to come before the first forward"
            self.remote.begin_step(depth=1, draft=drafts)
            output: torch.Tensor = super().forward(*args, **kwargs)
            self.remote.end_step()
            return output

    Split.__name__ = Split.__qualname__ = f"AfdSplit{base.__name__}"
    return Split
