"""Goes on with a request of another instance: with the tokens that it has generated there.

The gateway sends the request again with these tokens in ``vllm_xargs`` (afd_gateway/replay.py). An
instance then does what vLLM does for a request that its scheduler has preempted: it computes prompt
and tokens again and samples the next one. Every part that has a state gets the tokens too:

- the API server's detokenizer, so that stop strings and split characters are seen; it also repeats
  the tokens to the parsers of tool calls and reasoning (:class:`ResumingOutputProcessor`);
- the scheduler's request and the grammar of structured output (:class:`ResumedRequest`,
  :class:`ResumingStructuredOutput`);
- the model runner: penalties, ``min_tokens``, bad words, the generator of a seed
  (:func:`restore`).

vLLM has no registry for the first two, so :func:`install` puts subclasses in place of its classes
(vllm 0.26.0).
"""

import copy
import json
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.exceptions import VLLMValidationError
from vllm.logprobs import Logprob
from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreRequest, async_llm, core
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from attention_worker.running_requests import ENGINE_DIED
from attention_worker.vllm_hooks.versions import layout

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import BlockHash
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

logger = logging.getLogger("afd.attention")

LAST_WORDS_S = 0.5  # for the errors of the requests to be sent
RESUME = "afd_resume"
"""Key in ``vllm_xargs``. Also in afd_gateway/replay.py."""


def install(vocab_size: int) -> None:
    """Makes vLLM resume requests. vocab_size: token ids beyond it are refused."""

    class OutputProcessor(ResumingOutputProcessor):
        vocabulary = vocab_size

    async_llm.OutputProcessor = OutputProcessor
    core.Request = ResumedRequest
    core.StructuredOutputManager = ResumingStructuredOutput


@dataclass(frozen=True)
class Resumed:
    """What was generated of one choice.

    Args:
        tokens: all of them.
        finished: the choice has ended; it is only resumed to be counted.
        stepwise: repeat the tokens one by one, as parsers got them the first time.
    """

    tokens: list[int]
    finished: bool
    stepwise: bool


def read_resumed(told: object, choice: int, *, vocab_size: int, max_tokens: int) -> Resumed | None:
    """Returns what the gateway says of a choice; None: it has no token yet.

    Raises VLLMValidationError, which vLLM answers with status 400, if it cannot be: such a request
    would end the engine.
    """
    if not isinstance(told, str):
        raise VLLMValidationError(f"vllm_xargs.{RESUME} is for the gateway only; remove it")
    try:
        fields = json.loads(told)
        tokens, finished = fields["choices"].get(str(choice), ([], False))
        stepwise = bool(fields["stepwise"])
        valid = all(type(token) is int and 0 <= token < vocab_size for token in tokens)
    except (ValueError, KeyError, TypeError, AttributeError):
        valid = False
    if not valid or len(tokens) > max_tokens - (not finished):
        raise VLLMValidationError(f"vllm_xargs.{RESUME} is for the gateway only; remove it")
    return Resumed(tokens, bool(finished), stepwise) if tokens else None


def resumed_tokens(params: SamplingParams | None) -> list[int]:
    """Returns the tokens with which the engine resumes a request, [] for others."""
    if params is None or not params.extra_args:
        return []
    tokens: list[int] = params.extra_args.get(RESUME, [])
    return tokens


# -- API server


class Backlog(RequestOutputCollector):
    """A collector that first gives the repeated outputs, one by one."""

    backlog: deque[RequestOutput]

    @classmethod
    def of(cls, queue: RequestOutputCollector) -> "Backlog":
        """Returns ``queue``, which the caller of vLLM holds already, as a Backlog."""
        if not isinstance(queue, cls):
            queue.__class__ = cls
            assert isinstance(queue, cls)
            queue.backlog = deque()
        return queue

    def get_nowait(self) -> RequestOutput | PoolingRequestOutput | None:
        return self.backlog.popleft() if self.backlog else super().get_nowait()

    async def get(self) -> RequestOutput | PoolingRequestOutput:
        return self.backlog.popleft() if self.backlog else await super().get()


