"""vLLM's second-generation model runner on a GPU, eager and with graphs, beside the first one.

Greedy tokens are compared up to near ties, as in test_gpu_serve.py.
"""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from adapters import ADAPTERS, adapter_arguments
from gpu_pair import KIND

from afd.control import operator
from afd.errors import AfdError
from afd_bench.gpu.targets import Afd, Sizes, deployment, fitted, vllm_args
from afd_bench.servers import disaggregated
from afd_bench.stages import totals
from afd_bench.workload import Request, first_difference, run
from attention_worker.vllm_hooks.generations import FIRST, SECOND, SWITCH
from attention_worker.vllm_hooks.versions import layout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.serve,
    pytest.mark.skipif(not torch.cuda.device_count(), reason="needs an NVIDIA GPU"),
]
TOKENS = 300
SAID = "model runner: vLLM's second generation"
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
GPUS = torch.cuda.device_count()
needs_two = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs, one for each attention rank")
needs_ngram = pytest.mark.skipif(
    not layout().second_runner_ngram, reason="needs vLLM 0.32: its second runner takes n-grams"
)
NEAR_TIE = 0.3  # nats; the runners batch the chunks of prompts differently, and bfloat16 rounds
# Enough requests that each of 3 micro-batches has rows, and prompts of several chunks.
REQUESTS = tuple(Request(tuple(range(30 + 7 * i, 60 + 29 * i)), TOKENS, 0.0) for i in range(8))
WAYS = (
    pytest.param(FIRST, True, id="first"),
    pytest.param(SECOND, False, id="second-eager"),
    pytest.param(SECOND, True, id="second-graphs"),
)


def config_of(model, graphs):
    target = fitted(Afd(1, 1, graphs=graphs, lookahead=True), 1)
    args = vllm_args(KIND, filled=False)
    config = deployment(target, model, Sizes(8, 1024, 1.0), KIND, args)
    # A prefix cache hit would split the second run's prefill differently.
    config["attention"]["enable_prefix_caching"] = False
    config["attention"]["max_num_batched_tokens"] = 128
    config["deadlines"]["ffn_s"] = 60.0
    config["control"]["timeout_s"] = 5.0
    return config


def total(server, name):
    lines = (line.split() for line in server.metrics().splitlines())
    return sum(float(words[1]) for words in lines if words and words[0].startswith(name))


def with_ffn_killed(server):
    """Runs the requests, and kills the FFN instance when a third of the tokens are there."""
    found = []

    def work():
        try:
            found.append(run(server.url, server.model, REQUESTS, salt="killed"))
        except AfdError as error:
            found.append(error)

    before = totals(server.metrics(), 0.0).generated
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    wanted = before + len(REQUESTS) * TOKENS / 3
    waited = threading.Event()
    for _ in range(600):
        if totals(server.metrics(), 0.0).generated > wanted:
            break
        waited.wait(0.05)
    assert thread.is_alive(), "the kill came too late"
    lost = operator.status(server.control).find("ffn", 0, 0).pid
    os.kill(lost, signal.SIGKILL)
    thread.join(120)
    (answers,) = found
    assert operator.status(server.control).find("ffn", 0, 0).pid != lost
    return answers


def different(answers, expected):
    """Returns (request, token, nats between the two best tokens) where more than a near tie."""
    found = []
    for number, (mine, theirs) in enumerate(zip(answers, expected, strict=True)):
        assert len(mine.tokens) == TOKENS
        differs = first_difference(mine, theirs)
        if differs is not None and theirs.gaps[differs] >= NEAR_TIE:
            found.append((number, differs, theirs.gaps[differs]))
    return found


