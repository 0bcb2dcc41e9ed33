"""Invalid options and libraries of backend verbs give one-sentence errors, without hardware."""

from __future__ import annotations

import pytest

from afd_comm import CommError, Region, VerbsOptions


@pytest.mark.parametrize(
    "changes,sentence",
    [
        ({"ports": []}, "number of ports is 0; it must be from 1 to 8; name them"),
        ({"ports": ["mlx5_0:0"]}, "'mlx5_0:0' is not a port; write device or device:port"),
        ({"ports": ["mlx5_0:x"]}, "is not a port"),
        ({"ports": [":1"]}, "is not a port"),
        ({"ports": ["/dev/x"]}, "is not a port"),
        ({"retry": 7}, "retry is 7; it must be from 0 to 6; 7 means forever"),
        ({"timeout": 0}, "timeout is 0; it must be from 1 to 31"),
        ({"gid_index": 256}, "gid_index is 256"),
        ({"service_level": 16}, "service_level is 16"),
        ({"traffic_class": -1}, "traffic_class is -1"),
        ({"qps_per_port": 0}, "qps_per_port is 0"),
    ],
)
def test_options_out_of_range(changes: dict, sentence: str) -> None:
    with pytest.raises(CommError, match=sentence):
        VerbsOptions(**{"ports": ["mlx5_0:1"], **changes})


def test_a_missing_library() -> None:
    options = VerbsOptions(ports=["mlx5_0"], host="127.0.0.1", library="libnone_such.so.7")
    with pytest.raises(CommError, match=r"cannot load libnone_such.so.7 .*apt-get install"):
        Region(1, 64, name="r", verbs=options)


def test_a_library_without_verbs_functions() -> None:
    options = VerbsOptions(ports=["mlx5_0"], host="127.0.0.1", library="libc.so.6")
    with pytest.raises(CommError, match="has no ibv_get_device_list"):
        Region(1, 64, name="r", verbs=options)
