#!/usr/bin/env bash
# One attention instance in its pod. The pod's number is the instance's; its address is the pod's.
# AFD_INDEX, POD_IP, AFD_PORT_STEP (1 if pods share the network of their node, else 0).
set -euo pipefail
api=$((8100 + AFD_INDEX * AFD_PORT_STEP))
# The pod is a host of its own, so that GPUs are numbered inside it. Nothing uses the other address.
hosts="[{name: pod, address: '$POD_IP', accelerators: {count: 1}, attention: [$AFD_INDEX], ffn: []},
  {name: others, address: unused, accelerators: {count: 65536}}]"
# Instance i listens on attention.port + i.
exec afd attention "${AFD_FILE:-/etc/afd/deployment.yaml}" --index "$AFD_INDEX" --set "hosts=$hosts" \
  --set "attention.port=$((api - AFD_INDEX))" --metrics-port "$((9300 + AFD_INDEX * AFD_PORT_STEP))"
