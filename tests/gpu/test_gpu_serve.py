"""Complete deployments under vLLM's graphs: lost FFN instances, depths, dispatch, host profile.

Greedy tokens of two runs are compared up to near ties: which requests share a step depends on
timing, and in bfloat16 this changes how sums are rounded.
"""

import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import torch
from gpu_pair import KIND

from afd.control import operator
from afd.errors import AfdError
from afd_bench import stand_in_nic
from afd_bench.gpu import profile
from afd_bench.gpu.targets import Afd, Sizes, deployment, fitted, vllm_args
from afd_bench.servers import disaggregated
from afd_bench.stages import totals
from afd_bench.workload import Request, first_difference, run
from afd_demo.make_model import make_model
from afd_demo.sizes import resolve
from afd_launch.balance import balance

GPUS = min(2, torch.cuda.device_count())
"""With one GPU, all instances share it."""
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.serve,
    pytest.mark.skipif(not GPUS, reason="needs an NVIDIA GPU"),
]
TOKENS = 600
NEAR_TIE = 0.1  # nats
ALONE = (Request(tuple(range(20, 44)), TOKENS, 0.0),)
# Enough requests that each of 3 micro-batches has rows.
TOGETHER = tuple(Request(tuple(range(30 + 7 * i, 50 + 9 * i)), TOKENS, 0.0) for i in range(8))
_FFN_S = 5.0


def deployed(model, ffn_s, tp=1, over="auto", nic=""):
    config = deployment(
        # The libibverbs without hardware copies by calls of the driver, which a NIC does not need.
        fitted(Afd(1, 1, tp=tp, over=over, nic=nic, lookahead=not nic), GPUS),
        model,
        Sizes(8, 1024, 1.0),
        KIND,
        vllm_args(KIND, filled=False),
    )
    # A prefix cache hit would split the second run's prefill differently.
    config["attention"]["enable_prefix_caching"] = False
    config["deadlines"]["ffn_s"] = ffn_s
    return config


def generated(server):
    return totals(server.metrics(), 0.0).generated


def replayed_by_depth(server):
    names = (line.split() for line in server.metrics().splitlines())
    return [float(w[1]) for w in names if w and w[0].startswith("afd_graph_steps_total")]


def replayed(server):
    return sum(replayed_by_depth(server))


def captures(server, when):
    """Returns the graphs that the FFN ranks captured, before they were ready or after."""
    names = (line.split() for line in server.metrics().splitlines())
    wanted = f'when="{when}"'
    return sum(
        float(w[1])
        for w in names
        if w and w[0].startswith("afd_ffn_graph_captures_total") and wanted in w[0]
    )


def wait_until(check, deadline_s, what):
    end = time.monotonic() + deadline_s
    while not check():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def said_wrong(log):
    """Returns the first 20 lines of a log that contain "Error"."""
    return [line for line in log.read_text(errors="replace").splitlines() if "Error" in line][:20]


def in_background(server, requests, salt):
    """Runs the requests on a thread. Returns the thread and a list for its answers or its error."""
    found = []

    def work():
        try:
            found.append(run(server.url, server.model, requests, salt=salt))
        except AfdError as error:
            found.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread, found


def pid_of(server, role, rank=0):
    return operator.status(server.control).find(role, 0, rank).pid


needs_two = pytest.mark.skipif(
    GPUS < 2, reason="needs two GPUs, one for each rank of the FFN instance"
)


