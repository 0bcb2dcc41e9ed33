"""FFN instances come and go between replayed decode steps: 1A1F to 1A2F and back."""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client.parser import text_string_to_metric_families
from test_gpu_serve import (
    GPUS,
    KIND,
    NEAR_TIE,
    TOGETHER,
    TOKENS,
    captures,
    generated,
    replayed,
    said_wrong,
    wait_until,
)

from afd.control import operator
from afd.control.local_keys import operator_keys
from afd.errors import AfdError
from afd_bench.gpu.targets import Afd, Sizes, deployment, fitted, vllm_args
from afd_bench.servers import disaggregated
from afd_bench.workload import first_difference, run
from afd_launch.come_and_go import Operator

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.serve,
    pytest.mark.skipif(not GPUS, reason="needs an NVIDIA GPU"),
]


def growing(model):
    args = vllm_args(KIND, filled=False)
    target = fitted(Afd(1, 2, lookahead=True), GPUS)
    config = deployment(target, model, Sizes(8, 1024, 1.0), KIND, args)
    config["attention"]["enable_prefix_caching"] = False
    config["ffn"] |= {"instances": 1, "max_instances": 2}
    config["deadlines"]["ffn_s"] = 60.0
    config["control"]["timeout_s"] = 5.0
    return config


def computed(server, member):
    """Returns the rows that the experts of an FFN instance have computed."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(server.metrics())
        for sample in family.samples
        if sample.name == "afd_expert_rows_total" and sample.labels["instance"] == member
    )


class Load:
    """Asks the same requests again and again inside the block, and checks their tokens.

    longest_s: the longest time without a new token.
    """

    def __init__(self, server, calm, log):
        self._server, self._calm, self._log = server, calm, log
        self._ended = threading.Event()
        self._pool = ThreadPoolExecutor(2)
        self.rounds, self.longest_s = 0, 0.0

    def _ask(self):
        while not self._ended.is_set() or not self.rounds:
            try:
                answers = run(self._server.url, self._server.model, TOGETHER, salt=f"{id(self)}")
            except AfdError as error:
                raise AssertionError(said_wrong(self._log)) from error
            for mine, theirs in zip(answers, self._calm, strict=True):
                assert len(mine.tokens) == TOKENS
                differs = first_difference(mine, theirs)
                # With two FFN instances, the sum of each is rounded.
                assert differs is None or theirs.gaps[differs] < 5 * NEAR_TIE, differs
            self.rounds += 1

    def _watch(self):
        last, since = generated(self._server), time.monotonic()
        while not self._ended.is_set():
            time.sleep(0.02)
            now = generated(self._server)
            if now > last:
                self.longest_s = max(self.longest_s, time.monotonic() - since)
                last, since = now, time.monotonic()

    def __enter__(self):
        before = generated(self._server)
        self._running = [self._pool.submit(self._ask)]
        wait_until(lambda: generated(self._server) > before + len(TOGETHER), 60, "decode began")
        self._running.append(self._pool.submit(self._watch))
        return self

    def __exit__(self, *_):
        self._ended.set()
        for running in self._running:
            running.result(180)


def test_an_ffn_instance_is_added_killed_and_removed_under_load(tiny_models, tmp_path):
    log = tmp_path / "serve.log"
    with disaggregated(growing(tiny_models("qwen3_moe")), log=log) as server:
        instances = Operator(server.control, operator_keys(server.control), 180)
        calm = run(server.url, server.model, TOGETHER, salt="calm")

        def under_load(name, change):
            steps, began = replayed(server), time.monotonic()
            with Load(server, calm, log) as load:
                change()
                changed_s, rounds = time.monotonic() - began, load.rounds
                wait_until(lambda: load.rounds > rounds + 1, 120, "answers after the change")
            assert replayed(server) > steps + TOKENS
            print(f"{name}: {changed_s:.1f} s; {load.longest_s:.2f} s without a token")

        under_load("added", lambda: instances.add("ffn"))
        added = operator.status(server.control).find("ffn", 1)
        assert computed(server, "ffn-1") > 0
        under_load("killed", lambda: os.kill(added.pid, signal.SIGKILL))
        under_load("removed", lambda: instances.remove("ffn-1"))
        assert operator.status(server.control).find("ffn", 1) is None
        assert captures(server, "start") and not captures(server, "after")
