"""vLLM weight loader that reads every tensor of a checkpoint except the experts'."""

import time
from collections.abc import Generator

import torch
from safetensors import safe_open
from torch import nn
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from afd.checkpoint import tensor_table
from afd.models import read_model

LOAD_FORMAT = "afd"
"""Value of vLLM's ``--load-format`` on attention instances."""


class AttentionWeightLoader(DefaultModelLoader):
    """Never touches the bytes of a routed or shared expert.

    ``bytes_read`` is what the tensors handed to the model amounted to; the worker exports it, and
    the tests check that it and the FFN instances' counts add up to the checkpoint.
    """

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        self.bytes_read = 0

    def get_all_weights(
        self, model_config: ModelConfig, model: nn.Module
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Names and tensors of the attention half, file by file."""
        self.counter_before_loading_weights = time.perf_counter()  # vLLM logs the time from here
        family, _ = read_model(model_config.model)
        by_file: dict[str, list[str]] = {}
        for name, info in tensor_table(model_config.model).items():
            if not family.is_expert_weight(name):
                by_file.setdefault(str(info.file), []).append(name)
        for file, names in by_file.items():
            with safe_open(file, framework="pt") as shard:
                for name in names:
                    tensor = shard.get_tensor(name)
                    self.bytes_read += tensor.nbytes
                    yield name, tensor

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        super().load_weights(model, model_config)
        model.weight_bytes_read = self.bytes_read
        # Counted here: on CPU vLLM then moves the linear layers into packed copies of its own.
        model.weight_bytes_held = sum(p.nbytes for p in model.parameters())
