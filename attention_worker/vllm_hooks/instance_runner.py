"""What an attention instance adds to both of vLLM's model runners: joining, adapters, idle steps.

It only overrides methods. The first-generation runner is vllm/v1/worker/gpu_model_runner.py
(:mod:`attention_worker.vllm_hooks.runner`), the second-generation one
vllm/v1/worker/gpu/model_runner.py (:mod:`attention_worker.vllm_hooks.second_runner`). Arguments
that some versions have and others do not are passed on as they come.
"""

import time
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.output import SchedulerOutput

from afd.control.ending import exit_now
from afd.errors import AfdError
from afd.schedule import choose_depth, padded_depth
from attention_worker.instance import AttentionInstance, reported
from attention_worker.vllm_hooks.draft import DraftModel
from attention_worker.vllm_hooks.lora import attention_projections, check_adapter, unpacked
from attention_worker.vllm_hooks.ranks import ranks_of_group
from attention_worker.vllm_hooks.support import check_supported

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    _Base: TypeAlias = GPUModelRunner
else:
    _Base = object


class InstanceRunner(_Base):
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
        super().load_model(load_dummy_weights, **further)
        with reported():
            self._instance.serve(self.get_model(), self._draft_model())

    def _draft_model(self) -> DraftModel | None:
        """Returns the model of MTP layers, None if there are none."""
        config = self.speculative_config
        if config is None or config.method != "mtp":
            return None
        model = self._proposer().model
        assert isinstance(model, DraftModel)
        return model

    @abstractmethod
    def _proposer(self) -> Any:
        """Returns what makes drafts with a model. vLLM's runners name it differently."""

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

    @contextmanager
    def _serving(self, scheduler_output: SchedulerOutput) -> Iterator[None]:
        """Encloses an engine step. A step without tokens means that no request is left."""
        if scheduler_output.total_num_scheduled_tokens == 0:
            self.go_idle()
        self._scheduled = scheduler_output
        try:
            yield
        except AfdError as error:
            if self._instance.rank:  # vLLM hears of the errors of rank 0 only
                exit_now(str(error))
            raise
        finally:
            self._scheduled = None

    def _note_traced(self, scheduler_output: SchedulerOutput) -> None:
        """Notes the traced requests of the step."""
        if (traced := self._instance.requests) is None:
            return
        traced.finished(scheduler_output.finished_req_ids)
        for request in scheduler_output.scheduled_new_reqs:
            if request.sampling_params is not None:
                traced.began(request.req_id, request.sampling_params.extra_args)
        traced.step(scheduler_output.num_scheduled_tokens)

    def _begin(
        self, num_tokens: int, num_reqs: int, padded: int, *, decode: bool, splittable: bool
    ) -> int:
        """Begins the measurement of an engine step, and returns its number of micro-batches.

        Args:
            padded: rows of the step with padding to a captured size.
            decode: every request has one row, or one and its drafts.
            splittable: see :func:`afd.schedule.choose_depth`.
        """
        instance = self._instance
        largest = instance.depth(num_tokens, decode=decode)
        depth = choose_depth(
            num_tokens, num_reqs, largest, instance.min_rows, splittable=splittable
        )
        depth = padded_depth(depth, num_tokens, padded)
        instance.cores.use(lent=depth == 1 and not decode)
        instance.steps.begin(num_tokens, depth, time.monotonic(), decode=decode)
        return depth
