#!/usr/bin/env bash
# usage: guest.sh JOB.sh SECONDS CACHE
# Runs JOB.sh as root in a virtual machine with soft-RoCE; exits with 0 if the job exited with 0.
# The guest mounts the host's files read-only and runs the host's binaries. The host needs no KVM,
# no RDMA hardware and no kernel module. Run packages.sh first.
set -euo pipefail
job=$(readlink -f "$1") limit=$2 cache=$(readlink -f "$3")
here=$(cd "$(dirname "$0")" && pwd)
log=$(mktemp)
trap 'rm -f "$log"' EXIT
bash "$here/build_initramfs.sh" "$cache/kernel" "$cache/initramfs.cpio.gz"
timeout "$limit" qemu-system-x86_64 -machine q35,accel=tcg -cpu max -smp 2 -m "${RDMA_VM_MB:-3072}" \
  -nographic -no-reboot -nic none \
  -kernel "$cache"/kernel/boot/vmlinuz-* -initrd "$cache/initramfs.cpio.gz" \
  -append "console=ttyS0 quiet panic=-1 mitigations=off nokaslr job=$job" \
  -virtfs local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap \
  </dev/null 2>&1 | tr -d '\r' | tee "$log"
grep -aq 'GUEST_EXIT rc=0' "$log"
