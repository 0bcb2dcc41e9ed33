"""What attention instances on GPUs add to both of vLLM's model runners."""

from concurrent.futures import Future
from typing import Any

from vllm.sequence import IntermediateTensors
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from attention_worker.instance import reported
from attention_worker.remote.replay_guard import ReplayGuard
from attention_worker.vllm_hooks.fused import fuse
from attention_worker.vllm_hooks.instance_runner import InstanceRunner


class GuardedOutput(AsyncModelRunnerOutput):
    """The sampled tokens of a step that may still run: released once its output is good."""

    def __init__(self, running: Future[None], output: AsyncModelRunnerOutput) -> None:
        self._running = running
        self._output = output

    def get_output(self) -> ModelRunnerOutput:
        self._running.result()
        return self._output.get_output()


class GpuInstanceRunner(InstanceRunner):
    """Mixin for a vLLM model runner on a GPU, in front of the one of its generation."""

    def load_model(self, load_dummy_weights: bool = False, **further: Any) -> None:
        self._guard: ReplayGuard | None = None  # of replayed steps; None: steps are not replayed
        super().load_model(load_dummy_weights, **further)
        with reported():
            family = self._instance.family
            halves = () if family.split else self.get_model().halves
            fuse(halves, family, self._instance.wanted_fusion)

    def sample_tokens(
        self, grammar_output: GrammarOutput | None
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput | IntermediateTensors | None:
        """Runs vLLM's sampling.

        If vLLM schedules asynchronously, sampling is only queued behind a step that still runs.
        Otherwise sampling would wait for the stream anyway, so the step is waited for first.
        """
        running = self._guard.running if self._guard is not None else None
        queued = self.scheduler_config.async_scheduling and grammar_output is None
        if running is not None and not queued:
            running.result()
        output = super().sample_tokens(grammar_output)
        if running is not None and isinstance(output, AsyncModelRunnerOutput):
            return GuardedOutput(running, output)
        return output

    def go_idle(self) -> None:
        if self._guard is not None:
            self._guard.wait_for_step()
        super().go_idle()
