"""A vLLM weight loader that reads every tensor of a checkpoint except expert weights."""

import logging
import time
from collections.abc import Generator
from dataclasses import replace
from typing import cast

import torch
from torch import nn
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.platforms import current_platform

from afd.errors import ConfigError
from afd.host.load_progress import loading
from attention_worker.instance import AttentionModel
from attention_worker.stored_weights import AttentionTensors
from attention_worker.vllm_hooks.draft import SHARED_WEIGHTS, DraftModel

logger = logging.getLogger("afd.attention")

LOAD_FORMAT = "afd"
"""Value of vLLM's ``--load-format`` on attention instances."""


class AttentionWeightLoader(DefaultModelLoader):
    """Loads the attention half. Never reads the bytes of a routed or shared expert.

    ``bytes_read`` is the size of the tensors handed to the model, in bytes. It is exported as a
    metric; tests check that it and the counts of the FFN instances add up to the checkpoint.
    """

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        self.bytes_read = 0
        self._tensors: AttentionTensors | None = None

    def get_all_weights(
        self, model_config: ModelConfig, model: nn.Module
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yields names and tensors of the attention half, file by file."""
        self.counter_before_loading_weights = (
            time.perf_counter()
        )  # vLLM logs the load time from here
        tensors = AttentionTensors(
            model_config.model,
            decoding=current_platform.is_cpu(),
            drafts=isinstance(model, DraftModel),
        )
        if tensors.decoded:
            logger.info(
                "attention weights: %d in %s are decoded to %s at load, because the CPU has no "
                "kernel for them",
                tensors.decoded,
                tensors.formats,
                str(model_config.dtype).removeprefix("torch."),
            )
        self._tensors = tensors
        total = tensors.stored_bytes
        with loading("attention weights", logger) as show:
            for named in tensors:
                yield named
                show(tensors.bytes_read, total)
        self.bytes_read = tensors.bytes_read

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Fills the model. Raises ConfigError with the tensor and the file that do not fit.

        An EAGLE head is a checkpoint of its own without experts, which vLLM reads.
        """
        if model_config.runner == "draft" and not isinstance(model, DraftModel):
            whole = DefaultModelLoader(replace(self.load_config, load_format="auto"))
            whole.load_weights(model, model_config)
            return
        # A null key came from our command line; gpt-oss asks only whether there is one.
        if vars(model_config.hf_config).get("quantization_config", {}) is None:
            del model_config.hf_config.quantization_config
        try:
            super().load_weights(model, model_config)
        except ConfigError:
            raise
        except Exception as error:  # whatever the parameter's loader raises
            at = self._tensors.current if self._tensors else ""
            if not at:
                raise
            said = str(error).rstrip(".") or type(error).__name__
            raise ConfigError(
                f"vLLM cannot load {at} ({said}); use the config.json that belongs to these weights"
            ) from error
        counts = cast(AttentionModel, model)
        counts.weight_bytes_read = self.bytes_read
        # Counted here, because on CPU vLLM then moves the linear layers into packed copies.
        counts.weight_bytes_held = sum(
            parameter.nbytes
            for name, parameter in model.named_parameters()
            if not (isinstance(model, DraftModel) and name.endswith(SHARED_WEIGHTS))
        )
