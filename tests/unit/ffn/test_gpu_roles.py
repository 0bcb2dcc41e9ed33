"""Settings of GPU roles: devices, slots, command line, rows per micro-batch."""

import pytest

from afd.config.deployment import Deployment
from afd.config.resolve import region_options, replays
from afd.config.roles import RoleSpec
from afd.devices import CUDA
from afd.errors import ConfigError
from afd.models import qwen3_moe
from afd.schedule import padded_depth, split_rows, stream_sequence, walk
from afd.topology import gpu_order, visible_gpus
from attention_worker.ranks import own_gpu_first
from ffn_worker.main import sizes_up_to


def deployed(checkpoint="m", **sections) -> Deployment:
    sections.setdefault("attention", {})["device"] = "cuda"
    sections.setdefault("ffn", {})["device"] = "cuda"
    return Deployment.from_plain({"model": str(checkpoint), **sections})


def test_every_instance_sees_its_own_gpu_first_and_all_others():
    orders = [gpu_order(own, 4) for own in range(4)]
    assert [order[0] for order in orders] == [0, 1, 2, 3]
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)


def test_every_rank_of_an_ffn_instance_has_a_gpu():
    deployment = deployed(ffn={"instances": 2, "tp": 2})
    specs = [RoleSpec("attention", 0, deployment, "x")]
    specs += [RoleSpec("ffn", j, deployment, "x", rank=r) for j in range(2) for r in range(2)]
    visible = [spec.gpu_environment({})["CUDA_VISIBLE_DEVICES"] for spec in specs]
    assert [gpus[0] for gpus in visible] == list("01234")
    assert [spec.id for spec in specs[1:]] == ["ffn-0", "ffn-0.1", "ffn-1", "ffn-1.1"]


def test_an_attention_instance_sees_the_gpus_of_its_ranks_first():
    deployment = deployed(attention={"instances": 2, "tp": 2}, ffn={"tp": 2})
    specs = [RoleSpec("attention", i, deployment, "x") for i in range(2)]
    specs += [RoleSpec("ffn", 0, deployment, "x", rank=rank) for rank in range(2)]
    visible = [spec.gpu_environment({}) for spec in specs]
    assert [v["CUDA_VISIBLE_DEVICES"][:3] for v in visible] == ["0,1", "2,3", "4,0", "5,0"]
    second = own_gpu_first(CUDA.visible_variables, visible[1], 1)
    assert second == {"CUDA_VISIBLE_DEVICES": "3,2,0,1,4,5"}
    assert not replays(deployment, qwen3_moe.FAMILY)
    with pytest.raises(ValueError, match=r"gpus is 1 but attention\.tp is 2"):
        deployed(gpus=1, attention={"tp": 2})


def test_gpus_are_numbered_within_cuda_visible_devices():
    assert visible_gpus(CUDA, (1, 0), {}) == {"CUDA_VISIBLE_DEVICES": "1,0"}
    allowed = {"CUDA_VISIBLE_DEVICES": "4,6,7"}
    assert visible_gpus(CUDA, (1, 0), allowed) == {"CUDA_VISIBLE_DEVICES": "6,4"}
    with pytest.raises(ConfigError, match=r"takes 2 GPUs but CUDA_VISIBLE_DEVICES=3"):
        visible_gpus(CUDA, (1, 0), {"CUDA_VISIBLE_DEVICES": "3"})


def test_instances_share_gpus_if_the_deployment_says_so():
    deployment = deployed(gpus=2, attention={"instances": 2}, ffn={"instances": 2})
    specs = [RoleSpec(role, i, deployment, "x") for role in ("attention", "ffn") for i in (0, 1)]
    visible = [spec.gpu_environment({})["CUDA_VISIBLE_DEVICES"] for spec in specs]
    assert visible == ["0,1", "1,0", "0,1", "1,0"]
    assert deployed(gpus=None).gpus is None
    one = RoleSpec("ffn", 0, deployed(gpus=1), "x")
    assert one.gpu_environment({"CUDA_VISIBLE_DEVICES": "5,6"}) == {"CUDA_VISIBLE_DEVICES": "5"}


@pytest.mark.parametrize(
    "sections,said",
    [
        ({"gpus": 3}, "2 GPU processes"),
        ({"gpus": 1, "ffn": {"tp": 2}}, "need a GPU each"),
    ],
)
def test_impossible_numbers_of_gpus_are_refused(sections, said):
    with pytest.raises(ValueError, match=said):
        deployed(**sections)
    with pytest.raises(ValueError, match="device is cpu"):
        Deployment.from_plain({"model": "m", "gpus": 1})


def test_the_environment_of_a_role():
    spec = RoleSpec("ffn", 0, deployed(), "tcp://127.0.0.1:1")
    assert spec.gpu_environment({}) == {"CUDA_VISIBLE_DEVICES": "1,0"}
    on_cpu = RoleSpec("ffn", 0, Deployment.from_plain({"model": "m"}), "tcp://127.0.0.1:1")
    assert on_cpu.gpu_environment({"CUDA_VISIBLE_DEVICES": "0"}) == {}


