"""The deployment file: defaults, overrides, and an error with a remedy for every mistake."""

import dataclasses
import json
import stat
from pathlib import Path

import pytest
from pydantic import ValidationError

from afd.config.deployment import Deployment, load_config
from afd.config.resolve import check_model
from afd.config.roles import RoleSpec, gpu_processes, load_role
from afd.errors import ConfigError


@pytest.fixture
def write(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "demo.yaml"
        path.write_text(text)
        return path

    return write


def test_defaults_equal_the_documented_ones(write, tmp_path):
    deployment = load_config(write("model: models/small-moe\ngpus: null\n"))
    assert deployment.model == tmp_path / "models" / "small-moe"
    assert deployment.served_model_name == "small-moe"
    assert deployment.attention.api_ports() == (8100,)
    assert deployment.attention.cpus == "auto" and deployment.attention.vllm_args == ()
    assert deployment.ffn.step_wait_ms == 10.0 and deployment.ffn.late_ms == 1000.0
    assert (deployment.depth, deployment.pipeline.max_depth) == ("auto", 3)
    assert deployment.pipeline.min_rows == 4
    assert deployment.wire.format == "exact" and deployment.transport.backend == "auto"
    assert deployment.wire.format == "exact" and deployment.wire.fp8 == "auto"
    assert deployment.control.address == "auto" and deployment.control.keys is None
    assert (deployment.gateway.host, deployment.gateway.port) == ("127.0.0.1", 8000)
    assert deployment.deadlines.ffn_s == 60.0 and deployment.deadlines.stuck_s == 20.0
    assert deployment.restart.max_restarts == 3


@pytest.mark.parametrize(
    ("attention", "ffn", "depth"), [("cpu", "cpu", "auto"), ("cuda", "cuda", 3), ("cuda", "cpu", 3)]
)
def test_the_default_depth_is_measured_on_cpus(write, attention, ffn, depth):
    text = f"model: m\nattention: {{device: {attention}}}\nffn: {{device: {ffn}}}\n"
    assert load_config(write(text)).depth == depth
    assert load_config(write(text + "pipeline: {depth: 2}\n")).depth == 2


def test_all_sections_are_read(write, tmp_path):
    text = """
model: /models/x
served_model_name: chat
attention: {instances: 2, dtype: float32, port: 9100, cpus: [[0, 1], [2]], vllm_args: [--seed=1]}
ffn: {instances: 3, backend: torch, threads: 4, step_wait_ms: 5}
pipeline: {depth: 2, min_rows: 8}
wire: {format: fp8}
transport: {backend: tcp, host: 10.0.0.1}
control: {address: "tcp://10.0.0.1:5555", keys: secret/keys.json, heartbeat_s: 1, timeout_s: 5}
gateway:
deadlines: {start_s: 20}
metrics: {enabled: false}
"""
    deployment = load_config(write(text))
    assert deployment.attention.cpus == ((0, 1), (2,))
    assert deployment.attention.api_ports() == (9100, 9101)
    assert deployment.ffn.threads == 4 and deployment.ffn.step_wait_ms == 5.0
    assert deployment.control.keys == tmp_path / "secret" / "keys.json"
    assert deployment.gateway.port == 8000  # an empty section keeps its defaults
    assert Deployment.from_plain(json.loads(json.dumps(deployment.plain()))) == deployment


def test_deployment_cannot_be_changed(write):
    deployment = load_config(write("model: m\n"))
    with pytest.raises(ValidationError):
        deployment.pipeline.depth = 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "model: m\nattention: {max_model_length: 3}",
            "unknown key attention.max_model_length in demo.yaml; did you mean max_model_len?",
        ),
        ("modle: m", "unknown key modle in demo.yaml; did you mean model?"),
        ("model: m\ndepth: 3", "unknown key depth in demo.yaml; did you mean pipeline.depth?"),
        (
            "model: m\nwire: {zzz: 1}",
            "unknown key wire.zzz in demo.yaml; valid keys here are format, fp8",
        ),
        ("ffn: {instances: 1}", "model is missing in demo.yaml; add the line model: VALUE"),
        (
            "model: m\npipeline: {depth: 4}",
            "pipeline.depth in demo.yaml is 4; it must be auto or a whole number from 1 to 3",
        ),
        (
            'model: m\npipeline: {depth: "2"}',
            'pipeline.depth in demo.yaml is "2"; it must be auto or a whole number from 1 to 3',
        ),
        (
            "model: m\nffn: {instances: true}",
            "ffn.instances in demo.yaml is true; it must be a whole number of at least 1",
        ),
        (
            "model: m\nwire: {format: fp4}",
            'wire.format in demo.yaml is "fp4"; it must be exact, fp8 or mxfp4',
        ),
        (
            "model: m\nmetrics: {enabled: 3}",
            "metrics.enabled in demo.yaml is 3; it must be true or false",
        ),
        ("model: m\npipeline: 3", "pipeline in demo.yaml is 3; it must be a section with keys"),
        (
            "model: m\nffn: {threads: 0}",
            "ffn.threads in demo.yaml is 0; it must be auto (one per core",
        ),
        (
            "model: m\nffn: {cpus: 3}",
            "ffn.cpus in demo.yaml is 3; it must be auto or a list of core",
        ),
        (
            "model: m\nffn: {cpus: [[0], [1]]}",
            "ffn.cpus has 2 core lists for 1 processes; give one list each",
        ),
        (
            "model: m\nffn: {tp: 2, cpus: [[0]]}",
            "ffn.cpus has 1 core lists for 2 processes; give one list each",
        ),
        (
            "model: m\nffn: {reduce: int4}",
            "ffn.reduce int4 needs several ranks to add up, but tp is 1",
        ),
        (
            "model: m\nattention: {speculation: {method: eagle3}}",
            "method eagle3 needs a draft model; set model to its folder",
        ),
        (
            "model: m\nattention: {speculation: {method: ngram, model: head}}",
            "method ngram has no draft model of its own; remove model",
        ),
        (
            "model: m\nattention: {vllm_args: --seed}",
            'attention.vllm_args in demo.yaml is "--seed"; it must be a list of strings',
        ),
        (
            "model: m\nattention: {kv_cache_gib: .inf}",
            "attention.kv_cache_gib in demo.yaml is Infinity; it must be a number above 0",
        ),
        (
            "model: m\ncontrol: {address: foo}",
            'control.address in demo.yaml is "foo"; it must be auto or tcp://HOST:PORT',
        ),
        (
            "model: m\ncontrol: {timeout_s: 0.6}",
            "control.timeout_s 0.6 is below two heartbeats of 0.5 s",
        ),
        ("model: m\ngateway: {port: 8100}", "gateway.port 8100 is also the port of an attention"),
        (
            "model: m\nffn: {backend: vllm_cpu, device: cuda}",
            "ffn.backend vllm_cpu runs on device cpu",
        ),
        (
            "model: m\nffn: {backend: tritn}",
            'ffn.backend in demo.yaml is "tritn"; it must be auto, ',
        ),
        ("model: m\nffn: {backend: tritn}", "; did you mean triton?"),
        (
            "model: m\ntransport: {backend: tpc}",
            'transport.backend in demo.yaml is "tpc"; it must be auto, ipc, shm, verbs or tcp',
        ),
        (
            "model: m\nffn: {tp: 2, reduce: int5}",
            'ffn.reduce in demo.yaml is "int5"; it must be exact, ',
        ),
        (
            "model: m\nattention: {device: gpu}",
            'attention.device in demo.yaml is "gpu"; it must be cpu, cuda or rocm',
        ),
        (
            "model: m\nattention: {kernel: mqa}",
            "attention.kernel mqa runs on device cuda, not cpu; leave kernel at vllm",
        ),
        (
            "model: m\nattention: {max_num_batched_tokens: 8}",
            "attention.max_num_batched_tokens 8 is below max_num_seqs 64",
        ),
        ("model: 3", "model in demo.yaml is 3; it must be a path"),
        ("model: m\nffn: {instances: 0, late_ms: x}", "(1 more mistake in the file)"),
        ("a: [", "demo.yaml is not YAML: "),
        (
            "model: m\nffn: {instances: 2}\nffn: {tp: 2}",
            "demo.yaml has the key ffn twice, on lines 2 and 3; remove one of them",
        ),
        (
            "model: m\nffn:\n  tp: 2\n  instances: 1\n  'tp': 1\n",
            "demo.yaml has the key tp twice, on lines 3 and 5; remove one of them",
        ),
        ("", "demo.yaml is not a deployment file"),
    ],
)
def test_mistakes_are_one_sentence_with_a_remedy(write, text, message):
    with pytest.raises(ConfigError) as caught:
        load_config(write(text))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "verbs,message",
    [
        ("{}", "transport.backend verbs needs verbs.ports, the RDMA ports to use"),
        ("{ports: [mlx5_0:0]}", "transport.verbs.ports in demo.yaml is"),
        ("{ports: mlx5_0}", "a list of at most 8 RDMA ports, such as [mlx5_0:1, mlx5_1:1]"),
        ("{ports: [a], retry: 7}", "transport.verbs.retry in demo.yaml is 7"),
        ("{ports: [a], gid_index: first}", "auto (the first RoCE v2 address)"),
        ("{ports: [a], qp_per_port: 2}", "did you mean qps_per_port?"),
    ],
)
def test_mistakes_about_rdma(write, verbs, message):
    with pytest.raises(ConfigError) as refused:
        load_config(write(f"model: m\ntransport: {{backend: verbs, verbs: {verbs}}}\n"))
    assert message in str(refused.value)


