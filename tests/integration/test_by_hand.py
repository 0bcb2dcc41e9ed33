"""Roles started one by one, over TCP with CURVE keys; and proof of which role reads which weights.

DeepSeek-V3, 1A2F. In the attention instance's checkpoint all expert tensors are NaN; in the FFN
instances' checkpoint all other tensors are. The tokens still equal those of colocated vLLM with
the intact checkpoint (a long test, because no other one needs that vLLM).
"""

import contextlib
import math
import os
import shutil
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from deployments import BLOCK, SETTINGS, Models
from helpers import Scrape, answers, processes_of, wait_until
from reference import SCORED, References, same_tokens, score, weights_are_apart
from roles import Role, afd, role, write_config

from afd.host.ports import held_ports
from afd.models import read_model
from afd.models.checkpoint import FINGERPRINT_BYTES, fingerprint, tensor_table
from afd_bench.servers import Server

pytestmark = pytest.mark.serve

FAMILY = "deepseek_v3"


def poisoned(model: Path, folder: Path, *, experts: bool) -> Path:
    """Copies a checkpoint and fills its expert tensors (``experts``) or all others with NaN.

    The bytes that the fingerprint reads stay. All bits set is NaN in every float format.
    """
    shutil.copytree(model, folder)
    family, _ = read_model(model)
    for name, info in tensor_table(folder).items():
        if family.is_expert_weight(name) == experts and info.nbytes > FINGERPRINT_BYTES:
            with info.file.open("r+b") as file:
                file.seek(info.offset + FINGERPRINT_BYTES)
                file.write(b"\xff" * (info.nbytes - FINGERPRINT_BYTES))
    assert fingerprint(folder) == fingerprint(model)
    return folder


@dataclass(frozen=True)
class ByHand:
    server: Server
    roles: dict[str, Role]
    folder: Path
    keys: Path

    def metrics(self) -> Scrape:
        return Scrape(self.server.metrics())


@pytest.fixture(scope="module")
def by_hand(tiny_models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ByHand]:
    model = tiny_models(FAMILY)
    folder = tmp_path_factory.mktemp("byhand")
    keys = folder / "keys.json"
    assert afd("keys", str(keys), folder=folder).status == 0
    without_experts = poisoned(model, folder / "attention-model", experts=True)
    only_experts = poisoned(model, folder / "ffn-model", experts=False)
    stack = contextlib.ExitStack()
    port, control_port = stack.enter_context(held_ports(["127.0.0.1"] * 2))
    control = f"tcp://127.0.0.1:{control_port}"
    config = write_config(
        folder / "deployment.yaml",
        {
            "model": str(model),
            "served_model_name": "model",
            "attention": {
                **SETTINGS,
                "max_num_batched_tokens": 128,
                "port": 0,
                "vllm_args": [BLOCK],
            },
            "ffn": {"instances": 2, "threads": 1},
            "pipeline": {"depth": 3, "min_rows": 1},
            "transport": {"backend": "tcp"},
            "control": {"keys": str(keys)},
            "gateway": {"port": port},
        },
    )

    with stack:
        roles: dict[str, Role] = {}

        def start(name: str, *argv: str) -> None:
            command, _, index = name.partition("-")
            which = ["--index", index] if index else []
            argv = (command, config, "--control", control, *which, *argv)
            roles[name] = stack.enter_context(role(name, *argv, folder=folder))

        start("control")
        start("gateway")
        start("ffn-0", "--set", f"model={only_experts}")
        start("ffn-1", "--set", f"model={only_experts}")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("OMP_NUM_THREADS", "1")
            start("attention-0", "--set", f"model={without_experts}")
        url = f"http://127.0.0.1:{port}"

        def healthy() -> bool:
            for one in roles.values():
                assert one.process.poll() is None, one.log.read_text()[-3000:]
            return answers(f"{url}/health")

        wait_until(healthy, 200, "the deployment is healthy")
        pid = roles["control"].process.pid
        server = Server(url, "model", roles["attention-0"].log, control, pid)
        yield ByHand(server, roles, folder, keys)


@pytest.mark.long
def test_each_side_needs_its_own_weights_only(by_hand: ByHand, references: References) -> None:
    same_tokens(by_hand.server, references(FAMILY), "by hand")


def test_no_weight_of_the_other_side_is_used(by_hand: ByHand) -> None:
    """Any of them would make every log-probability NaN."""
    assert all(math.isfinite(value) for value in score(by_hand.server, SCORED[1]))


def test_attention_and_ffn_are_connected_over_tcp(by_hand: ByHand) -> None:
    for name in ("ffn-0", "ffn-1"):
        text = by_hand.roles[name].log.read_text()
        assert "attention-0 joined" in text and ", tcp)" in text


def test_bytes_read_add_up_to_the_checkpoint(by_hand: ByHand, tiny_models: Models) -> None:
    """Each FFN instance reads half of the routed experts and half of the shared expert."""
    weights_are_apart(by_hand.metrics(), tiny_models(FAMILY), ffn_instances=2)


def test_operator_needs_the_keys(by_hand: ByHand) -> None:
    ask = ("ctl", "--control", by_hand.server.control)
    known = afd(*ask, "--keys", str(by_hand.keys), "status", folder=_apart(by_hand))
    assert known.status == 0
    for member in ("attention-0", "ffn-0", "ffn-1", "gateway-0"):
        (line,) = [line for line in known.out.splitlines() if line.startswith(member)]
        assert "ready" in line
    unknown = afd(*ask, "status", folder=_apart(by_hand))
    assert "keys" in unknown.error() and unknown.seconds < 15


def test_each_role_ends_on_sigterm(by_hand: ByHand) -> None:
    """A role exits with 0 and leaves nothing behind; the others go on without it."""
    group = os.getpgid(by_hand.roles["attention-0"].process.pid)
    for name in ("gateway", "attention-0", "ffn-1", "ffn-0", "control"):
        status = by_hand.roles[name].stop()
        assert status == 0, f"{name}: {by_hand.roles[name].log.read_text()[-2000:]}"
    assert group and processes_of(by_hand.folder) == {}
    left = [path.name for path in by_hand.folder.iterdir() if path.name.startswith("afd-")]
    assert left == []
    with pytest.raises(OSError):
        urllib.request.urlopen(f"{by_hand.server.url}/health", timeout=2)


def _apart(by_hand: ByHand) -> Path:
    """Returns a separate TMPDIR for commands that run beside the roles."""
    folder = by_hand.folder.parent / "commands"
    folder.mkdir(exist_ok=True)
    return folder
