"""CPU worker and runner of an attention instance, derived from vLLM's.

Kept apart from the GPU ones, because importing vLLM's CPU worker replaces torch's CUDA streams with
stubs (vllm/v1/worker/cpu/shm.py).
"""

import os
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import SamplerOutput
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from afd.config.roles import load_role
from afd.host.affinity import bind_process
from afd.host.amx_torch import ask_for_amx
from attention_worker.instance import reported
from attention_worker.ranks import cores_of_rank
from attention_worker.vllm_hooks.cpu_runner import CpuInstanceRunner
from attention_worker.vllm_hooks.draft_kernels import put_draft_kernels
from attention_worker.vllm_hooks.runner import DisaggregatedRunner
from attention_worker.vllm_hooks.store import file_store
from attention_worker.vllm_hooks.support import check_runner
from attention_worker.vllm_hooks.versions import layout


class AfdCpuModelRunner(CpuInstanceRunner, DisaggregatedRunner, CPUModelRunner):
    """CPU runner of an attention instance, of vLLM's first generation. Fixes requests with a seed
    and a chunked prompt.

    A request with a seed draws random numbers in every step, also in the steps that prefill a chunk
    of its prompt. vLLM then rewinds the generator by its offset, but CPU generators have none: vLLM
    raises, and the engine ends (gpu_model_runner.py: _bookkeeping_sync). This class restores the
    state of the generator instead, so a seed gives the same tokens however the prompt is chunked.
    """

    def _sample(
        self, logits: torch.Tensor | None, spec_decode_metadata: SpecDecodeMetadata | None
    ) -> SamplerOutput:
        generators = self.input_batch.generators
        kept = [(g, g.get_state()) for i, g in generators.items() if self._still_prefilling(i)]
        output = super()._sample(logits, spec_decode_metadata)
        for generator, state in kept:
            generator.set_state(state)
        return output

    def _bookkeeping_sync(
        self,
        scheduler_output: SchedulerOutput,
        sampler_output: SamplerOutput,
        logits: torch.Tensor | None,
        hidden_states: torch.Tensor,
        num_scheduled_tokens: int,
    ) -> tuple[Any, ...]:
        generators = self.input_batch.generators
        self.input_batch.generators = {
            i: g for i, g in generators.items() if not self._still_prefilling(i)
        }
        try:
            result: tuple[Any, ...] = super()._bookkeeping_sync(
                scheduler_output, sampler_output, logits, hidden_states, num_scheduled_tokens
            )
            return result
        finally:
            self.input_batch.generators = generators

    def _still_prefilling(self, request: int) -> bool:
        """Returns whether vLLM discards this step's token of the request with this batch index."""
        return bool(self.discard_request_mask.np[request])


class AfdCpuWorker(CPUWorker):
    """vLLM's CPU worker with the disaggregated model runner, bound to the instance's cores.

    vLLM binds CPU workers through the OpenMP environment of the processes that its "mp" executor
    starts. With "uni" it ignores VLLM_CPU_OMP_THREADS_BIND (vllm/utils/ompmultiprocessing.py).
    Unbound, the threads of attention would take the cores of FFN instances. vLLM's HTTP process
    stays unbound.

    The runner class is swapped on the instance: vLLM hard-codes it inside ``init_device``
    (vllm/v1/worker/cpu_worker.py:183), and a second runner would allocate every buffer twice.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        local_rank: int,
        rank: int,
        distributed_init_method: str,
        is_driver_worker: bool = False,
    ) -> None:
        with reported():  # first: vLLM allocates on the NUMA node of the first allowed core
            ranks = vllm_config.parallel_config.world_size
            bind_process(cores_of_rank(load_role().cpus, rank, ranks), "attention.cpus")
        super().__init__(vllm_config, local_rank, rank, distributed_init_method, is_driver_worker)

    def init_device(self) -> None:
        with reported():
            check_runner(self.vllm_config)
        self.distributed_init_method = file_store(self.rank, self.parallel_config.world_size)
        # vLLM's attention kernel uses AMX and does not ask. oneDNN does, but not in a step of
        # one row: a first prompt of one token ended the engine.
        ask_for_amx()
        super().init_device()
        if self.use_v2_model_runner:
            # Late: its modules need Triton.
            from attention_worker.vllm_hooks.second_cpu import AfdCpuSecondRunner

            self.model_runner.__class__ = AfdCpuSecondRunner
        else:
            self.model_runner.__class__ = AfdCpuModelRunner
        if layout().cpu_draft_kernels_missing:
            put_draft_kernels()

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        before = os.sched_getaffinity(0)
        super().initialize_from_config(kv_cache_config)
        # NixlConnector binds this thread to the last core of each NUMA node
        # (nixl/base_worker.py: rsv_cores_for_kv).
        os.sched_setaffinity(0, before)

    def shutdown(self) -> None:
        self.model_runner.close_instance()
        super().shutdown()
