"""Hosts of a deployment: which host runs what, and what its processes see."""

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from afd.config.deployment import Deployment, load_config
from afd.config.roles import RoleSpec
from afd.errors import ConfigError
from afd.places import HostOffer, Pool, place
from afd_launch.host_view import (
    control_address,
    control_host,
    find_host,
    home_of,
    seen_from,
    settings_of,
)


def offers(*counts: int | None) -> list[HostOffer]:
    return [HostOffer(f"h{i}", count) for i, count in enumerate(counts)]


def hosts(*names: str, gpus: int = 0, **more: object) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for number, name in enumerate(names, start=1):
        host: dict[str, object] = {"name": name, "address": f"10.0.0.{number}", **more}
        if gpus:
            host["accelerators"] = {"count": gpus}
        found.append(host)
    return found


def deployed(device: str = "cpu", **keys) -> Deployment:
    keys.setdefault("control", {}).setdefault("keys", "/keys")
    keys.setdefault("attention", {})["device"] = device
    keys.setdefault("ffn", {})["device"] = device
    return Deployment.from_plain({"model": "/m", **keys})


# -- placement


@given(
    counts=st.lists(st.integers(0, 16), min_size=1, max_size=6),
    x=st.integers(1, 24),
    y=st.integers(1, 8),
    tp=st.integers(1, 8),
)
def test_every_instance_has_one_host_with_enough_accelerators(counts, x, y, tp):
    attention, ffn = Pool("attention", x, 1), Pool("ffn", y, tp)
    try:
        found = place(offers(*counts), attention, ffn)
    except ValueError as error:
        # Only whole FFN instances and then single GPUs are placed, so this is exact.
        fits = sum(count // tp for count in counts) >= y and sum(counts) >= x + y * tp
        assert not fits and "free" in str(error)
        return
    assert sorted(i for p in found for i in p.attention) == list(range(x))
    assert sorted(j for p in found for j in p.ffn) == list(range(y))
    for count, p in zip(counts, found, strict=True):
        assert len(p.attention) + tp * len(p.ffn) <= count
        assert (
            p.attention == tuple(range(p.attention[0], p.attention[-1] + 1)) if p.attention else 1
        )


def test_instances_of_the_start_are_spread_before_those_that_may_come():
    first, second = place(
        offers(None, None), Pool("attention", 3, 0, started=2), Pool("ffn", 4, 0, started=2)
    )
    assert (first.ffn, second.ffn) == ((0, 2), (1, 3))
    assert (first.attention, second.attention) == ((0, 2), (1,))
    assert first.started(2, 2).spare_ffn == (2,)


@given(hosts=st.integers(1, 6), x=st.integers(1, 24), y=st.integers(1, 12))
def test_instances_are_spread_over_equal_hosts(hosts, x, y):
    found = place(offers(*[64] * hosts), Pool("attention", x, 1), Pool("ffn", y, 1))
    ffn = [len(p.ffn) for p in found]
    all_gpus = [len(p.ffn) + len(p.attention) for p in found]
    assert max(ffn) - min(ffn) <= 1
    assert max(all_gpus) - min(all_gpus) <= 1 or min(x, y) < hosts


def test_instances_on_cpus_are_spread_without_a_limit():
    a, b = place(offers(None, None), Pool("attention", 2, 0), Pool("ffn", 2, 0))
    assert (a.attention, a.ffn, b.attention, b.ffn) == ((0,), (0,), (1,), (1,))
    a, b = place(offers(None, None), Pool("attention", 3, 0), Pool("ffn", 1, 0))
    assert (a.attention, a.ffn, b.attention, b.ffn) == ((0,), (0,), (1, 2), ())


def test_named_instances_stay_and_the_rest_goes_where_the_choice_is_left():
    given = [HostOffer("a", 8, (3,), ()), HostOffer("b", 8), HostOffer("c", 8, None, (1,))]
    a, b, c = place(given, Pool("attention", 5, 1), Pool("ffn", 3, 2))
    assert (a.attention, a.ffn) == ((3,), ())
    assert (b.attention, b.ffn) == ((0,), (0, 2))
    assert (c.attention, c.ffn) == ((1, 2, 4), (1,))


@pytest.mark.parametrize(
    "given,said",
    [
        ([HostOffer("a", 8, (0, 1), (0,)), HostOffer("b", 8, (1,), ())], "attention instance 1 is"),
        ([HostOffer("a", 8, (0, 2), (0,))], "instance 2, but attention.instances is 2"),
        ([HostOffer("a", 8, (0,), (0,))], "no host runs attention instance 1; add it"),
        ([HostOffer("a", 2, (0, 1), (0,))], "host a has 2 accelerators, but its instances need 4"),
        ([HostOffer("a", 1), HostOffer("b", 1)], "no host has 2 free accelerators for its 2 ranks"),
        ([HostOffer("a", 3)], "for attention instance 1 (free: a 0)"),
    ],
)
def test_impossible_placements_are_refused(given, said):
    with pytest.raises(ValueError) as error:
        place(given, Pool("attention", 2, 1), Pool("ffn", 1, 2))
    assert said in str(error.value) and ";" in str(error.value)


# -- the file


def test_gpus_are_numbered_per_host():
    deployment = deployed(
        "cuda",
        attention={"instances": 4},
        ffn={"instances": 2, "tp": 2},
        hosts=hosts("a", "b", gpus=4),
    )
    a, b = deployment.places()
    assert (a.attention, a.ffn, b.attention, b.ffn) == ((0, 1), (0,), (2, 3), (1,))
    found = {}
    for p in (a, b):
        specs = [RoleSpec("attention", i, deployment, "x", host=p.name) for i in p.attention]
        specs += [
            RoleSpec("ffn", j, deployment, "x", rank=r, host=p.name) for j in p.ffn for r in (0, 1)
        ]
        for spec in specs:
            order = spec.gpu_environment({})["CUDA_VISIBLE_DEVICES"].split(",")
            assert sorted(order) == list("0123")
            found[spec.id] = order[0]
    assert found == {
        "attention-0": "0", "attention-1": "1", "ffn-0": "2", "ffn-0.1": "3",
        "attention-2": "0", "attention-3": "1", "ffn-1": "2", "ffn-1.1": "3",
    }  # fmt: skip


def test_processes_of_a_host_share_its_gpus_if_the_file_says_so():
    deployment = deployed("cuda", gpus=1, ffn={"instances": 2}, hosts=hosts("a", "b"))
    spec = RoleSpec("ffn", 1, deployment, "x", host="b")
    assert spec.gpu_environment({}) == {"CUDA_VISIBLE_DEVICES": "0"}


def test_a_host_sees_its_own_addresses_and_ports():
    described = hosts("a", "b")
    described[1]["ports"] = ["mlx5_4:1"]
    deployment = deployed(transport={"verbs": {"ports": ["mlx5_0"]}}, hosts=described)
    a, b = seen_from(deployment, "a"), seen_from(deployment, "b")
    assert (a.transport.host, a.attention.host) == ("10.0.0.1", "10.0.0.1")
    assert (b.transport.host, b.attention.host) == ("10.0.0.2", "10.0.0.2")
    assert [x.transport.verbs.ports for x in (a, b)] == [("mlx5_0",), ("mlx5_4:1",)]
    assert Deployment.from_plain(b.plain()) == b  # as it travels in a role file
    assert seen_from(deployment, "") == deployment
    with pytest.raises(ConfigError, match="--host c is not in the file; use one of a, b"):
        find_host(deployment, "c")


def test_the_control_plane_has_one_host_and_a_fixed_port():
    deployment = deployed(hosts=hosts("a", "b"))
    assert control_host(deployment).name == "a"
    assert control_address(deployment) == "tcp://10.0.0.1:5555"
    other = deployed(hosts=hosts("a", "b"), control={"host": "b", "address": "tcp://h:1"})
    assert control_host(other).name == "b" and control_address(other) == "tcp://h:1"
    assert [home_of(other, role, 0) for role in ("control", "gateway", "ffn")] == ["b", "b", "a"]
    one = deployed()
    assert control_address(one) == "auto" and home_of(one, "ffn", 0) == ""
    ipv6 = [{"name": "a", "address": "fd00::1"}]
    assert control_address(deployed(hosts=ipv6)) == "tcp://[fd00::1]:5555"


def test_settings_that_hosts_share_have_no_paths():
    found = settings_of(deployed(hosts=hosts("a", "b")))
    assert found["attention.max_num_seqs"] == 64 and "hosts" in found
    assert not {"model", "control.keys", "ffn.placement"} & found.keys()


@pytest.mark.parametrize(
    "change,said",
    [
        ({"hosts": [{"name": "a"}]}, "hosts[0].address is missing in d.yaml"),
        (
            {"hosts": [{"name": "a", "adress": "x"}]},
            "unknown key hosts[0].adress in d.yaml; did you",
        ),
        ({"hosts": 3}, "hosts in d.yaml is 3; it must be a list"),
        (
            {"hosts": hosts("a", attention="0-3")},
            'hosts[0].attention in d.yaml is "0-3"; it must be a list of instance numbers',
        ),
        (
            {"hosts": hosts("a", accelerators={"count": -1})},
            "hosts[0].accelerators.count in d.yaml is -1; it must be a whole number of at least 0",
        ),
        ({"hosts": hosts("a", ports=["a b"])}, "hosts[0].ports in d.yaml is"),
        ({"hosts": hosts("a", "a")}, "hosts has the name a twice"),
        ({"hosts": hosts("a", "b"), "control": {}}, "control.keys is missing, but 2 hosts need"),
        ({"control": {"host": "c"}, "hosts": hosts("a")}, "control.host is c, but hosts names a;"),
        (
            {"transport": {"backend": "shm"}, "hosts": hosts("a", "b")},
            "ends at one host, but hosts",
        ),
        ({"attention": {"host": "0.0.0.0"}, "hosts": hosts("a")}, "is the address of no host"),
        ({"hosts": hosts("a", attention=[1])}, "instance 1, but attention.instances is 1"),
        (
            {"attention": {"device": "cuda"}, "ffn": {"device": "cuda"}, "hosts": hosts("a")},
            "no host has 1 free accelerator for ffn instance 0 (free: a 0)",
        ),
    ],
)
def test_mistakes_in_the_file_are_one_sentence(tmp_path, change, said):
    path = tmp_path / "d.yaml"
    path.write_text(yaml.safe_dump({"model": "m", "control": {"keys": "k"}, **change}))
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert said in str(error.value)


def test_an_empty_list_of_hosts_is_one_host(tmp_path):
    path = tmp_path / "d.yaml"
    path.write_text("model: m\nhosts:\n")
    assert load_config(path).hosts == ()