def test_slots_of_a_gpu_role_are_on_its_gpu():
    assert region_options(deployed(), "cuda") == {"device": "cuda:0", "tcp_host": "127.0.0.1"}
    only_ipc = deployed(transport={"backend": "ipc"})
    assert region_options(only_ipc, "cuda") == {"device": "cuda:0", "tcp_host": None}
    cpu = Deployment.from_plain({"model": "m"})
    assert region_options(cpu, "cpu") == {"device": "cpu", "tcp_host": "127.0.0.1"}


def test_devices_and_transport_must_fit():
    for device in ("cpu", "cuda"):
        for backend in ("auto", "tcp"):
            sides = {"attention": {"device": device}, "ffn": {"device": "cuda"}}
            Deployment.from_plain({"model": "m", "transport": {"backend": backend}, **sides})
    with pytest.raises(ValueError, match="use auto, ipc, verbs or tcp"):
        deployed(transport={"backend": "shm"})
    mixed = {"model": "m", "ffn": {"device": "cuda", "instances": 2}}
    with pytest.raises(ValueError, match="ipc connects devices of one kind"):
        Deployment.from_plain({**mixed, "transport": {"backend": "ipc"}})
    assert Deployment.from_plain({**mixed, "gpus": 2}).gpus == 2
    with pytest.raises(ValueError, match="has only 2 GPU processes"):
        Deployment.from_plain({**mixed, "gpus": 3})
    with pytest.raises(ValueError, match="backend vllm_cuda runs on device cuda"):
        Deployment.from_plain({"model": "m", "ffn": {"backend": "vllm_cuda"}})


@pytest.mark.parametrize(
    "x,y,wire,wanted",
    [
        (1, 1, "fp8", True),
        (2, 2, "exact", True),
        (3, 1, "exact", True),
        (1, 1, "mxfp4", True),
    ],
)
def test_which_deployments_replay_graphs(x, y, wire, wanted):
    deployment = deployed(attention={"instances": x}, ffn={"instances": y}, wire={"format": wire})
    assert replays(deployment, qwen3_moe.FAMILY) is wanted
    assert not replays(deployed(pipeline={"graphs": False}), qwen3_moe.FAMILY)
    assert not replays(Deployment.from_plain({"model": "m"}), qwen3_moe.FAMILY)


def test_command_line_of_a_gpu_attention_instance(tiny_models):
    from attention_worker.vllm_hooks.command import attention_command

    model = tiny_models("qwen3_moe")
    spec = RoleSpec("attention", 0, deployed(model), "tcp://127.0.0.1:1", api_port=9)
    argv, environment = attention_command(spec, {})
    assert "--worker-cls=attention_worker.vllm_hooks.gpu.AfdGpuWorker" in argv
    assert any("FULL_DECODE_ONLY" in arg for arg in argv) and "--enforce-eager" not in argv
    assert environment["CUDA_VISIBLE_DEVICES"] == "0,1"
    eager = RoleSpec("attention", 0, deployed(model, pipeline={"graphs": False}), "x", api_port=9)
    assert "--enforce-eager" in attention_command(eager, {})[0]


def test_rows_are_split_as_in_vllm():
    assert split_rows(10, 3) == (3, 3, 4)
    assert split_rows(2, 1) == (2,)
    utils = pytest.importorskip("vllm.v1.worker.ubatch_utils")
    import numpy as np

    for rows in range(3, 40):
        for depth in range(1, 4):
            ones = np.ones(rows, dtype=np.int32)
            pieces, _ = utils.maybe_create_ubatch_slices(True, ones, rows, rows, depth)
            assert tuple(piece.num_tokens for piece in pieces) == split_rows(rows, depth)


def test_no_micro_batch_of_a_padded_step_is_all_padding():
    for padded in range(1, 65):
        for tokens in range(max(1, padded - 15), padded + 1):
            for depth in (1, 2, 3):
                chosen = padded_depth(depth, tokens, padded)
                assert 1 <= chosen <= depth
                assert chosen == 1 or padded // chosen * (chosen - 1) < tokens
    assert padded_depth(3, 24, 24) == 3 and padded_depth(3, 9, 16) == 2


def test_doorbells_of_a_step_are_distinct_and_outside_sequence_numbers():
    sequences = [stream_sequence(n + 1) for n, _ in enumerate(walk(range(100), 3))]
    assert len(set(sequences)) == 300
    assert all(2**31 < sequence < 2**32 for sequence in sequences)


def test_kernels_are_compiled_for_every_power_of_two_and_the_largest_batch():
    assert sizes_up_to(1) == [1]
    assert sizes_up_to(8) == [1, 2, 4, 8]
    assert sizes_up_to(9) == [1, 2, 4, 8, 9]
