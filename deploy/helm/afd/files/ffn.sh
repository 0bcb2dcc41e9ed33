#!/usr/bin/env bash
# One FFN instance in its pod, with all of its ranks: they add up every layer over NVLink or xGMI.
# If a rank ends, all end, and Kubernetes starts the pod's container again.
# AFD_INDEX, AFD_RANKS, POD_IP, AFD_PORT_STEP (1 if pods share the network of their node, else 0).
set -euo pipefail
hosts="[{name: pod, address: '$POD_IP', accelerators: {count: $AFD_RANKS}, attention: [], ffn: [$AFD_INDEX]},
  {name: others, address: unused, accelerators: {count: 65536}}]"
end_ranks() {
  local pids
  pids=$(jobs -p)
  # shellcheck disable=SC2086  # a list of process ids
  [ -z "$pids" ] || kill -TERM $pids 2>/dev/null || true
  wait || true
}
trap 'end_ranks; exit 0' TERM INT
for ((rank = 0; rank < AFD_RANKS; rank++)); do
  afd ffn "${AFD_FILE:-/etc/afd/deployment.yaml}" --index "$AFD_INDEX" --rank "$rank" \
    --set "hosts=$hosts" \
    --metrics-port "$((9100 + AFD_INDEX * AFD_RANKS * AFD_PORT_STEP + rank))" &
done
status=0
wait -n || status=$?
end_ranks
exit "$status"
