"""What an instance needs from a Ray cluster and what it runs there. Needs no Ray."""

from pathlib import Path

import yaml

from afd.config.deployment import Deployment, load_config
from afd.control.messages import Member, Members, Seat
from afd_launch.ray_cluster.placed import wish_for
from afd_launch.ray_cluster.plan import Instance, instances_of

PLAIN = {
    "model": "/model",
    "attention": {"instances": 2, "device": "cuda"},
    "ffn": {"instances": 2, "tp": 2, "device": "cuda"},
    "control": {"address": "tcp://10.0.0.1:5555", "keys": "control.keys"},
}


def test_bundles_hold_all_ranks_of_an_instance() -> None:
    found = [(one.name, one.bundle(1.5)) for one in instances_of(Deployment.from_plain(PLAIN))]
    assert found == [
        ("ffn-0", {"CPU": 3.0, "GPU": 2.0}),
        ("ffn-1", {"CPU": 3.0, "GPU": 2.0}),
        ("attention-0", {"CPU": 1.5, "GPU": 1.0}),
        ("attention-1", {"CPU": 1.5, "GPU": 1.0}),
    ]
    on_cpus = Deployment.from_plain({"model": "/model"})
    assert [one.bundle(1.0) for one in instances_of(on_cpus)] == [{"CPU": 1.0}] * 2


def test_a_rank_numbers_the_gpus_that_ray_gives_its_instance(tmp_path: Path) -> None:
    """Ray hides the other GPUs of the node, so the first one of an instance is number 0."""
    from afd_launch.role import standalone_spec

    file = tmp_path / "deployment.yaml"
    file.write_text(yaml.safe_dump(PLAIN))
    instance = instances_of(Deployment.from_plain(PLAIN))[1]
    for rank, argv in enumerate(instance.arguments("10.0.0.9", "tcp://10.0.0.1:5555", "/f")):
        overrides = [argv[i + 1] for i, word in enumerate(argv) if word == "--set"]
        deployment = load_config(file, overrides)
        assert argv[:4] == ["ffn", "/f/deployment.yaml", "--index", "1"]
        spec = standalone_spec(deployment, "ffn", 1, None, rank)
        assert spec.deployment.transport.host == "10.0.0.9"
        seen = spec.gpu_environment({"CUDA_VISIBLE_DEVICES": "4,6"})["CUDA_VISIBLE_DEVICES"]
        assert seen == ("4,6" if rank == 0 else "6,4")
        assert str(deployment.control.keys) == f"/f/{instance.members[rank]}.keys"


def test_operators_wishes_reach_the_instance_that_they_name() -> None:
    attention, ffn = Instance("attention", 1, 1, 0), Instance("ffn", 0, 2, 0)

    def wish(instance: Instance, *seats: Seat, generation: int = 7) -> str:
        members = (Member(instance.role, instance.index, generation=generation),)
        return wish_for(Members(members=members, seats=seats), instance)

    assert wish(ffn, Seat("ffn-0")) == "run"
    assert wish(ffn) == wish(attention) == "away", "removed, or not added yet"
    assert wish(attention, Seat("attention-1")) == "run"
    assert wish(attention, Seat("attention-1", "drain")) == "run"
    assert wish(attention, Seat("attention-1", "remove")) == "leave"
    assert wish(attention, Seat("attention-0"), Seat("attention-1", "restart", 7)) == "leave"
    assert wish(ffn, Seat("ffn-0", "restart", 7)) == "leave"
    assert wish(ffn, Seat("ffn-0", "restart", 7), generation=8) == "run", "it has restarted"
