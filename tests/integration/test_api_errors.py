"""The errors that a client gets for impossible requests."""

import json
import urllib.error
import urllib.request

import pytest
from deployments import Host
from helpers import Running

openai = pytest.importorskip("openai", reason="comes with vLLM; ./run test installs it")
pytestmark = pytest.mark.serve

GOOD = {"model": "model", "prompt": "x", "max_tokens": 4}


@pytest.fixture(scope="module")
def deployment(host: Host) -> Running:
    return host.serve("openai")


def post(url: str, body: bytes) -> tuple[int, str, str]:
    """Returns status, content type and text of the answer."""
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers["Content-Type"], error.read().decode()


@pytest.mark.parametrize(
    ("change", "status", "words"),
    [
        ({"model": "other"}, 404, "other"),
        ({"prompt": [5] * 2000}, 400, "2000"),
        ({"max_tokens": 5000}, 400, "1024"),
        ({"max_tokens": "many"}, 400, "max_tokens"),
        ({"temperature": -1}, 400, "temperature"),
        ({"n": 0}, 400, "n"),
        ({"prompt": None}, 400, "prompt"),
        ({"prompt": [5000]}, 400, "vocab"),
        ({"structured_outputs": {"regex": "["}}, 400, "regex"),
    ],
)
def test_error_has_openai_shape(
    deployment: Running, change: dict[str, object], status: int, words: str
) -> None:
    body = json.dumps({**GOOD, **change}).encode()
    code, kind, text = post(f"{deployment.url}/v1/completions", body)
    assert (code, kind) == (status, "application/json"), text
    error = json.loads(text)["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert error["code"] == status and words in json.dumps(error)


PIXEL = "data:image/gif;base64,R0lGODlhAQABAAAAACH5BAEKAAEALAAAAAABAAEAAAICTAEAOw=="


def test_images_are_refused_at_the_request(deployment: Running) -> None:
    content = [
        {"type": "text", "text": "What is this?"},
        {"type": "image_url", "image_url": {"url": PIXEL}},
    ]
    body = {"model": "model", "messages": [{"role": "user", "content": content}], "max_tokens": 4}
    code, _, text = post(f"{deployment.url}/v1/chat/completions", json.dumps(body).encode())
    assert code == 400, text
    error = json.loads(text)["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert "image" in error["message"] or "multimodal" in error["message"]


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("embeddings", {"input": "x"}),
        ("audio/transcriptions", {}),
    ],
)
def test_embeddings_and_audio_are_refused_at_the_request(
    deployment: Running, path: str, change: dict[str, object]
) -> None:
    body = json.dumps({"model": "model", **change}).encode()
    code, _, text = post(f"{deployment.url}/v1/{path}", body)
    assert code == 404, text
    error = json.loads(text)["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert "generates text" in error["message"]


@pytest.mark.parametrize("body", [b"{not json", b"", b"\xff\xfe"])
def test_invalid_json(deployment: Running, body: bytes) -> None:
    code, kind, text = post(f"{deployment.url}/v1/completions", body)
    assert (code, kind) == (400, "application/json"), text
    assert json.loads(text)["error"]["code"] == 400


def test_unknown_path(deployment: Running) -> None:
    code, _, text = post(f"{deployment.url}/nothing", b"{}")
    assert code == 404 and json.loads(text)["error"]["type"] == "NotFoundError"
    assert post(f"{deployment.url}/v1/nothing", b"{}")[0] == 404


def test_client_raises_its_own_errors(deployment: Running) -> None:
    client = deployment.client()
    with pytest.raises(openai.NotFoundError, match="other"):
        client.completions.create(**{**GOOD, "model": "other"})
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.completions.create(**{**GOOD, "prompt": [5] * 2000})


def test_the_engine_still_works_after_all_errors(deployment: Running) -> None:
    assert deployment.is_whole()
    assert deployment.client().completions.create(**GOOD).choices[0].text
