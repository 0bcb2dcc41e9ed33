"""Resumed requests: vLLM's own parts get the tokens that another instance has generated."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from transformers import AutoTokenizer
from vllm.exceptions import VLLMValidationError
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

from attention_worker.running_requests import ENGINE_DIED
from attention_worker.vllm_hooks import resume
from attention_worker.vllm_hooks.resume import (
    RESUME,
    ResumedRequest,
    ResumingOutputProcessor,
    ResumingStructuredOutput,
    read_resumed,
    restore,
    resumed_tokens,
)

PROMPT = [20, 21, 22]


class Processor(ResumingOutputProcessor):
    vocabulary = 2000


@pytest.fixture(scope="module")
def tokenizer(tiny_models: object) -> object:
    folder: Path = tiny_models("qwen3_moe")  # type: ignore[operator]
    return AutoTokenizer.from_pretrained(folder)


def told(choices: dict[str, list[object]], *, stepwise: bool = False) -> str:
    return json.dumps({"stepwise": stepwise, "choices": choices})


def request_of(name: str, told: str | None, **params: object) -> EngineCoreRequest:
    made = SamplingParams(
        **{"max_tokens": 12, "output_kind": RequestOutputKind.DELTA, **params},  # type: ignore[arg-type]
        extra_args=None if told is None else {RESUME: told},
    )
    return EngineCoreRequest(
        request_id=f"{name}-x",
        prompt_token_ids=list(PROMPT),
        mm_features=None,
        sampling_params=made,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
        external_req_id=name,
    )


def outputs_of(queue: RequestOutputCollector) -> list[tuple[list[int], str]]:
    """Returns what the API server would get: (tokens, text) of each output."""
    found = []
    while (output := queue.get_nowait()) is not None:
        (choice,) = output.outputs
        found.append((list(choice.token_ids), choice.text))
    return found


def play(processor: OutputProcessor, queue: RequestOutputCollector, tokens: list[int]) -> list:
    found = outputs_of(queue)
    for place, token in enumerate(tokens):
        last = FinishReason.LENGTH if place == len(tokens) - 1 else None
        processor.process_outputs([EngineCoreOutput("cmpl-a-0-x", [token], finish_reason=last)])
        found += outputs_of(queue)
    return found


@pytest.mark.parametrize("stop", [None, ["never found", "nor this"]])
@pytest.mark.parametrize("known", [1, 5, 11])
@pytest.mark.parametrize("stepwise", [False, True])
def test_the_text_goes_on_in_the_middle(
    tokenizer: object, known: int, stop: list[str] | None, stepwise: bool
) -> None:
    """Also where a character is split, and where vLLM holds text back for stop strings."""
    # Bytes of characters outside ASCII, in several tokens each.
    tokens = (tokenizer("aé日本 déjà vu 🙂🙂 x")["input_ids"] * 3)[:12]  # type: ignore[operator]
    tokens = [min(token, 1999) for token in tokens]

    def run(given: str | None, rest: list[int]) -> list:
        processor = Processor(tokenizer, log_stats=False)
        request = request_of("cmpl-a-0", given, stop=stop)
        queue = RequestOutputCollector(RequestOutputKind.DELTA, request.request_id)
        processor.add_request(request, "", queue=queue)
        assert given is None or resumed_tokens(request.sampling_params) == tokens[:known]
        return play(processor, queue, rest)

    whole = run(None, tokens)
    moved = run(told({"0": [tokens[:known], False]}, stepwise=stepwise), tokens[known:])
    if stepwise:
        assert moved == whole
    else:
        assert moved[0] == (tokens[:known], "".join(text for _, text in whole[:known]))
        assert moved[1:] == whole[known:]


def test_choices_of_one_request_are_told_apart(tokenizer: object) -> None:
    processor = Processor(tokenizer, log_stats=False)
    given = told({"2": [[30, 31], False], "3": [[40, 41, 42], True]})
    request = request_of("cmpl-a-1", given, n=2)  # the second prompt: choices 2 and 3
    parent, queue = ParentRequest(request), RequestOutputCollector(RequestOutputKind.DELTA, "q")
    sent = []
    for index in range(2):
        name, params = parent.get_child_info(index)
        child = request_of("cmpl-a-1", None)
        child.request_id, child.sampling_params = name, params
        processor.add_request(child, "", parent, index, queue)
        sent.append((resumed_tokens(child.sampling_params), child.sampling_params.max_tokens))
    # The choice that has ended makes one token more, so that it is counted.
    assert sent == [([30, 31], 12), ([40, 41], 3)]
    seen = []
    while (output := queue.get_nowait()) is not None:
        seen += [(choice.index, list(choice.token_ids)) for choice in output.outputs]
    assert seen == [(0, [30, 31]), (1, [40, 41])]
    assert request.sampling_params.extra_args == {RESUME: given}


def test_logprobs_are_repeated_in_number(tokenizer: object) -> None:
    processor = Processor(tokenizer, log_stats=False)
    request = request_of("cmpl-a-0", told({"0": [[30, 31, 32], False]}), logprobs=1)
    queue = RequestOutputCollector(RequestOutputKind.DELTA, request.request_id)
    processor.add_request(request, "", queue=queue)
    output = queue.get_nowait()
    assert [list(entry) for entry in output.outputs[0].logprobs] == [[30], [31], [32]]
    assert output.prompt_logprobs is None


def test_logprobs_of_the_prompt_are_repeated_in_number_and_not_computed_again(
    tokenizer: object,
) -> None:
    processor = Processor(tokenizer, log_stats=False)
    given = told({"0": [[30, 31], False]})
    request = request_of("cmpl-a-0", given, logprobs=1, prompt_logprobs=1)
    queue = RequestOutputCollector(RequestOutputKind.DELTA, request.request_id)
    processor.add_request(request, "", queue=queue)
    assert request.sampling_params.prompt_logprobs is None
    output = queue.get_nowait()
    assert output.prompt_logprobs[0] is None
    assert [list(entry) for entry in output.prompt_logprobs[1:]] == [[21], [22]]


def test_waiting_for_an_output_sees_the_repeated_ones(tokenizer: object) -> None:
    async def work() -> object:
        processor = Processor(tokenizer, log_stats=False)
        request = request_of("cmpl-a-0", told({"0": [[30], False]}))
        queue = RequestOutputCollector(RequestOutputKind.DELTA, request.request_id)
        processor.add_request(request, "", queue=queue)
        return await queue.get()

    assert list(asyncio.run(work()).outputs[0].token_ids) == [30]


@pytest.mark.parametrize(
    "bad",
    [7, "", "{", "[]", '{"stepwise":0}', told({"0": [[1.5], False]}), told({"0": [[True], False]}),
     told({"0": [[2000], False]}), told({"0": [[-1], False]}), told({"0": [[1] * 12, False]}),
     told({"0": [[1] * 13, True]}), told({"0": [[1]]}), told({"0": 3})],
)  # fmt: skip
def test_what_no_gateway_sends_is_refused(bad: object) -> None:
    with pytest.raises(VLLMValidationError, match="for the gateway only"):
        read_resumed(bad, 0, vocab_size=2000, max_tokens=12)


def test_what_a_gateway_sends_is_read() -> None:
    read = read_resumed(told({"0": [[1] * 12, True]}), 0, vocab_size=2000, max_tokens=12)
    assert read == resume.Resumed([1] * 12, True, False)
    assert read_resumed(told({}), 0, vocab_size=2000, max_tokens=12) is None


def test_a_dead_engine_ends_its_api_server(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[object, ...]] = []
    timer = SimpleNamespace(start=lambda: begun.append(("started",)))
    monkeypatch.setattr(resume.threading, "Timer", lambda *what: begun.append(what) or timer)
    processor = Processor(None, log_stats=False)
    processor.propagate_error(ValueError("a request's"))
    assert not begun
    processor.propagate_error(EngineDeadError())
    assert begun == [(resume.LAST_WORDS_S, os._exit, (ENGINE_DIED,)), ("started",)]


def test_other_requests_are_left_alone(tokenizer: object) -> None:
    processor = Processor(tokenizer, log_stats=False)
    request = request_of("cmpl-a-0", None)
    params = request.sampling_params
    queue = RequestOutputCollector(RequestOutputKind.DELTA, request.request_id)
    processor.add_request(request, "", queue=queue)
    assert request.sampling_params is params and type(queue) is RequestOutputCollector
    with pytest.raises(VLLMValidationError, match="streamed"):
        whole = request_of("b", told({}), output_kind=RequestOutputKind.FINAL_ONLY)
        processor.add_request(whole, "", queue=queue)


def test_the_engine_takes_the_tokens_as_output() -> None:
    request = request_of("a", None)
    request.sampling_params.extra_args = {RESUME: [30, 31]}
    made = ResumedRequest.from_engine_core_request(request, None)
    assert list(made.output_token_ids) == [30, 31]
    assert list(made.all_token_ids) == [*PROMPT, 30, 31]
    assert (made.num_prompt_tokens, made.num_output_tokens, made.max_tokens) == (3, 2, 12)
    assert made.prefill_stats is None
    plain = ResumedRequest.from_engine_core_request(request_of("b", None), None)
    assert plain.num_output_tokens == 0 and plain.prefill_stats is not None


class Reasoner:
    """Reasoning ends with token 9."""

    def is_reasoning_end(self, tokens: list[int]) -> bool:
        return 9 in tokens

    def is_reasoning_end_streaming(self, tokens: list[int], new: list[int]) -> bool:
        return 9 in new


@pytest.mark.parametrize(
    ("reasoner", "ended", "tokens", "seen"),
    [
        (None, None, [1, 2], [1, 2]),
        (Reasoner(), None, [1, 2], []),
        (Reasoner(), None, [1, 9, 2, 3], [2, 3]),
        (Reasoner(), True, [1, 2], [1, 2]),
    ],
)
def test_a_grammar_sees_what_it_would_have_seen(
    reasoner: Reasoner | None, ended: bool | None, tokens: list[int], seen: list[int]
) -> None:
    manager = object.__new__(ResumingStructuredOutput)
    manager.enable_in_reasoning = False
    manager._get_reasoner = lambda _: reasoner  # type: ignore[method-assign]
    accepted: list[int] = []
    grammar = SimpleNamespace(accept_tokens=lambda _, new: accepted.extend(new) or True)
    manager.backend = SimpleNamespace(compile_grammar=lambda *_, **__: grammar)
    wanted = SimpleNamespace(reasoning_ended=ended, structured_output_key=("json", "{}"))
    request = SimpleNamespace(
        request_id="a",
        structured_output_request=wanted,
        sampling_params=None,
        prompt_token_ids=PROMPT,
        output_token_ids=tokens,
    )
    assert manager._create_grammar(request) is grammar
    assert accepted == seen
    assert bool(wanted.reasoning_ended) == bool(ended or 9 in tokens)


@pytest.mark.parametrize("seeded", [False, True])
def test_the_runner_gets_the_tokens_and_the_generator_goes_on(seeded: bool) -> None:
    generator = torch.Generator().manual_seed(5) if seeded else None
    outputs: list[int] = []
    state = SimpleNamespace(
        num_prompt_tokens=3, num_tokens=5, output_token_ids=outputs, generator=generator
    )
    batch = SimpleNamespace(
        req_id_to_index={"a": 1},
        token_ids_cpu=np.zeros((2, 8), dtype=np.int32),
        is_token_ids=np.zeros((2, 8), dtype=bool),
        num_tokens_no_spec=np.zeros(2, dtype=np.int32),
        vocab_size=50,
    )
    restore(SimpleNamespace(requests={"a": state}, input_batch=batch), "a", [30, 31])
    assert outputs == [30, 31]
    assert batch.token_ids_cpu[1].tolist() == [0, 0, 0, 30, 31, 0, 0, 0]
    assert batch.is_token_ids[1].tolist() == [False] * 3 + [True] * 2 + [False] * 3
    assert batch.num_tokens_no_spec.tolist() == [0, 5]
    if generator is not None:
        fresh = torch.Generator().manual_seed(5)
        current_platform.import_kernels()
        sampler = TopKTopPSampler()
        for _ in range(2):
            sampler.forward_cpu(torch.zeros(1, 50), {0: fresh}, None, None)
        assert torch.equal(generator.get_state(), fresh.get_state())
