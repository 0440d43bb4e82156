#!/bin/bash
# run.sh SUITE...: on each of these Debian suites (trixie, sid) what a user does in the first hour, with its real engines:
# a root is made once by mmdebstrap, booted with systemd in private namespaces, the package is built and installed
# there as the README says, and inside.sh goes through the engines.  make test-grounds; nothing is left behind.
#
# GROUNDS=DIR    where roots are kept between runs, each for a week (~/.cache/ocigpu-grounds); about 1.5 GB each.
# VERBOSE=1      prints each case, and how long it took.
# Needs root, mmdebstrap, a cgroup2 mount, and the registries of Debian and PyPI.
set -euo pipefail
umask 022
here=$(cd "$(dirname "$0")" && pwd)
repository=$(cd "$here/../.." && pwd)
packages=systemd,systemd-sysv,libnss-systemd,dbus,dbus-user-session,udev,procps,kmod,sudo,iproute2,iptables,ca-certificates
packages=$packages,docker.io,docker-cli,docker-compose,containerd,podman,runc,crun,uidmap,slirp4netns,passt,fuse-overlayfs
packages=$packages,python3,python3-venv,python3-dev,gcc,libc6-dev,libcap-dev,make,git,dpkg-dev,musl-tools,busybox-static
others=lxc,incus-base,incus-client,catatonit # others.sh's

target=test-grounds
# shellcheck source=tests/grounds/roots.sh
. "$here/roots.sh"
[ "$(id -u)" -eq 0 ] || die 'needs root'
need mmdebstrap mmdebstrap
cgroups=$(awk '$3 == "cgroup2" { print $2; exit }' /proc/mounts)
[ -n "$cgroups" ] || die 'no cgroup2 file system is mounted'

finish() { # ends the ground of $run: all processes of its cgroup, whatever they are at; then nothing of it is mounted
  [ -n "${run:-}" ] || return 0
  trap '' INT TERM # a second signal, to the whole group say, does not end this
  for _ in $(seq 300); do
    [ -d "$cgroup" ] || break
    find "$cgroup" -name cgroup.procs -exec cat {} + 2>/dev/null | xargs -r kill -KILL 2>/dev/null || true
    find "$cgroup" -depth -type d -exec rmdir {} + 2>/dev/null || sleep 0.1
  done
  rm -rf --one-file-system "$run"
  [ ! -d "$cgroup" ] || echo "test-grounds: $cgroup is left" >&2
  run=''
  trap 'exit 130' INT TERM
}
trap finish EXIT
trap 'exit 130' INT TERM

try_ground() { # SUITE ROOT IMAGE
  run=$(mktemp -d "$grounds/run.XXXXXX")
  cgroup=$cgroups/ocigpu-ground-${run##*.}
  mkdir "$run/root" "$run/upper" "$run/work" "$run/data" "$cgroup"
  mkfifo "$run/booted"
  # Of the mounts nothing is seen outside, and all end with process 1.
  (
    echo "$BASHPID" >"$cgroup/cgroup.procs"
    exec unshare --mount --fork "$here/boot.sh" "$2" "$run" "$repository" "$3"
  ) >"$run/log" 2>&1 </dev/null &
  disown # that it is killed at the end is no news
  read -r -t 600 state <"$run/booted" || state='no answer'
  if [ "$state" != booted ]; then
    cat "$run/log" >&2
    die "$1 does not boot: $state"
  fi
  local enter=(nsenter --target "$(cat "$run/pid")" --mount --pid --net --uts --ipc --cgroup --root --wd
    env -i HOME=/root "VERBOSE=${VERBOSE:-}" "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" TERM=dumb LC_ALL=C.UTF-8)
  local status=0
  "${enter[@]}" bash /root/ocigpu/tests/grounds/inside.sh "$1" || status=$?
  finish
  return "$status"
}

mkdir -p "$grounds"
failed=''
for suite in "$@"; do
  [ "$suite" != sid ] || others=$others,apptainer
  root=$(keep "$suite" important "$packages,$others")
  image=$(keep trixie.tar essential '')
  try_ground "$suite" "$root" "$image" || failed="$failed $suite"
done
[ -z "$failed" ] || { echo "test-grounds: FAILED:$failed"; exit 1; }
