"""The files of deploy/ parse, and their deployment files are valid. No container runs."""

from pathlib import Path

import pytest
import yaml

from afd.config.deployment import Deployment

DEPLOY = Path(__file__).parents[2] / "deploy"
FILES = sorted(
    path
    for path in DEPLOY.rglob("*")
    if path.suffix in (".yaml", ".yml") and "templates" not in path.parts  # Helm's are no YAML
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_it_is_yaml(path: Path) -> None:
    assert list(yaml.safe_load_all(path.read_text()))


def deployments() -> list[tuple[str, dict[str, object]]]:
    files = (DEPLOY / "docker").glob("deployment*.yaml")
    return [(path.name, yaml.safe_load(path.read_text())) for path in files]


@pytest.mark.parametrize("named", deployments(), ids=lambda named: named[0])
def test_it_holds_a_valid_deployment(named: tuple[str, dict[str, object]]) -> None:
    deployment = Deployment.from_plain(named[1])
    assert deployment.gateway.host == "0.0.0.0"
    if "rocm" in named[0]:
        assert deployment.attention.device == deployment.ffn.device == "rocm"


def test_compose_gives_a_container_what_amd_gpus_need() -> None:
    (service,) = yaml.safe_load((DEPLOY / "docker" / "compose.rocm.yaml").read_text())[
        "services"
    ].values()
    assert service["devices"] == ["/dev/kfd", "/dev/dri"] and service["ipc"] == "host"
    assert service["group_add"] == ["video", "render"]
