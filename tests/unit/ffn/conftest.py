"""Deployments in one process; files that need another kind have a fixture of their own."""

import pytest


@pytest.fixture
def deploy(tiny_models):
    """Returns a function: family, counts of instances, sections -> deployment, reference."""
    # Here, because `./run test-amd` reads this file in an environment without torch.
    from remote_support import Deployed, reference_model

    running = []

    def make(family, x, y, **sections):
        running.append(Deployed(tiny_models(family), x, y, **sections))
        return running[-1], reference_model(tiny_models(family))

    yield make
    for deployed in running:
        deployed.close()
