# Runs in the guest, sourced by the job that test_rdma_vm.py writes. Variables:
#   STRESS                the stress program
#   HERE                  this folder
#   PYTHON, PYTHONPATH    an interpreter that finds this repository and torch
#   CASES                 transport, ffn_loop or doctor
# Each case prints "BEGIN name", its output, and "END name rc=N after S s".
. "$HERE/network.sh"
RX=rxf0,rxf1 TX=rxa0,rxa1

run_case() { # name command...
  local name=$1 start rc
  shift
  start=$(cut -d. -f1 /proc/uptime)
  echo "BEGIN $name"
  "$@" 2>&1
  rc=$?
  echo "END $name rc=$rc after $(($(cut -d. -f1 /proc/uptime) - start)) s"
}

# Starts a soak and takes an interface down one second after the sender has connected.
soak_with_port_down() { # interface seconds
  local log rc
  log=$(mktemp)
  "$STRESS" soak $RX $TX "$2" >"$log" 2>&1 &
  local child=$!
  until grep -q 'soak: started' "$log" || ! kill -0 $child 2>/dev/null; do sleep 0.1; done
  sleep 1
  ip link set "$1" down
  echo "interface $1 is down"
  wait $child
  rc=$?
  cat "$log"
  return $rc
}

refused_memory() {
  chmod 666 /dev/infiniband/*
  # as a service user: without root's permission to lock any amount of memory
  (ulimit -l 64 && exec setpriv --reuid 65534 --clear-groups "$STRESS" memlock $RX $TX)
}

lossy_soak() {
  local side rc
  for side in a0 a1 f0 f1; do tc qdisc add dev $side root netem loss 1% delay 50us; done
  "$STRESS" soak $RX $TX 5
  rc=$?
  for side in a0 a1 f0 f1; do tc -s qdisc show dev $side; done
  for side in a0 a1 f0 f1; do tc qdisc del dev $side root; done
  return $rc
}

doctor() { "$PYTHON" -c 'from afd_launch import rdma; [print(*f) for f in rdma.look()]'; }

if [ "$CASES" = ffn_loop ]; then
  run_case ffn_loop "$PYTHON" "$HERE/ffn_loop.py"
  exit 0
fi
if [ "$CASES" = doctor ]; then
  run_case doctor doctor
  run_case rates "$PYTHON" "$HERE/doctor_rates.py"
  exit 0
fi
run_case sizes "$STRESS" sizes $RX $TX
run_case loss lossy_soak
run_case kill "$STRESS" kill $RX $TX
run_case stop "$STRESS" stop $RX $TX
run_case late "$STRESS" late $RX $TX
run_case offset "$STRESS" offset $RX $TX
run_case short "$STRESS" short $RX $TX
run_case no_device "$STRESS" soak mlx5_0:1 $TX 1
run_case sender_port_down soak_with_port_down a0 4
ip link set a0 up
run_case receiver_port_down soak_with_port_down f1 4
run_case restart_on_one_port "$STRESS" soak $RX $TX 2
ip link set f1 up
run_case memlock refused_memory
exit 0
