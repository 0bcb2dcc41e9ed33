"""GPU runner of an attention instance, derived from vLLM's second-generation one."""

from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from attention_worker.vllm_hooks.gpu_runner import GpuInstanceRunner
from attention_worker.vllm_hooks.second_graphs import GraphManager
from attention_worker.vllm_hooks.second_runner import SecondRunner


class AfdGpuSecondRunner(GpuInstanceRunner, SecondRunner, GPUModelRunner):
    """CUDA or ROCm runner of an attention instance, of vLLM's second generation."""

    def _take_dispatch(self) -> None:
        assert self.cudagraph_manager is not None
        if not self.cudagraph_manager.cudagraph_mode.has_full_cudagraphs():
            super()._take_dispatch()
            return
        instance = self._instance
        stream, self._guard = instance.stream_form()
        manager = self.cudagraph_manager
        manager.__class__ = GraphManager
        assert isinstance(manager, GraphManager)
        manager.begin_dispatch(self.model_state, self._depth_of)
        manager.begin_captures(
            self.get_model(),
            instance.remote,
            stream,
            self._guard,
            max_depth=instance.max_depth,
            min_rows=instance.min_rows,
        )

    def _depth_of(
        self,
        num_reqs: int,
        num_tokens: int,
        uniform_rows: int | None,
        decision: BatchExecutionDescriptor,
    ) -> int:
        """Also counts the steps that vLLM does not replay."""
        serving = self._scheduled is not None and self._guard is not None
        if serving and decision.cg_mode != CUDAGraphMode.FULL:
            self._instance.ran_eagerly("rows" if num_tokens == num_reqs else "prefill")
        return super()._depth_of(num_reqs, num_tokens, uniform_rows, decision)
