"""Cases of test_rocm_node.py: ``python pair_cases.py CASE CHECKPOINT FOLDER``, on the node.

An FFN instance in a process of its own and an attention side without vLLM, both on device rocm.
"""

import signal
import sys
import time
from pathlib import Path

from gpu_pair import Graph, Pair, Step

from afd.devices import device_named
from afd_comm import Status

BF16, MXFP4 = 2e-2, 0.3


def made(checkpoint: Path, folder: Path, **sections: dict[str, object]) -> Pair:
    ffn = {"backend": "reference", **sections.pop("ffn", {})}
    pair = Pair(checkpoint, folder, "rocm", ffn=ffn, **sections)
    assert pair.region.device == "hip:0"
    assert {peer.link.backend for peer in pair.host.peers} == {"ipc"}
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
    pair.host.reconnect([0])
    graph = Graph(step)
    graph.capture()
    step.out.zero_()
    assert set(graph.replay()) == {Status.OK}
    assert step.error(model) < BF16


if __name__ == "__main__":
    assert device_named("rocm").torch_device == "cpu", "the stand-in node is not in PYTHONPATH"
    globals()[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
