"""An attention instance without vLLM and a real FFN instance. They share the first GPU.

Its layers have no attention: the input of an expert layer is the previous layer's answer plus the
step's input, and routing is fixed. So a step can be compared with the same experts on one GPU.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import torch

from afd.config.deployment import Deployment
from afd.config.resolve import region_options, resolve
from afd.config.roles import RoleSpec
from afd.control.connect import client_for
from afd.control.keys import CurveKeys
from afd.host.ports import held_ports
from afd.metrics.role import RoleMetrics
from afd.metrics.step_trace import NoTimestamps, StageTimestamps
from afd.schedule import split_rows
from afd.wire.streams_torch import make_streams, runtime_of, torch_device
from afd_comm import Region, Status, VerbsOptions
from attention_worker.remote.host import RemoteExperts
from attention_worker.remote.stream import StreamExperts, Waits
from attention_worker.vllm_hooks.padding import padding_of
from ffn_worker.experts.build import load_ffn_model
from ffn_worker.experts.model import FfnModel

START_S = 120.0
KIND = "rocm" if torch.version.hip else "cuda"
"""The device whose tensors torch calls cuda here."""


class Pair:
    """Control plane and FFN instance as processes; the attention side is the calling thread."""

    def __init__(
        self,
        checkpoint: Path,
        folder: Path,
        kind: str = KIND,
        ffn_environment: Mapping[str, str] = os.environ,
        **sections: dict[str, object],
    ) -> None:
        """kind: a name of afd.devices.DEVICES."""
        self._held = ExitStack()
        self._environments = {"ffn": ffn_environment, "control": os.environ}
        (port,) = self._held.enter_context(held_ports(["127.0.0.1"]))
        deployment = Deployment.from_plain(
            {
                "model": str(checkpoint),
                "served_model_name": "m",
                "gpus": 1,
                "attention": {"device": kind, "dtype": "bfloat16", "max_num_batched_tokens": 512},
                "ffn": {"device": kind, **sections.pop("ffn", {})},
                "deadlines": {"ffn_s": 60.0, **sections.pop("deadlines", {})},
                **sections,
            }
        )
        self.resolved = resolve(deployment)
        self._folder = folder
        address = f"tcp://127.0.0.1:{port}"
        keys = folder / f"{port}.keys"
        CurveKeys.generate().save(keys)
        self._specs = {
            role: RoleSpec(role, 0, deployment, address, keys)
            for role in ("control", "ffn", "attention")
        }
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        for role in ("control", "ffn"):
            self.start(role)
        self.device = torch_device(kind)
        runtime_of(self.device).enter(self.device)
        r = self.resolved
        verbs = deployment.transport.verbs_keywords("attention")
        self.region = Region(
            r.slots.attention_region_slots,
            r.f2a.nbytes,
            name="attention-0",
            **region_options(deployment, kind),
            verbs=VerbsOptions(**verbs) if verbs else None,
        )
        self.control = client_for(self._specs["attention"], r.contract)
        self.control.join(addresses=tuple(self.region.addresses), deadline_s=START_S)
        metrics = RoleMetrics("attention")
        self.host = RemoteExperts(r, 0, self.region, self.control, metrics)
        self.host.connect(START_S)
        self.control.set_state("ready")
        self.streams = make_streams(self.device)
        self.stream = StreamExperts(r, 0, self.region, self.streams, self.host.expert_slots)

    def start(self, role: str) -> None:
        file = self._folder / f"{role}.json"
        self._specs[role].save(file)
        argv = [sys.executable, "-m", "afd_launch.cli", role, "--role-file", str(file)]
        with open(self._folder / f"{role}.log", "ab") as log:
            self.processes[role] = subprocess.Popen(
                argv, stdout=log, stderr=log, env=self._environments[role]
            )

    def log(self, role: str) -> str:
        return (self._folder / f"{role}.log").read_text(errors="replace")

    def signal(self, role: str, number: signal.Signals) -> None:
        self.processes[role].send_signal(number)

    def close(self) -> None:
        self.control.leave()
        self.control.close()
        self.host.close()
        for process in reversed(self.processes.values()):
            process.send_signal(signal.SIGCONT)
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
        self._held.close()

    def reference(self) -> FfnModel:
        r = self.resolved
        return load_ffn_model(
            r.deployment.model,
            r.family,
            r.model,
            instances=1,
            index=0,
            backend="torch",
            device=self.device,
        )


class Step:
    """A step of ``rows`` rows at one depth, with fixed routing; ``fill`` replaces its inputs."""

    def __init__(self, pair: Pair, rows: int, depth: int, seed: int = 0) -> None:
        model = pair.resolved.model
        device = pair.device
        generator = torch.Generator(device).manual_seed(seed)
        self.pair, self.rows, self.depth = pair, rows, depth
        self.layers = model.moe_layers
        self.x = torch.empty(rows, model.hidden, dtype=torch.bfloat16, device=device)
        self.out = torch.zeros_like(self.x)
        scores = torch.rand(
            len(self.layers), rows, model.num_experts, device=device, generator=generator
        )
        weights, ids = (scores / scores.sum(-1, keepdim=True)).topk(model.top_k, dim=-1)
        self.ids, self.weights = ids.int().contiguous(), weights.contiguous()
        # KV cache slots; as in vLLM, -1 marks padding.
        self.slots = torch.arange(rows, device=device)
        self.real = rows
        self.fill(seed)

    def fill(self, seed: int) -> None:
        device = self.pair.device
        generator = torch.Generator(device).manual_seed(seed)
        self.x.copy_(torch.randn(self.x.shape, device=device, generator=generator))

    def pad(self, real: int) -> None:
        """Marks all rows but the first ``real`` as padding, also for captured steps."""
        self.slots[real:] = -1
        self.real = real

    def parts(self) -> list[slice]:
        ends = torch.tensor(split_rows(self.rows, self.depth)).cumsum(0).tolist()
        return [slice(a, b) for a, b in zip([0, *ends[:-1]], ends, strict=True)]

    def run(self, experts: RemoteExperts | StreamExperts) -> None:
        """Runs all layers in the order of attention_worker.pipeline."""
        experts.begin_step(self.depth)
        hidden = [self.x[part] for part in self.parts()]
        padding = [padding_of({"a layer": self.slots[part]}) for part in self.parts()]
        for n, layer in enumerate(self.layers):
            for mb, part in enumerate(self.parts()):
                if n:
                    hidden[mb] = experts.recv(mb) + self.x[part]
                weights = self.weights[n, part]
                with experts.sending(layer, mb, len(weights)):
                    ids = self.ids[n, part].masked_fill(padding[mb], -1)
                    experts.send(layer, mb, hidden[mb], ids, weights)
        for mb, part in enumerate(self.parts()):
            self.out[part] = experts.recv(mb)
        experts.end_step()

    def expected(self, model: FfnModel) -> torch.Tensor:
        """Returns the result of the same layers on one GPU: bfloat16 [rows, hidden]."""
        answer = torch.zeros_like(self.x)
        for n, layer in enumerate(self.layers):
            answer = model.forward(layer, answer + self.x, self.ids[n], self.weights[n])
        return answer

    def error(self, model: FfnModel) -> float:
        """Returns the relative error (Euclidean norm) of the real rows of the last run."""
        want = self.expected(model).float()[: self.real]
        return float((self.out.float()[: self.real] - want).norm() / want.norm())


class Graph:
    """Captures and replays a step like attention_worker.vllm_hooks.graphs.StepGraphs."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.timestamps: StageTimestamps = NoTimestamps()
        self.waits: Waits | None = None

    def capture(self) -> None:
        pair = self.step.pair
        self.waits = pair.stream.record(pair.host.peers, self.timestamps)
        _, self.launch = runtime_of(pair.device).capture(
            pair.device, lambda: self.step.run(pair.stream)
        )

    def replay(self, timeout_s: float = 30.0) -> list[Status]:
        """Announces and replays the step, waits for it, and returns the statuses of its waits."""
        pair = self.step.pair
        assert self.waits is not None
        pair.host.begin_step(self.step.depth)
        pair.host.announce(self.step.rows)
        self.launch()
        guard = pair.region.guard(pair.streams.compute, self.waits.slots, self.waits.flags)
        return guard.wait(int(timeout_s * 1e6))
