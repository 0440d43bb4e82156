#!/bin/bash
# build.sh ROOT RUN REPOSITORY CROSS: in a mount namespace of its own, builds package, wheel and the tests' environment in
# an overlay on ROOT, for whatever architecture that has, and makes RUN/disk of all of it.  CROSS: a root with compilers for
# arm64, or "".  ROOT.kept: what the next one takes.
set -euo pipefail
root=$1 kept=$1.kept run=$2 repository=$3 cross=$4 new=$2/root
# shellcheck source=tests/grounds/roots.sh
. "$(dirname "$0")/../grounds/roots.sh"
mount --make-rprivate /
mount -t overlay overlay -o "lowerdir=$root,upperdir=$run/upper,workdir=$run/work" "$new"
take_repository "$repository" "$new"
for directory in build/packages .venv; do
  mkdir -p "$kept/$directory" "$new/root/ocigpu/$directory"
  mount --bind "$kept/$directory" "$new/root/ocigpu/$directory"
done
builder=$new
[ -z "$cross" ] || { builder=$cross && take_repository "$repository" "$cross"; }
# shellcheck disable=SC2016 # the other shell's
in_root "$builder" env XDG_CACHE_HOME=/root/ocigpu/build/packages "CROSS=${cross:+aarch64}" \
  sh -euc 'made=$(/root/ocigpu/packaging/snapshot/build.sh /usr/bin/python3) && rm -rf /root/snapshot && cp -R "$made" /root/snapshot'
[ -z "$cross" ] || cp -R "$cross/root/snapshot" "$new/root"
in_root "$new" bash -euc 'cd /root/ocigpu
SNAPSHOT=/root/snapshot make deb
if [ "$(cat .venv/complete 2>/dev/null)" != "$(cksum pyproject.toml tests/machines/build.sh)" ]; then
  [ -e .venv/bin/pip ] || python3 -m venv --clear .venv
  rm -rf .venv/wheels
  .venv/bin/pip wheel --quiet --wheel-dir .venv/wheels ".[cli]"
  .venv/bin/pip install --quiet .venv/wheels/*.whl setuptools pytest pytest-subprocess pytest-timeout pytest-xdist hypothesis pyelftools
  cksum pyproject.toml tests/machines/build.sh >.venv/complete
fi
rm -f .venv/wheels/ocigpu-*
.venv/bin/pip wheel --quiet --no-deps --no-build-isolation --wheel-dir .venv/wheels .'
rm -rf "$new/root/.cache"
mke2fs -q -t ext4 -O ^orphan_file,^metadata_csum_seed -d "$new" "$run/disk" 4G