@pytest.mark.parametrize(
    ("requests", "number", "tp", "over"),
    [
        pytest.param(ALONE, signal.SIGKILL, 1, "auto", id="alone"),
        pytest.param(TOGETHER, signal.SIGKILL, 1, "auto", id="together"),
        pytest.param(TOGETHER, signal.SIGKILL, 1, "verbs", id="verbs"),
        pytest.param(TOGETHER, signal.SIGKILL, 1, "tcp", id="tcp"),
        pytest.param(TOGETHER, signal.SIGSTOP, 1, "auto", id="stopped"),
        pytest.param(
            TOGETHER, signal.SIGKILL, 2, "auto", id="rank", marks=[pytest.mark.multi_gpu, needs_two]
        ),
    ],
)
def test_a_lost_ffn_instance_costs_no_request_and_no_token(
    tiny_models, tmp_path, requests, number, tp, over
):
    """The instance is killed, or only its last rank while rank 0 waits for it inside an all-reduce,
    or it is stopped until the supervisor kills it."""
    log = tmp_path / "serve.log"
    nic = str(stand_in_nic.build(tmp_path)) if over == "verbs" else ""
    config = deployed(tiny_models("qwen3_moe"), 60.0, tp, over, nic)
    config["control"]["timeout_s"] = 5.0
    with disaggregated(config, log=log) as server:
        calm = run(server.url, server.model, requests, salt="calm")
        before = generated(server)
        thread, found = in_background(server, requests, "killed")
        wait_until(
            lambda: generated(server) - before > len(requests) * TOKENS / 8, 60, "decode began"
        )
        steps = replayed(server)
        assert steps > 0, "no decode step was replayed as a graph"
        lost = [pid_of(server, "ffn", rank) for rank in range(tp)]
        os.kill(lost[-1], number)
        thread.join(120)
        (answers,) = found
        assert not isinstance(answers, AfdError), (answers, said_wrong(log))
        after = [pid_of(server, "ffn", rank) for rank in range(tp)]
        assert not set(after) & set(lost)  # all ranks were restarted
        assert replayed(server) > steps, "no step was replayed after the FFN instance came back"
        assert captures(server, "start") and not captures(server, "after")
        for mine, theirs in zip(answers, calm, strict=True):
            assert len(mine.tokens) == TOKENS
            differs = first_difference(mine, theirs)
            assert differs is None or theirs.gaps[differs] < NEAR_TIE, differs


