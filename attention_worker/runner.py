"""What an attention instance adds to vLLM's model runner: micro-batches and the remote experts.

Everything hooks in by method override; vLLM keeps scheduling, KV cache, metadata and sampling
(vllm/v1/worker/gpu_model_runner.py, 0.26.0).
"""

import copy
import time
from typing import TYPE_CHECKING

import numpy as np
from vllm.sequence import IntermediateTensors
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from afd.schedule import choose_depth, padded_depth, reads_block_written_in_step
from attention_worker.session import AttentionSession, reported
from attention_worker.support import check_supported

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    _Base = GPUModelRunner
else:
    _Base = object


class DisaggregatedRunner(_Base):
    """Mixin over a vLLM model runner.

    The worker turns an existing runner into this class, so there is no ``__init__``:
    :meth:`load_model` is the first call vLLM makes on it.
    """

    def load_model(self, load_dummy_weights: bool = False) -> None:
        """Join the deployment, load the attention half, wait for the FFN instances."""
        with reported():
            check_supported(self.vllm_config)
            self._session = AttentionSession.join()
        self._scheduled: SchedulerOutput | None = None
        self._capture_depth: int | None = None
        super().load_model(load_dummy_weights)
        with reported():
            self._session.serve(self.get_model())
        # A private copy: vLLM re-validates the shared VllmConfig later and would refuse a
        # ubatch_size without data parallelism. With it, vLLM creates one attention metadata
        # builder per micro-batch (initialize_metadata_builders).
        self.parallel_config = copy.copy(self.parallel_config)
        self.parallel_config.ubatch_size = self._session.max_depth

    def profile_run(self) -> None:
        """vLLM's warm-up, which calls the FFN; then leave, or the others would wait for us."""
        super().profile_run()
        self.leave_epoch()

    def leave_epoch(self) -> None:
        """Nothing is coming: no other instance's step has to wait for this one."""
        self._session.remote.leave()
        self._session.steps.pause()

    def close_session(self) -> None:
        """Leave the deployment and free the transport."""
        self._session.close()

    def execute_model(
        self,
        scheduler_output: SchedulerOutput,
        intermediate_tensors: IntermediateTensors | None = None,
    ) -> ModelRunnerOutput | IntermediateTensors | None:
        """One engine step. One without tokens follows the last request's end: leave the epoch."""
        if scheduler_output.total_num_scheduled_tokens == 0:
            self.leave_epoch()
        self._scheduled = scheduler_output
        try:
            return super().execute_model(scheduler_output, intermediate_tensors)
        finally:
            self._scheduled = None

    def _determine_batch_execution_and_padding(
        self,
        num_tokens: int,
        num_reqs: int,
        num_scheduled_tokens_np: np.ndarray,
        max_num_scheduled_tokens: int,
        use_cascade_attn: bool,
        allow_microbatching: bool = True,
        force_eager: bool = False,
        force_uniform_decode: bool | None = None,
        force_has_lora: bool | None = None,
        force_num_active_loras: int | None = None,
        num_encoder_reqs: int = 0,
    ) -> tuple:
        """vLLM's decision, with our number of micro-batches in place of its data-parallel one."""
        mode, descriptor, _, across_dp, stats = super()._determine_batch_execution_and_padding(
            num_tokens,
            num_reqs,
            num_scheduled_tokens_np,
            max_num_scheduled_tokens,
            use_cascade_attn,
            allow_microbatching,
            force_eager,
            force_uniform_decode,
            force_has_lora,
            force_num_active_loras,
            num_encoder_reqs,
        )
        if self._scheduled is not None:
            decode = num_tokens == num_reqs
            depth = choose_depth(
                num_tokens,
                num_reqs,
                self._session.depth(num_tokens, decode=decode),
                self._session.min_rows,
                splittable=not self._prefix_hazard(self._scheduled),
            )
            depth = padded_depth(depth, num_tokens, descriptor.num_tokens)
            self._session.steps.begin(num_tokens, depth, time.monotonic(), decode=decode)
        elif self._capture_depth is not None:
            depth = self._capture_depth
        else:  # another dummy or profiling run: unsplit, builders still to be made
            return mode, descriptor, False, across_dp, stats
        self.parallel_config.ubatch_size = depth
        return mode, descriptor, depth > 1, across_dp, stats

    def _prefix_hazard(self, scheduled: SchedulerOutput) -> bool:
        """Whether a request of this step starts on prefix blocks that the same step fills."""
        starting = {r.req_id for r in scheduled.scheduled_new_reqs}
        starting |= scheduled.scheduled_cached_reqs.resumed_req_ids
        if not starting:
            return False
        prefixes: list[list[int]] = []
        written: list[list[int]] = []
        for group, table in enumerate(self.input_batch.block_table.block_tables):
            size = table.block_size
            for req_id, tokens in scheduled.num_scheduled_tokens.items():
                request = self.requests[req_id]
                blocks = request.block_ids[group]
                computed = request.num_computed_tokens
                written.append(blocks[computed // size : -(-(computed + tokens) // size)])
                if req_id in starting:
                    prefixes.append(blocks[: computed // size])
        return reads_block_written_in_step(prefixes, written)
