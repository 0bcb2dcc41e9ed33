"""The section prefill, and the command lines that follow from it."""

import json
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from afd.config.deployment import Deployment, load_config
from afd.config.roles import RoleSpec, load_role
from afd.errors import ConfigError
from afd.host.amx_torch import ask_for_amx
from afd_demo.make_model import make_model
from afd_demo.sizes import resolve
from afd_launch.roles_of_host import Ports, role_specs, stages
from afd_launch.serve import summary
from attention_worker.vllm_hooks import transfer
from attention_worker.vllm_hooks.colocated import PLUGIN, prefill_command
from attention_worker.vllm_hooks.command import attention_command
from attention_worker.vllm_hooks.versions import layout


def deployment(**sections: object) -> Deployment:
    return Deployment.from_plain({"model": "m", **sections})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prefill: {instances: -1}", "prefill.instances"),
        ("prefill: {by: somebody}", "prefill.by"),
        ("prefill: {connector: ExampleConnector}", "prefill.connector"),
        ("prefill: {instances: 1, by: afd}", "leaves none of 1 attention instances"),
        ("prefill: {by: afd, port: 9}", "port is for colocated instances, but by is afd"),
        ("prefill: {vllm_args: [--port=1]}", "vllm_args has --port, which AFD sets"),
        ("prefill: {instances: 1, port: 8100}", "gives an instance port 8100"),
        ("prefill: {instances: 2, port: 7999}", "gives an instance port 8000"),
        (
            "prefill: {instances: 1}\nattention: {speculation: {method: mtp}}",
            "does not move the KV cache of draft layers",
        ),
        (
            "prefill: {instances: 1}\nattention: {tp: 2}",
            "moves the KV cache of whole instances, but attention.tp is 2",
        ),
        (
            "prefill: {instances: 1}\nhosts: [{name: a, address: 10.0.0.1}]",
            "starts its instances on one machine",
        ),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(f"model: m\n{text}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_an_empty_section_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text("model: m\nprefill:\n")
    assert load_config(path).prefill.instances == 0


def test_the_last_attention_instances_prefill() -> None:
    by_afd = deployment(
        attention={"instances": 3, "max_instances": 5}, prefill={"instances": 2, "by": "afd"}
    )
    assert [by_afd.prefills(i) for i in range(5)] == [False, True, True, False, False]
    colocated = deployment(attention={"instances": 2}, prefill={"instances": 2})
    assert not colocated.prefills(0) and not colocated.prefills(1)
    assert summary(by_afd).startswith("model m, 2 prefill + 1 attention + 1 FFN")
    assert summary(colocated).startswith("model m, 2 prefill + 2 attention + 1 FFN")


def test_colocated_instances_start_with_the_attention_instances(tmp_path: Path) -> None:
    plan = deployment(prefill={"instances": 2})
    ports = Ports(8000, (8100,), "tcp://127.0.0.1:5", (8200, 8201), (7000,), (7001, 7002))
    specs = role_specs(plan, ports, [0, 1])
    found = {stage.commands[0].name.partition("-")[0]: stage for stage in stages(specs, tmp_path)}
    assert [*found] == ["control", "ffn", "prefill", "attention", "gateway"]
    assert not found["prefill"].awaited and len(found["prefill"].commands) == 2
    second = load_role(tmp_path / "prefill-1.json")
    assert (second.id, second.api_port, second.transfer_port) == ("prefill-1", 8201, 7002)
    assert load_role(tmp_path / "attention-0.json").transfer_port == 7000
    assert load_role(tmp_path / "gateway-0.json").prefill_ports == (8200, 8201)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_model("qwen3_moe", tmp_path / "model", resolve("qwen3_moe", "tiny"))
    return tmp_path / "model"


def transfer_of(argv: list[str]) -> dict[str, object]:
    (told,) = [item for item in argv if item.startswith("--kv-transfer-config=")]
    found: dict[str, object] = json.loads(told.partition("=")[2])
    return found


@pytest.fixture
def nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer.importlib.util, "find_spec", lambda name: object())


