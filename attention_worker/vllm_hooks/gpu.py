"""GPU worker and runner of an attention instance, derived from vLLM's."""

import copy
import logging
import os
from contextlib import AbstractContextManager
from typing import Any

from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import BatchDescriptor
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import CompilationTimes

from afd.config.roles import load_role
from afd.devices import device_named
from afd.host.logs import say_phase
from attention_worker.instance import reported
from attention_worker.ranks import own_gpu_first
from attention_worker.vllm_hooks.gpu_runner import GpuInstanceRunner
from attention_worker.vllm_hooks.graphs import StepGraphs
from attention_worker.vllm_hooks.runner import DisaggregatedRunner
from attention_worker.vllm_hooks.store import file_store
from attention_worker.vllm_hooks.support import check_runner

logger = logging.getLogger("afd.attention")


class AfdGpuModelRunner(GpuInstanceRunner, DisaggregatedRunner, GPUModelRunner):
    """CUDA or ROCm runner of an attention instance, of vLLM's first generation."""

    def load_model(self, load_dummy_weights: bool = False, **further: Any) -> None:
        super().load_model(load_dummy_weights, **further)
        # Dummy runs, which include captures, read the number of micro-batches from this config.
        self.vllm_config: VllmConfig = copy.copy(self.vllm_config)
        self.vllm_config.parallel_config = self.parallel_config
        if self.compilation_config.cudagraph_mode.has_full_cudagraphs():
            stream, guard = self._instance.stream_form()
            self._guard = guard
            self.model = StepGraphs(
                self.get_model(), self.vllm_config, self._instance.remote, stream, guard
            )

    def _determine_batch_execution_and_padding(
        self, num_tokens: int, num_reqs: int, *arguments: Any, **named: Any
    ) -> tuple[Any, ...]:
        """Counts the steps that vLLM does not replay: a request has several rows, or the rows are
        more than the largest graph has."""
        decision = super()._determine_batch_execution_and_padding(
            num_tokens, num_reqs, *arguments, **named
        )
        serving = self._scheduled is not None and self._guard is not None
        if serving and decision[0] != CUDAGraphMode.FULL:
            self._instance.ran_eagerly("rows" if num_tokens == num_reqs else "prefill")
        return decision

    def _preprocess(self, *arguments: Any, **named: Any) -> tuple[Any, ...]:
        """The last call before vLLM sets the forward context of a step. Waits for the step before
        it: that may be running again in another thread, and the process has one context."""
        inputs: tuple[Any, ...] = super()._preprocess(*arguments, **named)
        if self._guard is not None:
            self._guard.wait_for_step()
        return inputs

    def initialize_metadata_builders(
        self, kv_cache_config: KVCacheConfig, kernel_block_sizes: list[int]
    ) -> None:
        """Makes vLLM's metadata builders, one per micro-batch, and turns one optimisation off.

        If KV-cache groups share a spec, vLLM 0.26 builds metadata once and swaps the block table
        (gpu_model_runner.py: cached_attn_metadata). Its cache key lacks the micro-batch, so the
        second micro-batch would get the query lengths of the first.
        """
        super().initialize_metadata_builders(kv_cache_config, kernel_block_sizes)
        for group in self.attn_groups:
            for attention in group:
                for builder in attention.metadata_builders:
                    builder.supports_update_block_table = False

    def _warmup_and_capture(
        self,
        desc: BatchDescriptor,
        cudagraph_runtime_mode: CUDAGraphMode,
        profile_seq_lens: int | None = None,
        allow_microbatching: bool = False,
        num_warmups: int | None = None,
        profiler: AbstractContextManager[object] | None = None,
    ) -> None:
        """Captures every shape at each depth that a step of that shape may have."""
        try:
            for depth in range(1, self._instance.max_depth + 1):
                # A step with an adapter is not split (runner.py: _uses_adapters).
                if depth > 1 and (
                    desc.num_active_loras or desc.num_tokens // depth < self._instance.min_rows
                ):
                    break
                self._capture_depth = depth
                super()._warmup_and_capture(
                    desc,
                    cudagraph_runtime_mode,
                    profile_seq_lens,
                    allow_microbatching,
                    num_warmups,
                    profiler,
                )
        finally:
            self._capture_depth = None
            self.parallel_config.ubatch_size = self._instance.max_depth


class AfdGpuWorker(Worker):
    """vLLM's CUDA/ROCm worker with the disaggregated model runner.

    The runner class is swapped on the instance, as in :mod:`attention_worker.vllm_hooks.cpu`
    (vllm/v1/worker/gpu_worker.py:412).
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        local_rank: int,
        rank: int,
        distributed_init_method: str,
        is_driver_worker: bool = False,
    ) -> None:
        if vllm_config.parallel_config.world_size > 1:
            device = device_named(load_role().deployment.attention.device)
            os.environ |= own_gpu_first(device.visible_variables, os.environ, local_rank)
            local_rank = 0
        super().__init__(vllm_config, local_rank, rank, distributed_init_method, is_driver_worker)

    def init_device(self) -> None:
        with reported():
            check_runner(self.vllm_config)
        self.distributed_init_method = file_store(self.rank, self.parallel_config.world_size)
        super().init_device()
        if self.use_v2_model_runner:
            # Late: its modules need Triton, which an environment may lack.
            from attention_worker.vllm_hooks.second_gpu import AfdGpuSecondRunner

            self.model_runner.__class__ = AfdGpuSecondRunner
        else:
            self.model_runner.__class__ = AfdGpuModelRunner

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Runs vLLM's warm-up and captures, which call the FFN; then goes idle."""
        full = self.model_runner.compilation_config.cudagraph_mode.has_full_cudagraphs()
        say_phase(logger, "capturing graphs" if full else "warming up")
        times = super().compile_or_warm_up_model()
        self.model_runner.go_idle()
        say_phase(logger, "finishing vLLM's start")
        return times

    def shutdown(self) -> None:
        self.model_runner.close_instance()
        super().shutdown()
