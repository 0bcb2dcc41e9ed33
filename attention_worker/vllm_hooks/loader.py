"""A vLLM weight loader that reads every tensor of a checkpoint except expert weights."""

import time
from collections.abc import Generator
from typing import cast

import torch
from safetensors import safe_open
from torch import nn
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from afd.models import read_model
from afd.models.checkpoint import tensor_table
from attention_worker.instance import AttentionModel

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

    def get_all_weights(
        self, model_config: ModelConfig, model: nn.Module
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Yields names and tensors of the attention half, file by file."""
        self.counter_before_loading_weights = (
            time.perf_counter()
        )  # vLLM logs the load time from here
        family, described = read_model(model_config.model)
        by_file: dict[str, list[tuple[str, str]]] = {}
        for name, info in tensor_table(model_config.model).items():
            wanted = family.attention_name(described.architecture, name)
            if wanted is not None:
                by_file.setdefault(str(info.file), []).append((name, wanted))
        for file, names in by_file.items():
            with safe_open(file, framework="pt") as shard:
                for name, wanted in names:
                    tensor = shard.get_tensor(name)
                    self.bytes_read += tensor.nbytes
                    yield wanted, tensor

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        super().load_weights(model, model_config)
        counts = cast(AttentionModel, model)
        counts.weight_bytes_read = self.bytes_read
        # Counted here, because on CPU vLLM then moves the linear layers into packed copies.
        counts.weight_bytes_held = sum(p.nbytes for p in model.parameters())