@pytest.mark.usefixtures("nixl")
def test_a_colocated_instance_has_the_arguments_of_attention(model: Path) -> None:
    plan = deployment(
        model=str(model),
        attention={"vllm_args": ["--block-size=32"], "dtype": "float32", "max_num_seqs": 7},
        prefill={"instances": 1, "kv_cache_gib": 0.5, "vllm_args": ["--seed=1"], "lease_s": 9},
    )
    spec = RoleSpec("prefill", 0, plan, "x", api_port=8200, transfer_port=7001)
    argv, environment = prefill_command(spec, {"PATH": "/bin"})
    assert {"--block-size=32", "--dtype=float32", "--max-num-seqs=7", "--port=8200"} <= {*argv}
    assert argv[-2:] == [f"--kv-cache-memory-bytes={2**29}", "--seed=1"]
    assert not any("afd" in item.lower() or "middleware" in item for item in argv)
    assert environment["VLLM_PLUGINS"] == PLUGIN and environment["PATH"] == "/bin"
    (plugin,) = entry_points(group="vllm.general_plugins", name=PLUGIN)
    assert plugin.load() is ask_for_amx
    assert transfer_of(argv) == {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_producer",
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"kv_lease_duration": 9},
    }
    assert environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "7001"
    assert environment["UCX_NET_DEVICES"] == "lo"


@pytest.mark.usefixtures("nixl")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_colocated_instance_is_no_role_of_ours(model: Path, device: str) -> None:
    plan = deployment(model=str(model), attention={"device": device}, prefill={"instances": 1})
    spec = RoleSpec("prefill", 0, plan, "x", api_port=8200, transfer_port=7001)
    argv, _ = prefill_command(spec, {})
    assert argv[1:3] == ["-m", layout().server_module]


@pytest.mark.usefixtures("nixl")
def test_an_attention_instance_fetches_unless_it_prefills(model: Path) -> None:
    plan = deployment(
        model=str(model),
        attention={"instances": 2, "host": "10.0.0.1"},
        prefill={"instances": 1, "by": "afd"},
    )
    roles = []
    for index in (0, 1):
        spec = RoleSpec("attention", index, plan, "x", api_port=9, transfer_port=8)
        argv, environment = attention_command(spec, {})
        roles.append(transfer_of(argv)["kv_role"])
        assert environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "10.0.0.1"
        assert "UCX_NET_DEVICES" not in environment
    assert roles == ["kv_consumer", "kv_producer"]
    alone = RoleSpec("attention", 0, deployment(model=str(model)), "x", api_port=9)
    argv, environment = attention_command(alone, {})
    assert not any("kv-transfer" in item for item in argv)
    assert not any("NIXL" in name for name in environment)


def test_a_missing_package_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer.importlib.util, "find_spec", lambda name: None)
    plan = deployment(model=str(model), prefill={"instances": 1})
    with pytest.raises(ConfigError, match="package nixl, which is not installed"):
        attention_command(RoleSpec("attention", 0, plan, "x"), {})


@pytest.mark.usefixtures("nixl")
def test_mori_reads_and_has_ports_of_its_own(model: Path) -> None:
    prefill = {"instances": 1, "connector": "MoRIIOConnector", "connector_config": {"backend": "x"}}
    plan = deployment(model=str(model), prefill=prefill)
    spec = RoleSpec("prefill", 0, plan, "x", api_port=8200, transfer_port=7001)
    argv, environment = prefill_command(spec, {})
    config = transfer_of(argv)
    assert config["kv_connector"] == "MoRIIOConnector"
    assert config["kv_connector_extra_config"] == {
        "read_mode": "true",
        "host_ip": "127.0.0.1",
        "proxy_ip": "",
        "proxy_ping_port": 0,
        "http_port": 8200,
        "handshake_port": 7001,
        "notify_port": 61069,
        "backend": "x",
    }
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT" not in environment
