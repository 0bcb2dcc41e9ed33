"""vLLM workers of an attention instance, named by ``--worker-cls``."""

from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import CompilationTimes

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

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """vLLM's warm-up and captures call the FFN; the others must not wait for us after it."""
        times = super().compile_or_warm_up_model()
        self.model_runner.leave_epoch()
        return times

    def shutdown(self) -> None:
        self.model_runner.close_session()
        super().shutdown()
