"""User mistakes: one sentence with cause and remedy, quickly, and nothing left running."""

import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from deployments import SETTINGS, Models
from roles import Ended, Role, afd, role, write_config

from afd.control.keys import CurveKeys
from afd.host.ports import held_ports
from afd_demo.make_model import make_model
from afd_demo.sizes import resolve

pytestmark = pytest.mark.serve

QUICK_S = 20.0  # takes 1 to 2 s on an idle machine
FFN_S = 30.0  # importing torch is slow on a busy machine


@pytest.fixture
def config(tiny_models: Models, tmp_path: Path) -> Iterator[dict[str, object]]:
    CurveKeys.generate().save(tmp_path / "control.keys")
    with held_ports(["127.0.0.1"] * 2) as (port, control_port):
        yield {
            "model": str(tiny_models("qwen3_moe")),
            "attention": {**SETTINGS, "max_num_batched_tokens": 64, "port": 0},
            "ffn": {"backend": "reference", "threads": 1},
            "deadlines": {"start_s": 2},
            "control": {"address": f"tcp://127.0.0.1:{control_port}", "keys": "control.keys"},
            "gateway": {"port": port},
        }


def serve(tmp_path: Path, config: dict[str, object], *more: str) -> str:
    """Returns the sentence with which `afd serve` refuses a configuration."""
    ended = afd("serve", write_config(tmp_path / "d.yaml", config), *more, folder=tmp_path)
    assert ended.status == 2 and ended.seconds < QUICK_S
    assert "Traceback" not in ended.err
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("afd-")] == []
    return ended.error()


def test_missing_model(tmp_path: Path, config: dict[str, object]) -> None:
    error = serve(tmp_path, {**config, "model": "nowhere"})
    assert f"{tmp_path}/nowhere is not a folder" in error and "checkpoint" in error


def test_folder_without_a_model(tmp_path: Path, config: dict[str, object]) -> None:
    assert "has no config.json" in serve(tmp_path, {**config, "model": "."})


def test_unknown_architecture(tmp_path: Path, config: dict[str, object]) -> None:
    (tmp_path / "llama").mkdir()
    text = json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"})
    (tmp_path / "llama" / "config.json").write_text(text)
    error = serve(tmp_path, {**config, "model": "llama"})
    assert "LlamaForCausalLM is not supported" in error and "Qwen3MoeForCausalLM" in error


def test_unknown_key(tmp_path: Path, config: dict[str, object]) -> None:
    error = serve(tmp_path, {**config, "pipeline": {"dept": 2}})
    assert "unknown key pipeline.dept in d.yaml; did you mean depth?" in error


def test_value_out_of_range(tmp_path: Path, config: dict[str, object]) -> None:
    assert "depth" in serve(tmp_path, config, "--set", "pipeline.depth=9")


def test_more_ffn_instances_than_experts(tmp_path: Path, config: dict[str, object]) -> None:
    error = serve(tmp_path, config, "--set", "ffn.instances=9")
    assert "ffn.instances is 9" in error and "use at most 8" in error


