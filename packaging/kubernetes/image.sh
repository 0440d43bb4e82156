#!/bin/sh
# image.sh [FILE]: builds the image of all pods as an archive that "docker load", "podman load" and "ctr images import"
# read (build/ocigpu-VERSION-image.tar), without a registry and without a container engine: a minimal system of this
# machine's distribution by debootstrap, and the tree of host-tree.sh, which pods run and node-installer puts on hosts.
# Needs root, debootstrap, patchelf, and on the first run the package index.  IMAGE: its name (ocigpu:VERSION).
# SNAPSHOT: as of packaging/package.sh.
set -eu
umask 022
cd "$(dirname "$0")/../.."
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' ocigpu/__init__.py)
file=${1:-build/ocigpu-$version-image.tar}
base=$(. /etc/os-release && echo "$VERSION_CODENAME")
python=$(packaging/find-python.sh)
python=$("$python" -I -c 'import os, sys; print(os.path.realpath(sys.executable))')
vendored=$(packaging/vendored.sh "$python")
snapshot=$(packaging/snapshot/find.sh "$python")
mkdir -p build
work=$(mktemp -d "$PWD/build/image-XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
echo "making a minimal $base (a minute or two)" >&2
debootstrap --variant=minbase --include=libpq5 "$base" "$work/root" >"$work/log" 2>&1 || { tail -n 3 "$work/log" >&2; exit 1; }
rm -rf "$work"/root/var/cache/apt/archives/*.deb "$work"/root/var/lib/apt/lists/* "$work"/root/var/log/* \
  "$work"/root/usr/share/doc "$work"/root/usr/share/man "$work"/root/usr/share/locale "$work"/root/dev/*
[ ! -e /usr/share/misc/pci.ids ] || install -D -m 0644 /usr/share/misc/pci.ids "$work/root/usr/share/misc/pci.ids" # node-labels reads it
# What pods need beside the libraries of the packages.
cp -R "$vendored" "$work/vendored"
cp -R "$(packaging/vendored.sh "$python" requirements-kubernetes.txt)/." "$work/vendored"
mkdir -p "$work/root/opt/ocigpu" "$work/root/usr/local/bin"
packaging/kubernetes/host-tree.sh --python "$python" --vendored "$work/vendored" ${snapshot:+--snapshot "$snapshot"} "$work/root/opt/ocigpu-node" >&2
tree=$(ls "$work/root/opt/ocigpu-node")
ln -s ../ocigpu-node "$work/root/opt/ocigpu/versions" # the path that it was made for
ln -s "versions/$tree/bin" "$work/root/opt/ocigpu/bin"
ln -s /opt/ocigpu/bin/ocigpu "$work/root/usr/local/bin/ocigpu"
"$python" -I ocigpu/cli/engines/archive_image.py "$work/root" "${IMAGE:-ocigpu:$version}" "$work/image.tar" \
  --entrypoint /opt/ocigpu/bin/ocigpu --command=--help
mv "$work/image.tar" "$file"
echo "$file"