@pytest.mark.parametrize("given,argument", [("auto", 0), ("1", 1), ("8", 8)])
def test_connections_of_tcp(write, given, argument):
    text = f"model: m\ntransport: {{tcp: {{connections: {given}}}}}\n"
    assert load_config(write(text)).transport.tcp_connections == argument
    with pytest.raises(ConfigError, match="auto \\(one per 4 usable CPUs, at most 4\\) or 1 to 8"):
        load_config(write(text), ["transport.tcp.connections=9"])


def test_rdma_ports_of_each_role(write):
    verbs = "{ports: [a0], ffn_ports: ['f0:1', f1], gid_index: 3}"
    text = f"model: m\ntransport: {{host: 10.0.0.1, verbs: {verbs}}}\n"
    transport = load_config(write(text)).transport
    assert transport.tcp_host == "10.0.0.1"
    options = transport.verbs_keywords("ffn")
    assert options["ports"] == ["f0:1", "f1"] and options["gid_index"] == 3
    assert options["host"] == "10.0.0.1"
    assert transport.verbs_keywords("attention")["ports"] == ["a0"]
    for backend in ("shm", "tcp"):
        other = load_config(write(text), [f"transport.backend={backend}"]).transport
        assert other.verbs_keywords("ffn") is None
        assert (other.tcp_host is None) == (backend == "shm")
    assert load_config(write("model: m\n")).transport.verbs_keywords("ffn") is None


