"""Fixtures of the unit tests."""

from collections.abc import Iterator

import pytest

from afd.host.ports import held_ports


@pytest.fixture
def address() -> Iterator[str]:
    """An address for a control plane. The port stays reserved until a server listens there."""
    with held_ports(["127.0.0.1"]) as (port,):
        yield f"tcp://127.0.0.1:{port}"
