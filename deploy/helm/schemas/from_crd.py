"""Makes a JSON schema of this folder from a CustomResourceDefinition (see README.md).

    python from_crd.py VERSION < CRD.yaml > KIND-VERSION.json

Descriptions, the status, and pod templates are left out: Kubernetes' own schema checks pods.
Unknown keys are refused where the definition lists the known ones.
"""

import json
import sys
from typing import Any

import yaml

PODS = ("leaderTemplate", "workerTemplate", "volumeClaimTemplates")


def pruned(node: Any) -> Any:
    if isinstance(node, list):
        return [pruned(item) for item in node]
    if not isinstance(node, dict):
        return node
    out = {}
    for key, value in node.items():
        if key == "pattern" and isinstance(value, str):
            value = value.replace("^(?i)", "(?i)^")  # Python wants flags at the start
        if key.startswith("x-kubernetes-") or (key == "description" and isinstance(value, str)):
            continue
        if key in PODS and isinstance(value, dict):
            out[key] = {"type": value["type"]}
            continue
        out[key] = pruned(value)
    if out.get("type") == "object" and "properties" in out:
        out.setdefault("additionalProperties", False)
    return out


def main() -> None:
    crd = yaml.safe_load(sys.stdin)
    (version,) = [v for v in crd["spec"]["versions"] if v["name"] == sys.argv[1]]
    schema = version["schema"]["openAPIV3Schema"]
    schema["properties"].pop("status", None)
    schema["properties"]["metadata"] = {"type": "object"}
    schema = pruned(schema) | {"$schema": "http://json-schema.org/draft-07/schema#"}
    print(json.dumps(schema, indent=1, sort_keys=True))


if __name__ == "__main__":
    main()
