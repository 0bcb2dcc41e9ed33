"""The answers of colocated vLLM, and comparisons with them."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from helpers import VOCAB, Scrape, openai_client, tokens_of

from afd.models import read_model
from afd.models.checkpoint import tensor_table
from afd_bench.servers import Server
from afd_bench.workload import Answer, Request, mixed, run

LONG = Request(tokens_of("long", 300), 24, 0.1)
REQUESTS = (*mixed(7, vocab=VOCAB, count=20), LONG)
SCORED = (tokens_of("scored", 1), tokens_of("scored", 40), tokens_of("scored", 150))


@dataclass(frozen=True)
class Reference:
    """Results of colocated vLLM. answers: to REQUESTS. scores: :func:`score` of each of SCORED."""

    answers: list[Answer]
    scores: list[list[float]]


References = Callable[[str], Reference]  # family -> its reference


def score(server: Server, prompt: tuple[int, ...]) -> list[float]:
    """Returns log-probabilities: of the prompt's tokens, of 12 greedy tokens, of the runners-up."""
    (choice,) = (
        openai_client(server.url)
        .completions.create(
            model="model",
            prompt=list(prompt),
            max_tokens=12,
            temperature=0,
            logprobs=3,
            echo=True,
            extra_body={"ignore_eos": True, "return_tokens_as_token_ids": True},
        )
        .choices
    )
    assert choice.logprobs is not None
    own = choice.logprobs.token_logprobs or []
    best = choice.logprobs.top_logprobs or []
    assert len(own) == len(best) == len(prompt) + 12
    ranked = [sorted(entry.values(), reverse=True) if entry else [] for entry in best]
    return [value for value in own if value is not None] + [v for entry in ranked for v in entry]


def same_tokens(server: Server, reference: Reference, salt: str) -> None:
    """Runs REQUESTS concurrently and compares their tokens with the reference."""
    found = run(server.url, server.model, REQUESTS, salt=salt)
    wrong = [
        f"request {i} of {len(r.prompt)} tokens: {a.tokens} instead of {b.tokens}"
        for i, (r, a, b) in enumerate(zip(REQUESTS, found, reference.answers, strict=True))
        if a.tokens != b.tokens
    ]
    assert not wrong, f"{len(wrong)} of {len(REQUESTS)} differ from colocated vLLM: {wrong[0]}"


def weights_are_apart(page: Scrape, model: Path, ffn_instances: int) -> None:
    """Checks that each side has read and holds all of its own tensors and none of the other's.

    For float32 deployments with one attention instance; every parameter takes four bytes.
    """
    family, _ = read_model(model)
    for kind, instances in (
        ("attention", ["attention-0"]),
        ("expert", [f"ffn-{index}" for index in range(ffn_instances)]),
    ):
        tensors = [
            info
            for name, info in tensor_table(model).items()
            if family.is_expert_weight(name) == (kind == "expert")
        ]
        read = sum(info.nbytes for info in tensors)
        held = sum(4 * math.prod(info.shape) for info in tensors)
        share = len(instances)
        for name, nbytes in (("read", read), ("held", held)):
            for labels in page.labels(f"afd_weights_{name}_bytes"):
                if labels["kind"] != kind:
                    continue
                expected = nbytes / share if labels["instance"] in instances else 0
                assert page.values(f"afd_weights_{name}_bytes", **labels) == [expected], labels
