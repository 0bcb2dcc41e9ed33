"""What an attention instance adds to vLLM's first-generation model runner: micro-batches and the
remote experts.

It only overrides methods. Scheduling, KV cache, attention metadata and sampling stay vLLM's
(vllm/v1/worker/gpu_model_runner.py).
"""

import copy
from typing import Any

import numpy as np
from vllm.config import ParallelConfig
from vllm.sequence import IntermediateTensors
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from afd.schedule import reads_block_written_in_step
from attention_worker.vllm_hooks.instance_runner import InstanceRunner
from attention_worker.vllm_hooks.resume import restore, resumed_tokens


class DisaggregatedRunner(InstanceRunner):
    """Mixin for a first-generation runner of vLLM."""

    def load_model(self, load_dummy_weights: bool = False, **further: Any) -> None:
        self._capture_depth: int | None = None
        super().load_model(load_dummy_weights, **further)
        # With ubatch_size, vLLM makes one attention metadata builder per micro-batch
        # (initialize_metadata_builders). The copy is private, because vLLM validates the shared
        # VllmConfig again later and would refuse a ubatch_size without data parallelism.
        self.parallel_config: ParallelConfig = copy.copy(self.parallel_config)
        self.parallel_config.ubatch_size = self._instance.max_depth

    def _proposer(self) -> Any:
        return self.drafter

    def execute_model(
        self,
        scheduler_output: SchedulerOutput,
        intermediate_tensors: IntermediateTensors | None = None,
    ) -> ModelRunnerOutput | IntermediateTensors | None:
        """Runs one engine step."""
        with self._serving(scheduler_output):
            return super().execute_model(scheduler_output, intermediate_tensors)

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        """Also gives resumed requests the tokens that another instance generated, and notes the
        traced requests of the step."""
        deferred = super()._update_states(scheduler_output)
        for request in scheduler_output.scheduled_new_reqs:
            if tokens := resumed_tokens(request.sampling_params):
                restore(self, request.req_id, tokens)
        self._note_traced(scheduler_output)
        return deferred

    def _determine_batch_execution_and_padding(
        self,
        num_tokens: int,
        num_reqs: int,
        num_scheduled_tokens_np: np.ndarray,
        max_num_scheduled_tokens: int,
        *arguments: Any,
        **named: Any,
    ) -> tuple[Any, ...]:
        """Returns vLLM's decision with our number of micro-batches, instead of its own for data
        parallelism."""
        mode, descriptor, _, across_dp, stats = super()._determine_batch_execution_and_padding(
            num_tokens,
            num_reqs,
            num_scheduled_tokens_np,
            max_num_scheduled_tokens,
            *arguments,
            **named,
        )
        if self._scheduled is not None:
            depth = self._begin(
                num_tokens,
                num_reqs,
                descriptor.num_tokens,
                decode=max_num_scheduled_tokens <= self.uniform_decode_query_len,
                splittable=not (self._uses_adapters() or self._prefix_hazard(self._scheduled)),
            )
        elif self._capture_depth is not None:
            depth = self._capture_depth
        else:  # another dummy or profiling run: unsplit, its metadata builders do not exist yet
            return mode, descriptor, False, across_dp, stats
        self.parallel_config.ubatch_size = depth
        return mode, descriptor, depth > 1, across_dp, stats

    def _uses_adapters(self) -> bool:
        """Returns whether a request of the step has a LoRA adapter.

        vLLM's adapter layers look rows up by their place in the whole step, not in a micro-batch
        (vllm/lora/punica_wrapper/punica_base.py: token_lora_indices).
        """
        return bool(self.lora_config and self.input_batch.lora_id_to_lora_request)

    def _prefix_hazard(self, scheduled: SchedulerOutput) -> bool:
        """Returns whether a request starts on prefix blocks that the same step fills."""
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
