#!/bin/bash
# initrd.sh DIRECTORY: leaves, of a kernel's packages unpacked there, the kernel and an initrd that starts what run.sh
# puts on the first disk; run.sh hands it to mmdebstrap.
set -euo pipefail
cd "$1"
[ -e lib/modules ] || { mkdir -p lib && mv usr/lib/modules lib; }
version=$(ls lib/modules)
image=$(find "boot/vmlinuz-$version" "lib/modules/$version/vmlinuz" -print -quit 2>/dev/null || true) # the latter since Linux 7
depmod -b . "$version"
mkdir -p initrd/bin initrd/dev initrd/new initrd/proc initrd/modules
cp "$(find . -path '*/bin/busybox' -print -quit)" initrd/bin/busybox
for module in virtio_pci virtio_blk virtio_console ext4 overlay fuse; do
  modprobe -d . -S "$version" --show-depends "$module" 2>/dev/null || echo "builtin $module"
done | awk '$1 == "insmod" && !seen[$2]++ { print $2 }' | while read -r file; do
  name=$(basename "${file%.xz}")
  case $file in *.xz) xz -dc "$file" ;; *) cat "$file" ;; esac >"initrd/modules/$name"
  echo "$name" >>initrd/list
done
cat >initrd/init <<'INIT'
#!/bin/busybox sh
/bin/busybox mount -t devtmpfs dev /dev
while read -r name; do /bin/busybox insmod "/modules/$name"; done </list
until [ -b /dev/vda ]; do /bin/busybox sleep 0.1; done
/bin/busybox mount -t ext4 /dev/vda /new
/bin/busybox mount -o move /dev /new/dev
exec /bin/busybox switch_root /new /root/ocigpu/tests/machines/init
INIT
chmod 755 initrd/init
(cd initrd && find . | cpio -o -H newc --quiet | gzip -1) >initrd.gz
mv "$image" vmlinuz
rm -rf bin boot initrd lib lib64 sbin usr