def test_both_runners_give_the_same_tokens_also_when_the_ffn_instance_is_killed(
    tiny_models, tmp_path
):
    """At depth 3 and 1. The instances start at the same time on one GPU."""
    model = tiny_models("qwen3_moe")
    with ExitStack() as stack, ThreadPoolExecutor(len(WAYS)) as pool:

        def started(way):
            generation, graphs = way.values
            server = disaggregated(
                config_of(model, graphs),
                log=tmp_path / f"{way.id}.log",
                variables={SWITCH: generation},
            )
            return stack.enter_context(server)

        first, eager, graphs = pool.map(started, WAYS)

        def answered(server):
            deep = run(server.url, server.model, REQUESTS, salt="deep")
            operator.set_depth(server.control, depth=1)
            flat = run(server.url, server.model, REQUESTS, salt="flat")
            operator.set_depth(server.control, depth=None)
            return deep, flat

        # One after the other: they share the GPU, and their host threads the cores.
        expected = answered(first)
        for name, server in (("eager", eager), ("graphs", graphs)):
            log = server.log.read_text(errors="replace")
            assert SAID in log, name
            deep, flat = answered(server)
            assert different(deep, expected[0]) == [], name
            assert different(flat, expected[1]) == [], name
            replayed = total(server, "afd_graph_steps_total")
            assert (replayed > TOKENS) == (name == "graphs"), (name, replayed)
            survived = with_ffn_killed(server)
            said = [line for line in server.log.read_text().splitlines() if "Error" in line][:20]
            assert not isinstance(survived, AfdError), (name, survived, said)
            assert different(survived, expected[0]) == [], name
            if name == "graphs":
                assert total(server, "afd_graph_steps_total") > replayed + TOKENS / 2
        assert SAID not in first.log.read_text(errors="replace")


def test_both_runners_give_each_request_its_adapter(tiny_models, tmp_path):
    """Steps are replayed as graphs. Both deployments share one GPU."""
    model = tiny_models("qwen3_moe")
    lora = adapter_arguments(model)

    def answered(generation):
        config, log = config_of(model, graphs=True), tmp_path / f"{generation}.log"
        config["attention"]["vllm_args"] += lora
        with disaggregated(config, log=log, variables={SWITCH: generation}) as server:
            found = [run(server.url, name, REQUESTS, salt=name) for name in ("model", *ADAPTERS)]
            assert total(server, "afd_graph_steps_total") > TOKENS
        assert (SAID in log.read_text()) == (generation == SECOND)
        return found

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(answered, (FIRST, SECOND))
    for name, mine, theirs in zip(("model", *ADAPTERS), second, first, strict=True):
        assert different(mine, theirs) == [], name
    plain, adapted = ([answer.tokens for answer in found] for found in first[:2])
    assert plain != adapted, "the adapter changed nothing"


@pytest.mark.parametrize(
    "attention",
    [
        pytest.param({"speculation": NGRAM}, id="ngram", marks=needs_ngram),
        pytest.param({"tp": 2}, id="ranks", marks=[pytest.mark.multi_gpu, needs_two]),
    ],
)
def test_both_runners_speculate_and_have_ranks(tiny_models, tmp_path, attention):
    """The tokens are those of one rank without drafts. All deployments start at the same time."""
    model = tiny_models("qwen3_moe")

    def answered(name, generation, settings):
        config, log = config_of(model, graphs=True), tmp_path / f"{name}.log"
        config["gpus"] = settings.get("tp", 1)
        config["attention"] |= settings
        with disaggregated(config, log=log, variables={SWITCH: generation}) as server:
            found = run(server.url, server.model, REQUESTS, salt=name)
            accepted = total(server, "vllm:spec_decode_num_accepted_tokens_total")
            assert bool(accepted) == ("speculation" in settings)
        assert (SAID in log.read_text()) == (generation == SECOND)
        return found

    ways = (("plain", FIRST, {}), ("first", FIRST, attention), ("second", SECOND, attention))
    with ThreadPoolExecutor(len(ways)) as pool:
        plain, first, second = pool.map(answered, *zip(*ways, strict=True))
    assert different(first, plain) == []
    assert different(second, plain) == []