def test_a_key_may_replace_one_of_a_merged_section(write):
    text = (
        "model: m\nattention: &both {instances: 2, device: cpu}\nffn: {<<: *both, instances: 1}\n"
    )
    deployment = load_config(write(text))
    assert (deployment.attention.instances, deployment.ffn.instances) == (2, 1)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no such file: .*absent\.yaml"):
        load_config(tmp_path / "absent.yaml")


def test_overrides(write):
    path = write("model: m\npipeline: {depth: 1}\n")
    overrides = [
        "pipeline.depth=2",
        "ffn.instances=2",
        "attention.vllm_args=[--seed=3]",
        "model=/x/y",
    ]
    deployment = load_config(path, overrides)
    assert deployment.pipeline.depth == 2 and deployment.ffn.instances == 2
    assert deployment.attention.vllm_args == ("--seed=3",)
    assert (deployment.model, deployment.served_model_name) == (Path("/x/y"), "y")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("pipeline.depth", "is not KEY=VALUE"),
        ("=3", "is not KEY=VALUE"),
        ("pipeline.depht=2", "did you mean depth?"),
        ("pipeline.depth=9", "from 1 to 3"),
        ("model.name=3", "model in demo.yaml is a value, not a section"),
        ("model=[", "the value is not YAML"),
        ("ffn={tp: 1, tp: 2}", "tp is there twice; remove one of them"),
    ],
)
def test_wrong_overrides(write, override, message):
    with pytest.raises(ConfigError, match=r".") as caught:
        load_config(write("model: m\n"), [override])
    assert message in str(caught.value)


