"""The Helm chart: lint, schemas, and what its pods run. No cluster; docs/kubernetes.md says so."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_support import CHART, HELM, NEEDED, Rendered, builtin_schemas, check_schemas, helm, render

from afd.config.deployment import Deployment
from afd.host.package_data import data_folder

EXAMPLES = sorted((data_folder("afd_launch") / "examples").glob("*.yaml"))
PRESETS = sorted((data_folder("afd_planner") / "topologies").glob("*/*.yaml"))
KINDS = ("statefulset", "leaderworkerset", "disaggregatedset", "pod")
BUILTIN = ("configmap-v1", "deployment-apps-v1", "poddisruptionbudget-policy-v1", "service-v1")
GPUS = {"attention": {"device": "cuda", "instances": 3}, "ffn": {"device": "cuda", "tp": 2}}


def of_file(path: Path, **values: Any) -> Rendered:
    return render({"deploymentFile": path.read_text(), **values})


def test_helm_lint_finds_nothing() -> None:
    values = {**NEEDED, "deploymentFile": EXAMPLES[0].read_text()}
    found = helm.lint(CHART, values=values)
    assert [m for m in found["messages"] if "icon" not in str(m)] == []


@pytest.mark.parametrize("path", [*EXAMPLES, *PRESETS], ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_every_deployment_file_becomes_a_release(path: Path) -> None:
    """Each shipped file, as a user would give it: the objects are valid, the pods' file too."""
    kind = KINDS[[*EXAMPLES, *PRESETS].index(path) % len(KINDS)]
    given = yaml.safe_load(path.read_text())
    rdma = {"enabled": True, "ports": ["mlx5_0:1"]} if "rdma" in path.name else {}
    rendered = of_file(path, workload=kind, rdma=rdma)
    deployment = Deployment.from_plain(rendered.deployment())
    assert deployment.model == Path("/model") and not deployment.hosts
    assert deployment.attention.instances == given.get("attention", {}).get("instances", 1)
    assert deployment.ffn.instances == given.get("ffn", {}).get("instances", 1)
    if kind != "pod":
        assert deployment.transport.backend in ("tcp", "verbs")
        assert str(deployment.control.keys) == "/etc/afd/keys/control.keys"


@pytest.mark.parametrize(
    ("kind", "wire"),
    [
        ("statefulset", "tcp"),
        ("leaderworkerset", "rdma"),
        ("disaggregatedset", "node"),
        ("statefulset", "node"),
        ("pod", "tcp"),
    ],
)
def test_kubernetes_accepts_every_object(kind: str, wire: str) -> None:
    rdma = {
        "tcp": {},
        "rdma": {"enabled": True, "ports": ["mlx5_0:1"], "networks": ["rdma/rail-0"]},
        "node": {"enabled": True, "ports": ["mlx5_0:1"], "hostNetwork": True},
    }[wire]
    on = {"enabled": True}
    rendered = render(
        {
            "deployment": {**GPUS, "pipeline": {"tpot_ms": 50}},
            "workload": kind,
            "rdma": rdma,
            "apiKeys": {"existingSecret": "api"},
            "tls": {"existingSecret": "tls"},
            "serviceMonitor": on,
            "prometheusRule": on,
            "dashboard": on,
            "pod": {"nodeSelector": {"pool": "gpu"}, "podLabels": {"team": "a"}},
        }
    )
    check_schemas(rendered)
    kinds = {name for name, _ in rendered.objects}
    assert {"ServiceMonitor", "PrometheusRule", "ConfigMap"} <= kinds
    for _, template in rendered.pods():
        assert template["spec"]["nodeSelector"] == {"pool": "gpu"}
        assert template["metadata"]["labels"]["team"] == "a"


def test_each_pod_takes_its_accelerators() -> None:
    rendered = render({"deployment": GPUS})
    assert rendered.container("attention")["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    assert rendered.container("ffn")["resources"]["limits"] == {"nvidia.com/gpu": "2"}
    assert "nvidia.com/gpu" not in rendered.container("control")["resources"]["limits"]
    amd = {"attention": {"device": "rocm"}, "ffn": {"device": "rocm", "arch": "gfx942"}}
    values = {"deployment": amd, "accelerator": {"supplementalGroups": [44, 109]}}
    rendered = render(values)
    assert rendered.container("ffn")["resources"]["limits"] == {"amd.com/gpu": "1"}
    assert rendered.pod("ffn")["spec"]["securityContext"]["supplementalGroups"] == [44, 109]
    one = render({"deployment": GPUS, "workload": "pod"}).container("gateway")
    assert one["resources"]["limits"]["nvidia.com/gpu"] == "5"


def test_rdma_pods_take_a_device_and_may_lock_memory() -> None:
    rdma = {"enabled": True, "ports": ["mlx5_0:1"], "networks": ["rdma/rail-0", "rdma/rail-1"]}
    rendered = render({"deployment": GPUS, "rdma": rdma})
    for role in ("attention", "ffn"):
        container = rendered.container(role)
        assert container["resources"]["limits"]["rdma/hca_shared_devices_a"] == "1"
        assert container["securityContext"]["capabilities"] == {
            "add": ["IPC_LOCK"],
            "drop": ["ALL"],
        }
        annotations = rendered.pod(role)["metadata"]["annotations"]
        assert annotations["k8s.v1.cni.cncf.io/networks"] == "rdma/rail-0,rdma/rail-1"
    assert "add" not in rendered.container("gateway")["securityContext"]["capabilities"]
    assert rendered.deployment()["transport"] == {
        "backend": "verbs",
        "verbs": {"ports": ["mlx5_0:1"]},
    }


@pytest.mark.parametrize("kind", KINDS[:3])
def test_every_role_has_all_three_probes(kind: str) -> None:
    rendered = render({"deployment": {**GPUS, "deadlines": {"start_s": 600}}, "workload": kind})
    for role in ("control", "gateway", "attention", "ffn"):
        container = rendered.container(role)
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe], f"{role} has no {probe}"
    starts = rendered.container("ffn")["startupProbe"]
    assert starts["httpGet"]["path"] == "/ready"
    assert starts["periodSeconds"] * starts["failureThreshold"] >= 600


