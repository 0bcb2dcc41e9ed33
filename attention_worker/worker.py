"""vLLM workers of an attention instance, named by ``--worker-cls``."""

from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from attention_worker.runner import AfdCpuModelRunner, AfdGpuModelRunner


class AfdCpuWorker(CPUWorker):
    """vLLM's CPU worker with the disaggregated model runner.

    The runner class is swapped on the instance: vLLM names it inside ``init_device``
    (vllm/v1/worker/cpu_worker.py:183), and building a second one would allocate every buffer twice.
    """

    def init_device(self) -> None:
        super().init_device()
        self.model_runner.__class__ = AfdCpuModelRunner

    def shutdown(self) -> None:
        self.model_runner.close_session()
        super().shutdown()


class AfdGpuWorker(Worker):
    """vLLM's CUDA/ROCm worker with the disaggregated model runner (gpu_worker.py:412)."""

    def init_device(self) -> None:
        super().init_device()
        self.model_runner.__class__ = AfdGpuModelRunner

    def shutdown(self) -> None:
        self.model_runner.close_session()
        super().shutdown()
