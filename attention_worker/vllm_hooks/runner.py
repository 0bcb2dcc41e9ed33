"""What an attention instance adds to vLLM's model runner: micro-batches and the remote experts.

It only overrides methods. Scheduling, KV cache, attention metadata and sampling stay vLLM's
(vllm/v1/worker/gpu_model_runner.py). Arguments that some versions have and others do not are passed
on as they come.
"""

import copy
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import torch
from torch import nn
from vllm.config import ParallelConfig, VllmConfig
from vllm.lora.request import LoRARequest
from vllm.sequence import IntermediateTensors
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from afd.control.ending import exit_now
from afd.errors import AfdError
from afd.schedule import choose_depth, padded_depth, reads_block_written_in_step
from attention_worker.instance import AttentionInstance, reported
from attention_worker.vllm_hooks.draft import DraftModel
from attention_worker.vllm_hooks.lora import attention_projections, check_adapter, unpacked
from attention_worker.vllm_hooks.ranks import ranks_of_group
from attention_worker.vllm_hooks.resume import restore, resumed_tokens
from attention_worker.vllm_hooks.support import check_supported

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    _Base: TypeAlias = GPUModelRunner
else:
    _Base = object


class DisaggregatedRunner(_Base):
    """Mixin for a vLLM model runner.

    The worker changes the class of an existing runner, so ``__init__`` never runs.
    :meth:`load_model` is the first call that vLLM makes on the result.
    """

    def load_model(self, load_dummy_weights: bool = False, **further: Any) -> None:
        """Joins the deployment, loads the attention half, and waits for the FFN instances."""
        with reported():
            check_supported(self.vllm_config)
            self._instance = AttentionInstance.join(ranks_of_group())
        self._scheduled: SchedulerOutput | None = None
        self._capture_depth: int | None = None
        super().load_model(load_dummy_weights, **further)
        with reported():
            self._instance.serve(self.get_model(), self._draft_model())
        # With ubatch_size, vLLM makes one attention metadata builder per micro-batch
        # (initialize_metadata_builders). The copy is private, because vLLM validates the shared
        # VllmConfig again later and would refuse a ubatch_size without data parallelism.
        self.parallel_config: ParallelConfig = copy.copy(self.parallel_config)
        self.parallel_config.ubatch_size = self._instance.max_depth

    def _draft_model(self) -> DraftModel | None:
        config = self.speculative_config
        if config is None or config.method != "mtp":
            return None
        model = self.drafter.model
        assert isinstance(model, DraftModel)
        return model

    def load_lora_model(
        self, model: nn.Module, vllm_config: VllmConfig, device: torch.device
    ) -> nn.Module:
        """Makes vLLM's adapter layers, in attention only. Called by :meth:`load_model`."""
        names = attention_projections(model, self._instance.family)
        self.lora_config.target_modules = names
        loaded: nn.Module = super().load_lora_model(model, vllm_config, device)
        packed = cast("dict[str, list[str]]", loaded.packed_modules_mapping)
        self._adapter_modules = unpacked(packed, names)
        return loaded

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Loads an adapter. Raises ConfigError if it changes more than attention."""
        with reported():
            check_adapter(
                lora_request.lora_name, Path(lora_request.lora_path), self._adapter_modules
            )
        added: bool = super().add_lora(lora_request)
        return added

    def profile_run(self, *arguments: Any, **named: Any) -> None:
        """Runs vLLM's warm-up, which calls the FFN; then goes idle."""
        super().profile_run(*arguments, **named)
        self.go_idle()

    def go_idle(self) -> None:
        """Tells the FFN instances that no step follows, so that no other instance waits for this
        one."""
        self._instance.remote.leave()
        self._instance.steps.pause()

    def close_instance(self) -> None:
        """Leaves the deployment and frees the transport."""
        self._instance.close()

    def execute_model(
        self,
        scheduler_output: SchedulerOutput,
        intermediate_tensors: IntermediateTensors | None = None,
    ) -> ModelRunnerOutput | IntermediateTensors | None:
        """Runs one engine step. A step without tokens means that no request is left."""
        if scheduler_output.total_num_scheduled_tokens == 0:
            self.go_idle()
        self._scheduled = scheduler_output
        try:
            return super().execute_model(scheduler_output, intermediate_tensors)
        except AfdError as error:
            if self._instance.rank:  # vLLM hears of the errors of rank 0 only
                exit_now(str(error))
            raise
        finally:
            self._scheduled = None

    def _update_states(self, scheduler_output: SchedulerOutput) -> Any:
        """Also gives resumed requests the tokens that another instance generated, and notes the
        traced requests of the step."""
        deferred = super()._update_states(scheduler_output)
        for request in scheduler_output.scheduled_new_reqs:
            if tokens := resumed_tokens(request.sampling_params):
                restore(self, request.req_id, tokens)
        if (traced := self._instance.requests) is not None:
            traced.finished(scheduler_output.finished_req_ids)
            for request in scheduler_output.scheduled_new_reqs:
                if request.sampling_params is not None:
                    traced.began(request.req_id, request.sampling_params.extra_args)
            traced.step(scheduler_output.num_scheduled_tokens)
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
            decode = max_num_scheduled_tokens <= self.uniform_decode_query_len
            depth = choose_depth(
                num_tokens,
                num_reqs,
                self._instance.depth(num_tokens, decode=decode),
                self._instance.min_rows,
                splittable=not (self._uses_adapters() or self._prefix_hazard(self._scheduled)),
            )
            depth = padded_depth(depth, num_tokens, descriptor.num_tokens)
            self._instance.steps.begin(num_tokens, depth, time.monotonic(), decode=decode)
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