def test_pods_on_the_nodes_network_have_ports_of_their_own() -> None:
    rdma = {"enabled": True, "ports": ["mlx5_0:1"], "hostNetwork": True}
    rendered = render({"deployment": GPUS, "rdma": rdma})
    for role, step in (("attention", "1"), ("ffn", "2")):
        container = rendered.container(role)
        assert {"name": "AFD_PORT_STEP", "value": "1"} in container["env"]
        assert container["readinessProbe"]["exec"]["command"][-1] == step


def test_instances_may_leave_one_by_one_only() -> None:
    rendered = render({"deployment": GPUS})
    for role in ("attention", "ffn"):
        budget = rendered["PodDisruptionBudget", f"afd-{role}"]
        assert budget["spec"]["maxUnavailable"] == 1
        labels = rendered.pod(role)["metadata"]["labels"].items()
        assert budget["spec"]["selector"]["matchLabels"].items() <= labels
        made = rendered["StatefulSet", f"afd-{role}"]["spec"]
        assert made["podManagementPolicy"] == "Parallel"


def test_the_gateway_drains_before_it_is_killed() -> None:
    rendered = render({"deployment": {"deadlines": {"drain_s": 90}}})
    gateway = rendered.pod("gateway")["spec"]
    assert gateway["containers"][0]["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "5"]
    assert gateway["terminationGracePeriodSeconds"] > 90 + 5


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "--set-file deploymentFile"),
        ({"deployment": GPUS, "model": {}}, "model.volume is empty"),
        ({"deployment": GPUS, "keys": {}}, "afd keys control.keys"),
        ({"deployment": GPUS, "rdma": {"enabled": True}}, "rdma.ports"),
        ({"deployment": GPUS, "workload": "deployment"}, "workload"),
        ({"deployment": GPUS, "ffn": {"replicas": 3}}, "replicas"),
        ({"deployment": {**GPUS, "prefill": {"instances": 1}}}, "set prefill.by to afd"),
        ({"deploymentFile": "model: [", "deployment": {}}, "is not YAML"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_mistake_is_named_with_its_remedy(values: dict[str, Any], said: str) -> None:
    with pytest.raises(helm.HelmError, match=said):
        render(values)


def test_files_of_the_chart_are_those_of_the_package() -> None:
    """Helm reads no file outside of a chart, so it has copies."""
    dashboards = data_folder("afd_launch") / "dashboards"
    for own, source in (("afd.json", "grafana"), ("alerts.yaml", "prometheus")):
        assert (CHART / "files" / own).read_text() == (dashboards / source / own).read_text()


def test_helm_unittest_passes() -> None:
    if (tool := shutil.which("helm-unittest")) is None:
        pytest.skip("no helm-unittest on PATH; docs/kubernetes.md says how to build it")
    done = subprocess.run([tool, str(CHART)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_kubeconform_accepts_the_release(tmp_path: Path) -> None:
    if (tool := shutil.which("kubeconform")) is None:
        pytest.skip(
            "no kubeconform; go install github.com/yannh/kubeconform/cmd/kubeconform@v0.7.0"
        )
    # The schemas have addresses, from which kubeconform would download what they refer to.
    for name in ("_definitions", *BUILTIN):
        text = (builtin_schemas() / f"{name}.json").read_text()
        text = re.sub(r',?\s*"\$id": "[^"]*"', "", text).replace(
            "/api/_definitions", "_definitions"
        )
        (tmp_path / f"{name}.json").write_text(text)
    rendered = render({"deployment": GPUS, "workload": "leaderworkerset"})
    release = tmp_path / "release.yaml"
    release.write_text(yaml.safe_dump_all(rendered.objects.values()))
    places = [
        f"{tmp_path}/{{{{.ResourceKind}}}}{{{{.KindSuffix}}}}.json",
        f"{HELM}/schemas/{{{{.ResourceKind}}}}-{{{{.ResourceAPIVersion}}}}.json",
    ]
    done = subprocess.run(
        [tool, "-strict", *(a for p in places for a in ("-schema-location", p)), str(release)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
