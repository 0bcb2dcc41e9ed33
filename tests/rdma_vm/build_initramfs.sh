#!/usr/bin/env bash
# usage: build_initramfs.sh KERNEL_DIR OUT.cpio.gz
# Packs busybox, the kernel modules that the guest needs, and init.
set -euo pipefail
kernel=$1 out=$2
here=$(cd "$(dirname "$0")" && pwd)
version=$(ls "$kernel/lib/modules")
modules=$kernel/lib/modules/$version
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT

mkdir -p "$root"/{bin,dev,proc,sys,host,ov,newroot}
cp /bin/busybox "$root/bin/busybox"
for applet in sh mount mkdir ln chroot grep cut modprobe ip poweroff; do
  ln -s busybox "$root/bin/$applet"
done
for name in virtio virtio_ring virtio_pci virtio_pci_modern_dev virtio_pci_legacy_dev \
  9pnet 9pnet_virtio 9p netfs fscache overlay veth udp_tunnel ip6_udp_tunnel sch_netem \
  rdma_rxe ib_core ib_uverbs ib_cm iw_cm rdma_cm rdma_ucm crc32_generic crc32c_generic \
  crc32-pclmul crc32c-intel libcrc32c configfs; do
  file=$(find "$modules/kernel" \( -name "$name.ko" -o -name "$name.ko.xz" \) | head -n 1)
  [ -n "$file" ] || continue # built into this kernel, or absent from it
  folder=$root/lib/modules/$version/$(dirname "${file#"$modules/"}")
  mkdir -p "$folder"
  cp "$file" "$folder"
done
find "$root/lib/modules" -name '*.ko.xz' -exec xz -d {} +
find "$root/lib/modules" -name '*.ko' -exec strip --strip-debug {} +
cp "$modules/modules.builtin" "$modules/modules.order" "$root/lib/modules/$version/"
depmod -b "$root" "$version" 2>/dev/null
cp "$here/init" "$root/init"
chmod +x "$root/init"
(cd "$root" && find . | cpio -o -H newc --quiet | gzip -1) >"$out"
