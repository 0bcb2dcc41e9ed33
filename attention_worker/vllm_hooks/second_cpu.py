"""CPU runner of an attention instance, derived from vLLM's second-generation one.

vLLM offers it on CPUs only with a Triton that has a backend for them, which PyPI has not. Tests run
it on Triton's interpreter.
"""

from vllm.v1.worker.cpu.model_runner import CPUModelRunner

from attention_worker.vllm_hooks.cpu_runner import CpuInstanceRunner
from attention_worker.vllm_hooks.second_runner import SecondRunner


class AfdCpuSecondRunner(CpuInstanceRunner, SecondRunner, CPUModelRunner):
    """CPU runner of an attention instance, of vLLM's second generation."""
