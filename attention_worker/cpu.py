"""vLLM's CPU worker and runner as an attention instance's; named by ``--worker-cls``.

Apart from the GPU ones: importing vLLM's CPU worker replaces torch's CUDA streams by stand-ins
(vllm/v1/worker/cpu/shm.py).
"""

import torch
from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import SamplerOutput
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from afd.affinity import bind_process
from afd.roles import load_role
from attention_worker.runner import DisaggregatedRunner
from attention_worker.session import reported


class AfdCpuModelRunner(DisaggregatedRunner, CPUModelRunner):
    """CPU runner of an attention instance.

    A request with a seed draws random numbers in every step, also while its prompt is still read in
    chunks. vLLM takes those back by the generator's offset, which CPU generators do not have: it
    raises, and the engine ends (gpu_model_runner.py: _bookkeeping_sync). Here they are taken back
    by the generator's state, so that a seed gives the same answer however the prompt is cut.
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
    ) -> tuple:
        generators = self.input_batch.generators
        self.input_batch.generators = {
            i: g for i, g in generators.items() if not self._still_prefilling(i)
        }
        try:
            return super()._bookkeeping_sync(
                scheduler_output, sampler_output, logits, hidden_states, num_scheduled_tokens
            )
        finally:
            self.input_batch.generators = generators

    def _still_prefilling(self, request: int) -> bool:
        """Whether vLLM throws this step's token of the request (its index in the batch) away."""
        return bool(self.discard_request_mask.np[request])


class AfdCpuWorker(CPUWorker):
    """vLLM's CPU worker with the disaggregated model runner, bound to the instance's cores.

    vLLM binds CPU workers through the OpenMP environment of the processes that its "mp" executor
    starts; under "uni" it does not read VLLM_CPU_OMP_THREADS_BIND at all
    (vllm/utils/ompmultiprocessing.py). Unbound, attention's threads push FFN instances off theirs.
    The HTTP process above this one stays unbound.

    The runner class is swapped on the instance: vLLM names it inside ``init_device``
    (vllm/v1/worker/cpu_worker.py:183), and building a second one would allocate every buffer twice.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        local_rank: int,
        rank: int,
        distributed_init_method: str,
        is_driver_worker: bool = False,
    ) -> None:
        with reported():  # first: vLLM takes memory on the NUMA node of the first core allowed
            bind_process(load_role().cpus, "attention.cpus")
        super().__init__(vllm_config, local_rank, rank, distributed_init_method, is_driver_worker)

    def init_device(self) -> None:
        super().init_device()
        self.model_runner.__class__ = AfdCpuModelRunner

    def shutdown(self) -> None:
        self.model_runner.close_session()
        super().shutdown()
