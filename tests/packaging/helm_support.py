"""Renders the Helm chart with Helm's own engine, and checks the result with Kubernetes' schemas."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

helm = pytest.importorskip(
    "helm_python", reason="helm-python-sdk is not installed; ./run test does"
)
kubernetes_validate = pytest.importorskip("kubernetes_validate")
jsonschema = pytest.importorskip("jsonschema")

HELM = Path(__file__).parents[2] / "deploy" / "helm"
CHART = HELM / "afd"
KUBERNETES = "1.37"
CUSTOM = {
    "LeaderWorkerSet": "leaderworkerset-v1.json",
    "DisaggregatedSet": "disaggregatedset-v1.json",
    "PrometheusRule": "prometheusrule-v1.json",
    "ServiceMonitor": "servicemonitor-v1.json",
}
NEEDED: dict[str, Any] = {
    "keys": {"existingSecret": "afd-keys"},
    "model": {"volume": {"persistentVolumeClaim": {"claimName": "models"}}},
    "workload": "statefulset",
}
"""What every release must say besides its deployment file."""


@dataclass(frozen=True)
class Rendered:
    """The objects of a release, by (kind, name)."""

    objects: Mapping[tuple[str, str], dict[str, Any]]

    def __getitem__(self, key: tuple[str, str]) -> dict[str, Any]:
        return self.objects[key]

    def deployment(self) -> dict[str, Any]:
        """The deployment file that the pods read."""
        text = self["ConfigMap", "afd"]["data"]["deployment.yaml"]
        found: dict[str, Any] = yaml.safe_load(text)
        return found

    def pods(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields (component, pod template)."""
        for (kind, _), made in self.objects.items():
            for template in _templates(kind, made["spec"]) if "spec" in made else ():
                yield template["metadata"]["labels"]["app.kubernetes.io/component"], template

    def pod(self, component: str) -> dict[str, Any]:
        (found,) = [template for name, template in self.pods() if name == component]
        return found

    def container(self, component: str) -> dict[str, Any]:
        (found,) = self.pod(component)["spec"]["containers"]
        made: dict[str, Any] = found
        return made


def _templates(kind: str, spec: dict[str, Any]) -> list[dict[str, Any]]:
    if kind in ("Deployment", "StatefulSet"):
        return [spec["template"]]
    if kind == "LeaderWorkerSet":
        return [spec["leaderWorkerTemplate"]["workerTemplate"]]
    if kind == "DisaggregatedSet":
        return [role["spec"]["leaderWorkerTemplate"]["workerTemplate"] for role in spec["roles"]]
    return []


@cache
def chart() -> Any:
    return helm.Chart.load(CHART)


def render(values: Mapping[str, Any], release: str = "afd") -> Rendered:
    """Renders the chart. values: over ``NEEDED``. Raises helm.HelmError as `helm template`."""
    text = chart().render({**NEEDED, **values}, name=release, namespace="models")
    objects = {}
    for name, manifest in text.items():
        if name.endswith("NOTES.txt"):
            continue
        for part in yaml.safe_load_all(manifest):
            if part:
                objects[part["kind"], part["metadata"]["name"]] = part
    return Rendered(objects)


@cache
def _schema(kind: str) -> Any:
    return json.loads((HELM / "schemas" / CUSTOM[kind]).read_text())


def check_schemas(rendered: Rendered) -> None:
    """Fails if Kubernetes or an operator would refuse an object or a pod."""
    for (kind, _), made in rendered.objects.items():
        if kind in CUSTOM:
            jsonschema.validate(made, _schema(kind))
        else:
            kubernetes_validate.validate(made, KUBERNETES, strict=True)
    for _, template in rendered.pods():
        pod = {"apiVersion": "v1", "kind": "Pod", **template}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def builtin_schemas() -> Path:
    """Returns the folder with the schemas of Kubernetes' own kinds."""
    package = Path(kubernetes_validate.__file__).parent
    return package / "kubernetes-json-schema" / f"v{KUBERNETES}.0-local-strict"
