#!/usr/bin/env bash
# usage: packages.sh CACHE
# Installs what the guest needs (qemu, busybox, RDMA libraries) and extracts a Debian kernel with
# soft-RoCE into CACHE/kernel. On failure it prints one line with the reason and exits with 3.
set -uo pipefail
cache=$1
lacking() { echo "rdma_vm: $*"; exit 3; }

[ "$(uname -m)" = x86_64 ] || lacking "the guest is x86_64, this machine is $(uname -m)"
tools="qemu-system-x86_64 depmod cpio xz strip ip tc rdma"
missing=
for tool in $tools; do command -v "$tool" >/dev/null || missing+=" $tool"; done
[ -x /bin/busybox ] || missing+=" busybox"
ldconfig -p | grep -q 'libibverbs\.so\.1' || missing+=" libibverbs"
if [ -n "$missing" ]; then
  command -v apt-get >/dev/null || lacking "missing$missing, and no apt-get to install them"
  [ "$(id -u)" = 0 ] || lacking "missing$missing; installing them needs root"
  { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -yq \
    --no-install-recommends qemu-system-x86 busybox-static kmod cpio xz-utils binutils iproute2 \
    libibverbs1 ibverbs-providers; } </dev/null >/dev/null 2>&1 ||
    lacking "apt-get cannot install the packages for$missing"
fi
if [ ! -d "$cache/kernel/lib/modules" ]; then
  command -v apt-get >/dev/null || lacking "no kernel in $cache, and no apt-get to fetch one"
  mkdir -p "$cache" && cd "$cache" || lacking "cannot make $cache"
  # the standard kernel package: the cloud kernel has no soft-RoCE
  package=$(apt-cache depends linux-image-amd64 2>/dev/null | awk '/Depends:/{print $2; exit}')
  [ -n "$package" ] || { apt-get update -q >/dev/null 2>&1
    package=$(apt-cache depends linux-image-amd64 2>/dev/null | awk '/Depends:/{print $2; exit}'); }
  [ -n "$package" ] || lacking "apt knows no linux-image-amd64 (the guest runs Debian's kernel)"
  apt-get download -q "$package" >/dev/null 2>&1 || lacking "apt-get cannot download $package"
  dpkg-deb -x "$package"_*.deb kernel.part && mv kernel.part kernel
  rm -f "$package"_*.deb
fi
