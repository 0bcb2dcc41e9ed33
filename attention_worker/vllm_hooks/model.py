"""A vLLM model class whose experts are remote, derived from the class that vLLM ships."""

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.sequence import IntermediateTensors

from afd.models import Family
from attention_worker.model import LayerHalves
from attention_worker.pipeline import Experts, run_layers
from attention_worker.vllm_hooks.forward_context import micro_batches
from attention_worker.vllm_hooks.routing import make_router


def disaggregated(base: type[nn.Module], family: Family) -> type[nn.Module]:
    """Returns a subclass of the vLLM model class ``base`` whose ``forward`` is our pipeline."""

    class Disaggregated(base):  # type: ignore[valid-type,misc]  # known at run time only
        """The attention half of the model: no expert weights, FFN calls over the transport."""

        def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            self.remote: Experts | None = None
            self.halves: list[LayerHalves] = []
            self._tapped: tuple[int, ...] = ()
            for layer in self.model.layers:
                drop_shared_experts(layer, family)

        def attach(self, remote: Experts, moe_layers: tuple[int, ...]) -> None:
            """Connects the model to the FFN instances. Called once, after the weights are in."""
            self.remote = remote
            self.halves = [
                LayerHalves(
                    layer,
                    index,
                    family,
                    make_router(layer, family) if index in moe_layers else None,
                )
                for index, layer in enumerate(self.model.layers)
            ]

        def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
            """Sets the layers whose inputs an EAGLE-3 head reads. Called by vLLM's runner."""
            self._tapped = tuple(sorted(set(layers)))

        def forward(
            self,
            input_ids: torch.Tensor | None,
            positions: torch.Tensor,
            intermediate_tensors: IntermediateTensors | None = None,
            inputs_embeds: torch.Tensor | None = None,
        ) -> torch.Tensor | tuple[torch.Tensor, list[torch.Tensor]]:
            """Returns the final hidden states, model dtype [tokens, hidden]; with an EAGLE-3 head
            also the inputs of its layers, of the same shape."""
            assert self.remote is not None, "attach() has to come before the first forward"
            hidden = inputs_embeds if inputs_embeds is not None else self.embed_input_ids(input_ids)
            batches = micro_batches(hidden, positions)
            hidden = run_layers(self.halves, self.model.norm, self.remote, batches, self._tapped)
            if not self._tapped:
                return hidden
            tapped = zip(*(batch.tapped for batch in batches), strict=True)
            return hidden, [torch.cat(rows) for rows in tapped]

    Disaggregated.__name__ = Disaggregated.__qualname__ = f"Afd{base.__name__}"
    return Disaggregated


def text_only(base: type[nn.Module]) -> type[nn.Module]:
    """Returns the vLLM text model ``base`` for a config.json that has it in ``text_config``.

    vLLM then takes the checkpoint for a text model, and never builds the image encoder.
    """

    class TextOnly(base):  # type: ignore[valid-type,misc]  # known at run time only
        def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
            text = vllm_config.model_config.hf_config.text_config
            super().__init__(vllm_config=vllm_config.with_hf_config(text), prefix=prefix)

    TextOnly.__name__ = TextOnly.__qualname__ = f"TextOnly{base.__name__}"
    return TextOnly


def drop_shared_experts(layer: nn.Module, family: Family) -> None:
    """Frees the shared-expert modules that vLLM built: their weights are on the FFN instances.

    The loader skips these weights. If the modules stayed, vLLM would report their parameters as
    uninitialised and count them in its memory profile.
    """
    for path in family.shared:
        parent_path, _, name = path.rpartition(".")
        try:
            parent = layer.get_submodule(parent_path) if parent_path else layer
        except AttributeError:  # a dense layer has no MoE block
            continue
        if name in parent._modules:
            setattr(parent, name, None)
