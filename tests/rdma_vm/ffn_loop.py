"""Runs in the guest: RemoteExperts against FfnLoop over soft-RoCE; one port goes down midway."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

import torch
from remote_support import Deployed, run_step

from afd_demo.make_model import make_model
from afd_demo.sizes import resolve
from ffn_worker.experts.build import load_ffn_model

FAMILY = "qwen3_moe"
STEPS = 6


def main() -> None:
    print(f"imported after {time.monotonic():.0f} s", flush=True)  # since the boot
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp())
    make_model(FAMILY, folder, resolve(FAMILY, "tiny"))
    verbs = {"ports": ["rxa0:1", "rxa1:1"], "ffn_ports": ["rxf0:1", "rxf1:1"]}
    # An emulated processor loads the experts slowly, and slowly on a busy host.
    deadlines = {"start_s": 60.0, "ffn_s": 60.0}
    transport = {"backend": "verbs", "verbs": verbs}
    deployed = Deployed(folder, 1, 1, transport=transport, deadlines=deadlines)
    r = deployed.resolved
    expected = load_ffn_model(folder, r.family, r.model, instances=1, index=0, backend="reference")
    client = deployed.clients[0]
    assert client.peers[0].link.backend == "verbs"
    for step in range(STEPS):
        if step == STEPS // 2:
            subprocess.run(["ip", "link", "set", "a1", "down"], check=True)
        started = time.monotonic()
        run_step(client, r, expected, [3, 2, 4], step)
        print(f"step {step} answered after {time.monotonic() - started:.2f} s", flush=True)
    deployed.close()
    print("ffn_loop: every answer equals the reference")


if __name__ == "__main__":
    main()
