"""Deployments in one process; files that need another kind have a fixture of their own."""

import pytest


@pytest.fixture
def deploy(tiny_models):
    """Returns a function: family, counts of instances, sections -> deployment, reference."""
    # Here, because `./run test-amd` reads this file in an environment without torch.
    from remote_support import deploying, reference_model

    with deploying() as start:

        def make(family, x, y, **sections):
            model = tiny_models(family)
            return start(model, x, y, **sections), reference_model(model)

        yield make
