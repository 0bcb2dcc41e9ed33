"""An attention instance goes on with an answer that another one has begun, in the middle of it."""

import json

import pytest
from deployments import Host
from helpers import Running
from replies import Kind, Reply, ask_all, kinds

pytest.importorskip("openai", reason="comes with vLLM; ./run test installs it")
pytestmark = pytest.mark.serve

LENGTH = 40


@pytest.fixture(scope="module")
def deployment(host: Host) -> Running:
    return host.serve("openai")


def begun(kind: Kind, reply: Reply, share: float) -> dict[str, object]:
    """Returns what the gateway tells an instance after this share of the answer."""
    body = kind.body(1, stream=True, length=LENGTH)
    given = {}
    for index, choice in reply.choices.items():
        tokens = choice["tokens"]
        # The last choice of several has ended already.
        ended = len(reply.choices) > 1 and index == max(reply.choices)
        given[str(index)] = [tokens if ended else tokens[: int(len(tokens) * share)], ended]
    told = {"stepwise": bool(body.get("tools")), "choices": given}
    return {**body, "return_token_ids": True, "vllm_xargs": {"afd_resume": json.dumps(told)}}


def test_every_kind_of_request_goes_on(deployment: Running, terse: dict[str, float]) -> None:
    """Greedy and seeded answers have the same rest; others keep their beginning, and their form."""
    url = deployment.member("attention-0").api_url
    wrong = []
    for number, kind in enumerate(kinds(terse)):
        body = {**kind.body(1, stream=True, length=LENGTH), "return_token_ids": True}
        (whole,) = ask_all(url, [(kind.path, body)])
        if whole.error:
            wrong.append(f"{kind.name}: {whole.error}")
            continue
        share = (0.1, 0.4, 0.7)[number % 3]
        (moved,) = ask_all(url, [(kind.path, begun(kind, whole, share))])
        wrong += [f"{kind.name} at {share}: {p}" for p in differences(kind, whole, moved, share)]
    assert not wrong, "\n".join(wrong)


def differences(kind: Kind, whole: Reply, moved: Reply, share: float) -> list[str]:
    found = [moved.error] if moved.error else []
    several = len(whole.choices) > 1
    for index, choice in whole.choices.items():
        ended = several and index == max(whole.choices)
        other = moved.choices.get(index, {})
        if ended:
            continue  # the gateway keeps what its last token brings from the client
        if kind.name.startswith("random"):
            known = choice["tokens"][: int(len(choice["tokens"]) * share)]
            if other.get("tokens", [])[: len(known)] != known:
                found.append(f"choice {index} does not begin with the tokens so far")
            continue
        for key, value in choice.items():
            if key == "logprobs":
                begin = len(value) - int(len(choice["tokens"]) * (1 - share))
                same = len(value) == len(other.get(key, []))
                if not same or other[key][begin:] != pytest.approx(value[begin:], abs=1e-4):
                    found.append(f"choice {index}: logprobs {other.get(key)} instead of {value}")
            elif other.get(key) != value:
                found.append(f"choice {index}: {key} {other.get(key)!r} instead of {value!r}")
    if moved.usage != whole.usage and not kind.name.startswith("random"):
        found.append(f"usage {moved.usage} instead of {whole.usage}")
    if "schema" in kind.name and not moved.error:
        fields = json.loads(moved.choices[0]["content"])
        if set(fields) != {"city", "days"}:
            found.append(f"not the schema: {fields}")
    return found


@pytest.mark.parametrize(
    "told",
    [
        7,
        "{",
        '{"stepwise":false,"choices":[]}',
        '{"stepwise":false,"choices":{"0":[[1,2.5],false]}}',
        '{"stepwise":false,"choices":{"0":[[1000000],false]}}',
        '{"stepwise":false,"choices":{"0":[[-1],false]}}',
        '{"stepwise":false,"choices":{"0":[[5,5,5,5],false]}}',
    ],
)
def test_a_client_cannot_harm_the_engine_with_it(deployment: Running, told: object) -> None:
    for stream in (False, True):
        body = {
            "model": "model", "prompt": [20, 21], "max_tokens": 4, "stream": stream,
            "vllm_xargs": {"afd_resume": told},
        }  # fmt: skip
        (reply,) = ask_all(deployment.url, [("/v1/completions", body)])
        assert "400" in reply.error and "for the gateway only" in reply.error
    assert deployment.is_whole()