class ResumingOutputProcessor(OutputProcessor):
    """Repeats the outputs of the tokens so far, and sends the engine on behind them."""

    vocabulary: int

    def add_request(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        parent_req: ParentRequest | None = None,
        request_index: int = 0,
        queue: RequestOutputCollector | None = None,
    ) -> None:
        params = request.sampling_params
        if params is None or not params.extra_args or RESUME not in params.extra_args:
            super().add_request(request, prompt, parent_req, request_index, queue)
            return
        choices = 1 if parent_req is None else parent_req.n
        choice = _prompt_index(request.external_req_id) * choices + request_index
        assert params.max_tokens is not None
        resumed = read_resumed(
            params.extra_args[RESUME],
            choice,
            vocab_size=self.vocabulary,
            max_tokens=params.max_tokens,
        )
        if queue is None or params.output_kind is not RequestOutputKind.DELTA:
            raise VLLMValidationError(f"vllm_xargs.{RESUME} needs a streamed answer")
        tokens = [] if resumed is None else resumed.tokens
        own = request.sampling_params = copy.copy(params)  # params are shared by all choices
        if resumed is not None and resumed.finished:
            own.max_tokens = len(tokens)  # one more token ends it, and the usage is right
            tokens = tokens[:-1]
        own.extra_args = {**params.extra_args, RESUME: tokens}
        super().add_request(request, prompt, parent_req, request_index, queue)
        if resumed is not None and tokens:
            # The engine gives those of a prompt only together with the first token behind it.
            own.prompt_logprobs = None
            self._repeat(request.request_id, tokens, Backlog.of(queue), resumed.stepwise)

    def propagate_error(self, e: Exception) -> None:
        """Fails all requests. If the engine has died, also ends this process, to be restarted.

        vLLM's own watchdog looks every 5 s, and then waits for open connections.
        """
        super().propagate_error(e)
        if isinstance(e, EngineDeadError):
            logger.error("the engine has died; ending its API server")
            threading.Timer(LAST_WORDS_S, os._exit, (ENGINE_DIED,)).start()

    def _repeat(self, request_id: str, tokens: list[int], queue: Backlog, stepwise: bool) -> None:
        state = self.request_states[request_id]
        assert state.detokenizer is not None and state.logprobs_processor is not None
        if state.logprobs_processor.prompt_logprobs is not None:  # only their number counts, too
            prompt = state.prompt_token_ids or []
            state.logprobs_processor.prompt_logprobs = [None, *map(_any_logprob, prompt[1:])]
        for group in [[token] for token in tokens] if stepwise else [tokens]:
            state.detokenizer.update(group, False)
            logprobs = state.logprobs_processor.logprobs
            if logprobs is not None:  # their values were sent; only their number counts
                logprobs.extend(map(_any_logprob, group))
            output = state.make_request_output(group, None, None, None)
            if isinstance(output, RequestOutput):
                queue.backlog.append(output)


def _any_logprob(token: int) -> dict[int, Logprob]:
    return {token: Logprob(0.0, 1)}


def _prompt_index(request_id: str | None) -> int:
    """Returns which prompt of a request this is: completions may have several."""
    if request_id is None or not request_id.startswith("cmpl-"):
        return 0
    return int(request_id.rpartition("-")[2])


# -- engine


class ResumedRequest(Request):
    """A request that may come with output tokens, as one that was preempted."""

    @classmethod
    def from_engine_core_request(
        cls,
        request: EngineCoreRequest,
        block_hasher: Callable[[Request], "list[BlockHash]"] | None,
    ) -> Request:
        made = super().from_engine_core_request(request, block_hasher)
        if tokens := resumed_tokens(request.sampling_params):
            made.append_output_token_ids(list(tokens))
            # For statistics of the prompt, vLLM asserts that only a part of the prompt is cached.
            made.prefill_stats = None
        return made


class ResumingStructuredOutput(StructuredOutputManager):
    """Makes grammars that have accepted the tokens so far."""

    def _create_grammar(self, request: Request) -> StructuredOutputGrammar:
        grammar: StructuredOutputGrammar = super()._create_grammar(request)
        tokens = self._behind_reasoning(request, list(request.output_token_ids))
        if tokens and not grammar.accept_tokens(request.request_id, tokens):
            raise ValueError("the grammar does not accept the tokens so far")
        return grammar

    def _behind_reasoning(self, request: Request, tokens: Sequence[int]) -> list[int]:
        """Returns the tokens that the grammar sees: those behind the end of the reasoning."""
        reasoner = self._get_reasoner(request)
        wanted = request.structured_output_request
        if reasoner is None or self.enable_in_reasoning or wanted is None:
            return list(tokens)
        seen = list(request.prompt_token_ids or [])
        if wanted.reasoning_ended is None:
            wanted.reasoning_ended = reasoner.is_reasoning_end(seen)
        if wanted.reasoning_ended:
            return list(tokens)
        for position, token in enumerate(tokens):
            seen.append(token)
            if reasoner.is_reasoning_end_streaming(seen, [token]):
                wanted.reasoning_ended = True
                return list(tokens[position + 1 :])
        return []


def restore(runner: "GPUModelRunner", request_id: str, tokens: list[int]) -> None:
    """Gives a request that was just added to the runner's batch its output tokens."""
    state, batch = runner.requests[request_id], runner.input_batch
    row, start = batch.req_id_to_index[request_id], state.num_prompt_tokens
    state.output_token_ids.extend(tokens)  # the batch and its logits processors share this list
    batch.token_ids_cpu[row, start : start + len(tokens)] = tokens
    batch.is_token_ids[row, start : start + len(tokens)] = True
    batch.num_tokens_no_spec[row] = state.num_tokens
    if state.generator is not None:
        _draw(state.generator, len(tokens), batch.vocab_size)


def _draw(generator: torch.Generator, tokens: int, vocab_size: int) -> None:
    """Draws what the sampler has drawn for these tokens (topk_topp_sampler.py)."""
    if generator.device.type == "cpu" and layout().cpu_seed_draws_integer:
        torch.randint(0, 2**31, (tokens,), generator=generator, dtype=torch.long)
        return
    drawn: Any = torch.empty(vocab_size, device=generator.device)
    for _ in range(tokens):
        drawn.exponential_(generator=generator)
