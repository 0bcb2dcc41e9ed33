"""Fixtures of the unit tests."""

from collections.abc import Iterator

import pytest

from afd.launch.ports import held_ports


@pytest.fixture
def address() -> Iterator[str]:
    """A control plane's address; nobody else gets it while no server listens there."""
    with held_ports(["127.0.0.1"]) as (port,):
        yield f"tcp://127.0.0.1:{port}"
