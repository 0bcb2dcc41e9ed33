"""vLLM's GPU worker and runner as an attention instance's; named by ``--worker-cls``."""

import copy
from contextlib import AbstractContextManager

from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor
from vllm.sequence import IntermediateTensors
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import CompilationTimes

from attention_worker.graphs import Running, StepGraphs
from attention_worker.runner import DisaggregatedRunner


class SettledOutput(AsyncModelRunnerOutput):
    """Sampled tokens of a step that the host went on from: none before it is known to be good."""

    def __init__(self, running: Running, output: AsyncModelRunnerOutput) -> None:
        self._running = running
        self._output = output

    def get_output(self) -> ModelRunnerOutput:
        self._running.settle()
        return self._output.get_output()


class AfdGpuModelRunner(DisaggregatedRunner, GPUModelRunner):
    """CUDA or ROCm runner of an attention instance."""

    def load_model(self, load_dummy_weights: bool = False) -> None:
        super().load_model(load_dummy_weights)
        self._graphs: StepGraphs | None = None
        # Dummy runs, and so captures, read the number of micro-batches from here.
        self.vllm_config = copy.copy(self.vllm_config)
        self.vllm_config.parallel_config = self.parallel_config
        if self.compilation_config.cudagraph_mode.has_full_cudagraphs():
            self.model = self._graphs = self._session.graphs(self.get_model(), self.vllm_config)

    def sample_tokens(
        self, grammar_output: GrammarOutput | None
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput | IntermediateTensors:
        """vLLM's sampling. Of a step that may still run it is only launched, if vLLM schedules
        asynchronously; else sampling waits for the stream, and so we do it first."""
        running = self._graphs.running if self._graphs is not None else None
        if running is not None and not (self.use_async_scheduling and grammar_output is None):
            running.settle()
        output = super().sample_tokens(grammar_output)
        if running is not None and isinstance(output, AsyncModelRunnerOutput):
            return SettledOutput(running, output)
        return output

    def leave_epoch(self) -> None:
        if self._graphs is not None:
            self._graphs.settle()
        super().leave_epoch()

    def initialize_metadata_builders(
        self, kv_cache_config: KVCacheConfig, kernel_block_sizes: list[int]
    ) -> None:
        """vLLM's builders, one per micro-batch, without a shortcut that mixes micro-batches up.

        Where KV-cache groups share a spec, vLLM 0.26 builds metadata once and exchanges the block
        table (gpu_model_runner.py: cached_attn_metadata). Its key does not name the micro-batch, so
        the second one would get the query lengths of the first.
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
        """Every shape at each depth that its steps may run at."""
        try:
            for depth in range(1, self._session.max_depth + 1):
                if depth > 1 and desc.num_tokens // depth < self._session.min_rows:
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
            self.parallel_config.ubatch_size = self._session.max_depth


class AfdGpuWorker(Worker):
    """vLLM's CUDA/ROCm worker with the disaggregated model runner (gpu_worker.py:412)."""

    def init_device(self) -> None:
        super().init_device()
        self.model_runner.__class__ = AfdGpuModelRunner

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """vLLM's warm-up and captures call the FFN; the others must not wait for us after it."""
        times = super().compile_or_warm_up_model()
        self.model_runner.leave_epoch()
        return times

    def shutdown(self) -> None:
        self.model_runner.close_session()
        super().shutdown()