@pytest.mark.parametrize("setting", ["gateway.port", "attention.port", "control.address"])
def test_port_taken(tmp_path: Path, config: dict[str, object], setting: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        value = f"tcp://127.0.0.1:{port}" if setting == "control.address" else port
        error = serve(tmp_path, config, "--set", f"{setting}={value}")
    assert f"port {port} is in use" in error and setting in error


def test_no_such_file(tmp_path: Path) -> None:
    ended = afd("serve", str(tmp_path / "none.yaml"), folder=tmp_path)
    assert "no such file" in ended.error() and ended.seconds < QUICK_S


def test_damaged_weights_end_the_start(tmp_path: Path, config: dict[str, object]) -> None:
    """The first role that reads them fails; `afd serve` repeats its error and stops the rest."""
    make_model("qwen3_moe", tmp_path / "cut", resolve("qwen3_moe", "tiny"))
    with (tmp_path / "cut" / "model.safetensors").open("r+b") as file:
        file.truncate(1_000_000)
    changed = {**config, "model": "cut", "deadlines": {"start_s": 60}}
    ended = afd("serve", write_config(tmp_path / "d.yaml", changed), folder=tmp_path)
    assert ended.status == 1 and ended.seconds < FFN_S
    assert "model.safetensors is not a complete safetensors file" in ended.errors[-1]
    assert "control-0" in ended.errors[-1]  # it reads the headers to build the contract


def test_control_plane_that_cannot_be_reached(tmp_path: Path, config: dict[str, object]) -> None:
    path = write_config(tmp_path / "d.yaml", config)
    for name, limit_s in (("gateway", QUICK_S), ("ffn", FFN_S)):
        ended = afd(name, path, folder=tmp_path)
        assert ended.status == 2 and ended.seconds < limit_s
        assert "did not answer within 2 s; is `afd control` running" in ended.error()
        assert "ending the requests" not in ended.err, "there were no requests to end"
    ask = ("ctl", "--control", "tcp://127.0.0.1:1")
    ended = afd(*ask, "--keys", str(tmp_path / "control.keys"), "status", folder=tmp_path)
    assert "tcp://127.0.0.1:1 did not answer" in ended.error() and ended.seconds < QUICK_S
    ended = afd(*ask, "status", folder=tmp_path)
    assert "no deployment of this user on this host listens there" in ended.error()


@pytest.mark.parametrize("name", ["control", "gateway", "ffn", "attention"])
def test_roles_by_hand_need_keys(tmp_path: Path, config: dict[str, object], name: str) -> None:
    path = write_config(tmp_path / "d.yaml", config)
    ended = afd(name, path, "--set", "control.keys=null", folder=tmp_path)
    assert "make a key file with `afd keys FILE`" in ended.error() and ended.seconds < QUICK_S


def test_wrong_keys(tmp_path: Path, config: dict[str, object]) -> None:
    """Keys of another deployment, no keys, and a key file that does not exist."""
    CurveKeys.generate().save(tmp_path / "right.json")
    CurveKeys.generate().save(tmp_path / "wrong.json")
    path = write_config(tmp_path / "d.yaml", config)
    keys = "control.keys={}".format
    with role("control", "control", path, "--set", keys("right.json"), folder=tmp_path) as control:
        control.says("control plane listens on")
        with _apart(tmp_path) as folder:
            wrong = afd("ffn", path, "--set", keys("wrong.json"), folder=folder)
            none = afd("ctl", "--control", _address(config), "status", folder=folder)
            lost = afd("gateway", path, "--set", keys("lost.json"), folder=folder)
        assert control.stop() == 0
    assert "differ; give every role the same control.keys file" in wrong.error()
    assert wrong.seconds < FFN_S
    assert "keys" in none.error() and none.seconds < QUICK_S
    assert "there is no keys file" in lost.error() and lost.seconds < QUICK_S


@pytest.fixture(scope="module")
def half(tiny_models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple]:
    """Runs a control plane and ffn-0 of two, without ffn-1; yields (configuration file, ffn-0)."""
    folder = tmp_path_factory.mktemp("half")
    with contextlib.ExitStack() as stack:
        (control_port,) = stack.enter_context(held_ports(["127.0.0.1"]))
        config = {
            "model": str(tiny_models("qwen3_moe")),
            "attention": {**SETTINGS, "max_num_batched_tokens": 64, "port": 0},
            "ffn": {"instances": 2, "backend": "reference", "threads": 1},
            "deadlines": {"start_s": 10},
            "control": {"address": f"tcp://127.0.0.1:{control_port}", "keys": "control.keys"},
        }
        CurveKeys.generate().save(folder / "control.keys")
        path = write_config(folder / "d.yaml", config)
        stack.enter_context(role("control", "control", path, folder=folder))
        ffn = stack.enter_context(role("ffn-0", "ffn", path, "--index", "0", folder=folder))
        ffn.says("ready: generation")
        yield path, ffn
        assert ffn.stop() == 0


def test_role_that_disagrees_is_refused(half: tuple[str, Role], tmp_path: Path) -> None:
    """The sentence names each setting that differs."""
    path, _ = half
    words = {
        "wire.format=fp8": "wire is fp8 here but exact on ffn-0",
        "attention.max_num_batched_tokens=256": "capacity_rows is 256 here but 64 on ffn-0",
        "attention.dtype=bfloat16": "dtype is bfloat16 here but float32 on ffn-0",
        "pipeline.depth=2": "max_depth is 2 here but 3 on ffn-0",
    }
    changes = [word for change in words for word in ("--set", change)]
    ended = afd("ffn", path, "--index", "1", *changes, folder=tmp_path)
    assert ended.status == 2 and ended.seconds < FFN_S
    assert "ffn-1 refused" in ended.error()
    assert [text for text in words.values() if text not in ended.error()] == []
    assert "start every role from the same deployment file" in ended.error()


def test_other_weights_are_refused(half: tuple[str, Role], tmp_path: Path) -> None:
    """The other checkpoint has the same shapes, as a fine-tune would."""
    make_model("qwen3_moe", tmp_path / "tuned", resolve("qwen3_moe", "tiny"), seed=1)
    path, _ = half
    ended = afd("ffn", path, "--index", "1", "--set", f"model={tmp_path}/tuned", folder=tmp_path)
    assert "model_hash is" in ended.error() and "on ffn-0" in ended.error()
    assert "give every role the same checkpoint" in ended.error()


def test_second_process_of_an_index_is_refused(half: tuple[str, Role], tmp_path: Path) -> None:
    path, ffn = half
    ended = afd("ffn", path, "--index", "0", folder=tmp_path)
    assert f"ffn-0 is already running as pid {ffn.process.pid}" in ended.error()
    assert ffn.process.poll() is None
    other = afd("ffn", path, "--index", "2", folder=tmp_path)
    assert "--index 2 does not exist with ffn.instances = 2" in other.error()


@pytest.mark.long
def test_attention_fails_if_an_ffn_instance_never_comes(
    half: tuple[str, Role], tmp_path: Path
) -> None:
    path, _ = half
    ended: Ended = afd(
        "attention", path, "--set", "deadlines.start_s=3", folder=tmp_path, deadline_s=150
    )
    assert ended.status != 0
    assert "ffn-1 did not come within 3 s; registered now:" in ended.error()
    assert "ffn-0 (ready)" in ended.error()


@contextlib.contextmanager
def _apart(folder: Path) -> Iterator[Path]:
    """Yields a separate TMPDIR for commands that run beside a role."""
    path = folder.with_name(f"{folder.name}-apart")
    path.mkdir()
    yield path


def _address(config: dict[str, object]) -> str:
    control = config["control"]
    assert isinstance(control, dict)
    return str(control["address"])
