"""Cases of test_rocm_node.py: ``python pair_cases.py CASE CHECKPOINT FOLDER``, on the node.

An FFN instance in a process of its own and an attention side without vLLM, both on device rocm.
FAKE_IBVERBS names the libibverbs without hardware.
"""

import atexit
import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from gpu_pair import Graph, Pair, Step

from afd.devices import device_named
from afd_comm import Status
from ffn_worker.experts.model import FfnModel

BF16, MXFP4 = 2e-2, 0.3


def made(checkpoint: Path, folder: Path, backend: str = "ipc", **sections: Any) -> Pair:
    ffn = {"backend": "reference", **sections.pop("ffn", {})}
    pair = Pair(checkpoint, folder, "rocm", ffn=ffn, **sections)
    # A case that fails must leave no process behind.
    for process in pair.processes.values():
        atexit.register(process.kill)
    assert pair.region.device == "hip:0"
    assert {peer.link.backend for peer in pair.host.peers} == {backend}
    return pair


def steps(checkpoint: Path, folder: Path) -> None:
    """Steps sent by the host and replayed steps compute what the reference does, at each depth.
    Then the FFN instance is killed."""
    pair = made(checkpoint, folder)
    model = pair.reference()
    for depth in (1, 2, 3):
        step = Step(pair, 3 * depth + 8, depth, seed=depth)
        step.run(pair.host)
        assert step.error(model) < BF16
        graph = Graph(step)
        graph.capture()
        for seed in range(5):
            step.fill(100 + seed)
            step.out.zero_()
            assert set(graph.replay()) == {Status.OK}
            assert step.error(model) < BF16
        step.pad(2 * depth + 7)
        assert set(graph.replay()) == {Status.OK}
        assert step.error(model) < BF16
        assert (step.out[step.real :] == 0).all()
    assert "graphs captured in" in pair.log("ffn")  # the FFN side replays too
    killed(pair)
    pair.close()


def formats(checkpoint: Path, folder: Path) -> None:
    """MXFP4 rows, with answers in gfx942's FP8 type."""
    pair = made(checkpoint, folder, ffn={"arch": "gfx942"}, wire={"format": "mxfp4"})
    assert pair.resolved.contract.wire == "mxfp4 e4m3fnuz"
    step = Step(pair, 11, 2, seed=1)
    graph = Graph(step)
    graph.capture()
    assert set(graph.replay()) == {Status.OK}
    assert step.error(pair.reference()) < MXFP4
    pair.close()


def verbs(checkpoint: Path, folder: Path) -> None:
    """The proxy: tickets in the graph, stand-in NICs that read and write GPU memory. A port is lost
    inside a replayed step, then the FFN instance is killed inside one."""
    library = os.environ["FAKE_IBVERBS"]
    ports = {"ports": ["fake0", "fake1"], "library": library}
    pair = made(checkpoint, folder, "verbs", transport={"backend": "verbs", "verbs": ports})
    (link,) = [peer.link for peer in pair.host.peers]
    assert link.notes == "", "the NIC reaches GPU memory: nothing is staged"
    model, nic = pair.reference(), ctypes.CDLL(library)
    graph = replayed(pair, 3, model)
    nic.fake_lose_acks(b"fake0", 1)
    again(graph, 5, model)
    assert "fake0" in link.notes
    nic.fake_lose_acks(b"fake0", 0)
    assert "graphs captured in" in pair.log("ffn")
    killed(pair)
    pair.close()


def tcp(checkpoint: Path, folder: Path) -> None:
    """The proxy stages: the same step through host memory, in chunks."""
    pair = made(checkpoint, folder, "tcp", transport={"backend": "tcp"})
    replayed(pair, 2, pair.reference())
    (link,) = [peer.link for peer in pair.host.peers]
    assert "copies messages of hip:0 through host memory" in link.notes
    pair.close()


def mixed(checkpoint: Path, folder: Path) -> None:
    """FFN instance on CPUs, attention on a GPU: the host sends the steps. Backend auto takes ipc
    to host memory, and tcp back."""
    # The FFN's process has the product's device cpu, not the node.
    here = str(Path(__file__).parent)
    paths = os.environ["PYTHONPATH"].split(os.pathsep)
    plain = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path != here)}
    pair = made(checkpoint, folder, ffn={"device": "cpu"}, ffn_environment=plain)
    model = pair.reference()
    step = Step(pair, 17, 3)
    for seed in range(2):
        step.fill(seed)
        step.run(pair.host)
        assert step.error(model) < BF16
    assert "graphs captured in" not in pair.log("ffn")
    assert ", tcp)" in pair.log("ffn")
    pair.close()


def replayed(pair: Pair, depth: int, model: FfnModel) -> Graph:
    step = Step(pair, 3 * depth + 8, depth, seed=depth)
    graph = Graph(step)
    graph.capture()
    for seed in range(2):
        again(graph, seed, model)
    step.pad(2 * depth + 7)
    again(graph, 9, model)
    return graph


def again(graph: Graph, seed: int, model: FfnModel) -> None:
    graph.step.fill(100 + seed)
    graph.step.out.zero_()
    assert set(graph.replay()) == {Status.OK}
    assert graph.step.error(model) < BF16


def killed(pair: Pair) -> None:
    """An FFN instance that is killed in a replayed step releases the stream; the step runs again
    once it is back."""
    model = pair.reference()
    step = Step(pair, 24, 3)
    graph = Graph(step)
    graph.capture()
    assert set(graph.replay()) == {Status.OK}
    pair.signal("ffn", signal.SIGSTOP)
    pair.host.begin_step(3)
    pair.host.announce(24)
    graph.launch()
    guard = pair.region.guard(pair.streams.compute, graph.waits.slots, graph.waits.flags)
    time.sleep(0.2)
    assert not guard.done
    pair.signal("ffn", signal.SIGKILL)
    began = time.monotonic()
    assert Status.PEER_GONE in guard.wait(30_000_000)
    assert time.monotonic() - began < 5.0
    pair.processes["ffn"].wait(10)
    pair.start("ffn")
    atexit.register(pair.processes["ffn"].kill)
    pair.host.reconnect([0])
    graph = Graph(step)
    graph.capture()
    step.out.zero_()
    assert set(graph.replay()) == {Status.OK}
    assert step.error(model) < BF16


if __name__ == "__main__":
    assert device_named("rocm").torch_device == "cpu", "the stand-in node is not in PYTHONPATH"
    globals()[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