KILLS = 20
PROMPTS = tuple(
    Request(tuple(20 + (7 * i + 3 * j) % 90 for j in range(600 + 4 * i)), 4, 0.0) for i in range(96)
)
"""Most of their steps are prompts, which run without a graph."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("role", "requests", "kills", "within_s"),
    [
        pytest.param("ffn", TOGETHER, KILLS, 0.5, id="ffn"),
        pytest.param("attention", TOGETHER, KILLS // 4, 0.5, id="attention"),
        pytest.param("ffn", PROMPTS, KILLS // 4, 0.1, id="prompts"),
    ],
)
def test_kills_at_random_moments(tiny_models, tmp_path, role, requests, kills, within_s):
    """The FFN instance or the engine of the only attention instance, inside replayed decode steps
    or while prompts are computed: no request fails, and its tokens stay the same."""
    log, moments = tmp_path / "serve.log", random.Random(time.time_ns())
    config = deployed(tiny_models("qwen3_moe"), 60.0)
    config["control"]["timeout_s"] = 5.0
    config["restart"] = {"max_restarts": KILLS}  # within a minute
    with disaggregated(config, log=log) as server:
        calm = run(server.url, server.model, requests, salt="calm")
        for kill in range(kills):
            before, steps = generated(server), replayed(server)
            thread, found = in_background(server, requests, f"kill {kill}")
            wait_until(lambda: generated(server) > before + 8, 60, "the first tokens")  # noqa: B023
            time.sleep(moments.uniform(0.0, within_s))
            assert thread.is_alive(), "the kill came too late"
            began, lost = time.monotonic(), pid_of(server, role)
            os.kill(lost, signal.SIGKILL)
            thread.join(180)
            (answers,) = found
            assert not isinstance(answers, AfdError), (kill, answers, said_wrong(log))
            assert pid_of(server, role) != lost
            assert replayed(server) > (steps if role == "ffn" else 0)
            for mine, theirs in zip(answers, calm, strict=True):
                assert len(mine.tokens) == len(theirs.tokens)
                differs = first_difference(mine, theirs)
                assert differs is None or theirs.gaps[differs] < NEAR_TIE, (kill, differs)
            print(f"{role} kill {kill}: answered {time.monotonic() - began:.1f} s after it")


def test_a_stopped_ffn_instance_ends_the_engine_at_the_deadline_and_no_request(tiny_models):
    """The supervisor kills the stopped instance and starts the engine again; the gateway sends the
    requests again, with their tokens so far."""
    config = deployed(tiny_models("qwen3_moe"), _FFN_S)
    # Longer than the deadline, or the stopped instance would be replaced before it.
    config["control"]["timeout_s"] = 60.0
    with disaggregated(config) as server:
        calm = run(server.url, server.model, TOGETHER, salt="calm")
        before = generated(server)
        thread, found = in_background(server, TOGETHER, "stopped")
        wait_until(lambda: generated(server) - before > 200, 60, "decode began")
        attention, ffn = pid_of(server, "attention"), pid_of(server, "ffn")
        os.kill(ffn, signal.SIGSTOP)
        stopped = time.monotonic()
        said = f"did not answer a step within {_FFN_S:g} s"
        try:
            wait_until(lambda: said in server.log.read_text(errors="replace"), 30, said)
            # The deadline begins with the step in which the instance was stopped.
            assert _FFN_S - 1 <= time.monotonic() - stopped < _FFN_S + 10
        finally:
            with suppress(ProcessLookupError):  # the supervisor may already have ended it
                os.kill(ffn, signal.SIGCONT)
        thread.join(180)
        (answers,) = found
        assert not isinstance(answers, AfdError), answers
        assert pid_of(server, "attention") != attention
        for mine, theirs in zip(answers, calm, strict=True):
            assert len(mine.tokens) == TOKENS
            differs = first_difference(mine, theirs)
            assert differs is None or theirs.gaps[differs] < NEAR_TIE, differs


@pytest.mark.skipif(KIND == "rocm", reason="attention.kernel mqa is not offered on rocm")
def test_our_decode_kernel_gives_the_tokens_of_flash_attention(tmp_path):
    """With an FP8 cache, FlashAttention 3 also rounds the softmax weights to FP8."""
    sizes = resolve("step3", "tiny", heads=16, head_dim=256)
    make_model("step3", tmp_path / "model", sizes)

    def answers(kernel):
        target, log = fitted(Afd(1, 1, kernel=kernel), GPUS), tmp_path / f"{kernel}.log"
        args = vllm_args(KIND, filled=False, kv="fp8")
        config = deployment(target, tmp_path / "model", Sizes(8, 1024, 1.0), KIND, args)
        with disaggregated(config, log=log) as server:
            found = run(server.url, server.model, TOGETHER, salt=kernel)
            assert replayed(server) > TOKENS / 2
        assert ("AttentionBackendEnum.CUSTOM" in log.read_text()) == (kernel == "mqa")
        return found

    with ThreadPoolExecutor(2) as pool:
        ours, theirs = pool.map(answers, ("mqa", "vllm"))
    same = []
    for mine, other in zip(ours, theirs, strict=True):
        assert len(mine.tokens) == TOKENS
        differs = first_difference(mine, other)
        assert differs is None or other.gaps[differs] < 3 * NEAR_TIE, differs
        same.append(TOKENS if differs is None else differs)
    print("equal tokens of each request", same)


def test_auto_depth_switches_while_graphs_are_replayed(tiny_models, tmp_path):
    log = tmp_path / "serve.log"
    config = deployed(tiny_models("qwen3_moe"), 60.0)
    config["pipeline"]["depth"] = "auto"
    config["metrics"]["stage_every"] = 16
    with disaggregated(config, log=log) as server:
        first = run(server.url, server.model, TOGETHER, salt="auto")

        def chosen():
            for mine, before in zip(
                run(server.url, server.model, TOGETHER, salt="auto"), first, strict=True
            ):
                differs = first_difference(mine, before)
                assert differs is None or before.gaps[differs] < NEAR_TIE, differs
            return [line for line in log.read_text().splitlines() if "depth 3 -> " in line]

        wait_until(chosen, 90, "switch to a depth that measured faster")
        print(chosen()[0])
        by_depth = replayed_by_depth(server)
        assert len(by_depth) == 3 and min(by_depth) > 24


@pytest.mark.parametrize("graphs", [False, True])
def test_routed_dispatch_matches_broadcast_also_while_experts_move(tiny_models, tmp_path, graphs):
    """Two FFN instances share the GPUs with the attention instance."""

    def config(dispatch):
        target = fitted(Afd(1, 2, graphs=graphs), GPUS)
        args = vllm_args(KIND, filled=False)
        made = deployment(target, tiny_models("qwen3_moe"), Sizes(8, 1024, 1.0), KIND, args)
        made["attention"]["enable_prefix_caching"] = False
        made["ffn"]["redundant_experts"] = 2
        made["wire"]["dispatch"] = dispatch
        return made

    def alike(mine, theirs, units):
        """Asserts equal tokens up to ties of ``units`` units in the last place of logits above 16,
        0.125 each in bfloat16."""
        for one, other in zip(mine, theirs, strict=True):
            assert len(one.tokens) == TOKENS
            differs = first_difference(one, other)
            assert differs is None or other.gaps[differs] <= units * 0.125, differs

    def served(dispatch):
        return disaggregated(config(dispatch), log=tmp_path / f"{dispatch}.log")

    with served("broadcast") as whole:
        expected = run(whole.url, whole.model, TOGETHER, salt="broadcast")
    with served("routed") as routed:
        alike(run(routed.url, routed.model, TOGETHER, salt="routed"), expected, 1)
        contract = operator.contract(routed.control)
        assert contract is not None
        load = [float(e % 3) for e in range(contract.num_experts)]
        table = balance(load, contract.expert_slots)
        assert table not in contract.expert_map
        thread, found = in_background(routed, TOGETHER, "moving")
        operator.move_experts(routed.control, tables=(table,) * len(contract.moe_layers))
        wait_until(lambda: not operator.status(routed.control).moves_left, 60, "experts moved")
        moved = operator.status(routed.control)
        assert {move.experts for move in moved.moved} == {table} and not moved.move_fault
        before = replayed(routed)
        thread.join(180)
        assert not isinstance(found[0], AfdError), found
        # After the move, different experts share an instance, and each instance's sum is rounded.
        alike(found[0], expected, 4)
        alike(run(routed.url, routed.model, TOGETHER, salt="moved"), expected, 4)
        assert (replayed(routed) > before + TOKENS / 2) == graphs


@pytest.mark.multi_gpu
@needs_two
def test_two_ranks_of_an_ffn_instance_match_one(tmp_path):
    """One instance with an exact all-reduce, and two instances with INT4 that share the GPUs.
    Prefill uses the two-shot all-reduce; decode uses the one-shot all-reduce, in graphs."""
    sizes = resolve("qwen3_moe", "tiny", hidden=4096)
    make_model("qwen3_moe", tmp_path / "model", sizes)
    draw = random.Random(0)
    requests = [
        Request(tuple(draw.randrange(20, sizes.vocab) for _ in range(700)), TOKENS // 3, 0.0)
        for _ in range(8)
    ]

    def answers(instances, tp, reduce):
        target, log = fitted(Afd(1, instances, tp=tp), GPUS), tmp_path / f"{tp}-{reduce}.log"
        args = vllm_args(KIND, filled=False)
        config = deployment(target, tmp_path / "model", Sizes(8, 1024, 1.0), KIND, args)
        config["ffn"]["reduce"] = reduce
        with disaggregated(config, log=log) as server:
            found = run(server.url, server.model, requests, salt=log.name)
            assert replayed(server) > TOKENS / 6
        said = f"all-reduce: 2 ranks, {reduce}, backend quickreduce"
        assert log.read_text().count(said) == (tp == 2) * tp * instances, said_wrong(log)
        return found

    ways = ((1, 1, "exact"), (1, 2, "exact"), (2, 2, "int4"))
    with ThreadPoolExecutor(3) as pool:
        one, exact, int4 = pool.map(answers, *zip(*ways, strict=True))
    for name, ranks, most in (("exact", exact, 5 * NEAR_TIE), ("int4", int4, 15 * NEAR_TIE)):
        for mine, theirs in zip(ranks, one, strict=True):
            assert len(mine.tokens) == TOKENS // 3
            differs = first_difference(mine, theirs)
            gap = 0.0 if differs is None else theirs.gaps[differs]
            print(name, differs, gap)
            assert gap < most, (name, differs)


@pytest.mark.parametrize("depth", [1, 3])
def test_no_host_synchronization_per_layer(tmp_path, depth):
    """12 layers, so that one host wait per layer stands out from vLLM's own waits per step."""
    argv = ["--model", "tiny", "--layers", "12", "--models", str(tmp_path), "--batch", "12"]
    argv += ["--logs", str(tmp_path / "logs")]
    assert profile.main([*argv, "--depth", str(depth)]) == 0