MODEL = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "vocab_size": 512,
    "torch_dtype": "bfloat16",
}


def test_more_ffn_instances_than_experts_names_both_numbers(write, tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(MODEL))
    check_model(load_config(write("model: m\nffn: {instances: 4}\n")))
    with pytest.raises(ConfigError, match=r"ffn\.instances is 5 but m has 4 experts.*at most 4"):
        check_model(load_config(write("model: m\nffn: {instances: 5}\n")))


def test_experts_too_narrow_for_the_ranks_name_width_and_remedy(write, tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(MODEL))
    width = MODEL["moe_intermediate_size"]
    most = width // 8
    check_model(load_config(write(f"model: m\nffn: {{tp: {most}, reduce: fp4}}\n")))
    message = rf"width {width} cannot be cut for {most + 1} ranks.*ffn\.tp to {most} or fewer"
    with pytest.raises(ConfigError, match=message):
        check_model(load_config(write(f"model: m\nffn: {{tp: {most + 1}}}\n")))


@pytest.mark.parametrize("make", [True, False])
def test_a_missing_model_names_the_remedy(write, tmp_path, make):
    if make:
        (tmp_path / "m").mkdir()
    message = "has no config.json" if make else "is not a folder"
    with pytest.raises(ConfigError, match=message):
        check_model(load_config(write("model: m\n")))


def test_every_example_is_valid():
    data = Path(__file__).parents[3] / "afd_launch/data"
    found = [data / "demo/demo.yaml", *(data / "examples").glob("*.yaml")]
    assert len(found) > 2
    for path in found:
        assert load_config(path).model.is_absolute()


# -- role files


@pytest.fixture
def spec(write):
    deployment = load_config(write("model: m\nffn: {threads: 3}\ncontrol: {keys: k}\n"))
    keys = deployment.control.keys
    return RoleSpec("ffn", 1, deployment, "tcp://127.0.0.1:5", keys, 0, 9000, (4, 5))


def test_role_file_round_trip_is_private(spec, tmp_path, monkeypatch):
    path = tmp_path / "role.json"
    spec.save(path)
    assert load_role(path) == spec
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    monkeypatch.setenv("AFD_ROLE_FILE", str(path))
    assert load_role().id == "ffn-1"


def test_threads_follow_the_setting_then_the_cores(spec, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert spec.threads == 3
    assert dataclasses.replace(spec, role="attention").threads == 2
    assert dataclasses.replace(spec, role="attention", cpus=()).threads == 7
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    assert dataclasses.replace(spec, role="attention", cpus=()).threads >= 1


def test_a_damaged_role_file_is_one_sentence(tmp_path, monkeypatch):
    path = tmp_path / "role.json"
    path.write_text("{}")
    with pytest.raises(ConfigError, match=r"role file .* cannot be used"):
        load_role(path)
    monkeypatch.delenv("AFD_ROLE_FILE", raising=False)
    with pytest.raises(ConfigError, match="AFD_ROLE_FILE is not set"):
        load_role()


def test_room_for_instances_that_are_added(write):
    text = "model: m\nattention: {instances: 2, max_instances: 4, port: 9100}\n"
    deployment = load_config(write(text))
    assert deployment.attention.capacity == 4
    assert deployment.attention.api_ports() == (9100, 9101, 9102, 9103)
    (place,) = deployment.places()
    assert (place.attention, place.spare) == ((0, 1), (2, 3))
    assert place.has("attention", 3) and not place.has("attention", 4)
    assert load_config(write("model: m\nattention: {instances: 3}\n")).attention.capacity == 3
    with pytest.raises(ConfigError, match="max_instances 1 is below instances 2"):
        load_config(write("model: m\nattention: {instances: 2, max_instances: 1}\n"))


def test_instances_that_can_be_added_have_gpus_of_their_own(write):
    text = "model: m\nattention: {max_instances: 3, device: cuda}\nffn: {device: cuda}\n"
    deployment = load_config(write(text))
    wanted = [("attention", 0, 0), ("ffn", 0, 0), ("attention", 1, 0), ("attention", 2, 0)]
    assert gpu_processes(deployment, "") == wanted
