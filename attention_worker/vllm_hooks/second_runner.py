"""What an attention instance adds to vLLM's second-generation model runner.

Scheduling, KV cache, attention metadata, sampling and graphs stay vLLM's
(vllm/v1/worker/gpu/model_runner.py). Resumed requests need nothing: that runner gets the tokens of
a new request with those that were generated, as of one that was preempted, and all of its sampling
depends on tokens and positions only.
"""

import logging
from typing import TYPE_CHECKING, Any, TypeAlias

from vllm.sequence import IntermediateTensors
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from attention_worker.vllm_hooks.cut_state import cutting
from attention_worker.vllm_hooks.instance_runner import InstanceRunner
from attention_worker.vllm_hooks.request_blocks import RequestBlocks
from attention_worker.vllm_hooks.second_dispatch import EagerManager

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    _Base: TypeAlias = GPUModelRunner
else:
    _Base = object

logger = logging.getLogger("afd.attention")


class SecondRunner(InstanceRunner, _Base):
    """Mixin for a second-generation runner of vLLM."""

    def load_model(self, load_dummy_weights: bool = False, **further: Any) -> None:
        logger.info("model runner: vLLM's second generation")
        super().load_model(load_dummy_weights, **further)
        self.model_state.__class__ = cutting(type(self.model_state))
        drafts = self.speculative_config is not None and self.speculative_config.method != "ngram"
        self.model_state.begin_cutting(self._instance.max_depth, drafts=drafts)

    def _proposer(self) -> Any:
        return self.speculator

    def initialize_kv_cache(
        self, kv_cache_config: KVCacheConfig, *arguments: Any, **named: Any
    ) -> None:
        """Also makes builders of attention metadata per micro-batch, and takes over the decisions
        about steps."""
        super().initialize_kv_cache(kv_cache_config, *arguments, **named)
        depth = self._instance.max_depth
        self.model_state.set_builders(self.attn_groups, self.kernel_block_sizes, depth)
        groups = self.kv_cache_config.kv_cache_groups
        self._blocks = RequestBlocks([group.kv_cache_spec.block_size for group in groups])
        self._take_dispatch()

    def _take_dispatch(self) -> None:
        manager = self.cudagraph_manager
        manager.__class__ = EagerManager
        assert isinstance(manager, EagerManager)
        manager.begin_dispatch(self.model_state, self._depth_of)

    def execute_model(
        self,
        scheduler_output: SchedulerOutput,
        intermediate_tensors: IntermediateTensors | None = None,
        dummy_run: bool = False,
        *arguments: Any,
        **named: Any,
    ) -> ModelRunnerOutput | IntermediateTensors | None:
        """Runs one engine step, or a dummy one."""
        if dummy_run:
            return super().execute_model(
                scheduler_output, intermediate_tensors, dummy_run, *arguments, **named
            )
        with self._serving(scheduler_output):
            return super().execute_model(
                scheduler_output, intermediate_tensors, dummy_run, *arguments, **named
            )

    def update_requests(self, scheduler_output: SchedulerOutput) -> None:
        """Called once per step, behind everything else that vLLM does with requests."""
        super().update_requests(scheduler_output)
        self._blocks.update(scheduler_output)
        self._note_traced(scheduler_output)

    def _depth_of(
        self,
        num_reqs: int,
        num_tokens: int,
        uniform_rows: int | None,
        decision: BatchExecutionDescriptor,
    ) -> int:
        """Returns the number of micro-batches of the next step; dummy steps have one."""
        scheduled = self._scheduled
        if scheduled is None:
            return 1
        # vLLM's adapter layers look rows up by their place in the whole step, not in a micro-batch
        # (vllm/lora/punica_wrapper/punica_base.py: token_lora_indices).
        splittable = not (decision.num_active_loras or self._blocks.prefix_hazard(scheduled))
        return self._begin(
            num_tokens,
            num_reqs,
            decision.num_tokens,
            decode=uniform_rows is not None and uniform_rows <= self.decode_query_len,
            splittable=splittable,
        )
