#!/bin/bash
# run.sh SUITE...: on each of these Debian suites (bookworm, trixie, sid) what a user does in the first hour, with its real
# engines: a root is made once by mmdebstrap, booted with systemd in private namespaces, the package is built and
# installed there as the README says, inside.sh goes through the engines, and then the suite's own tests of engines
# run there.  make test-grounds; nothing is left behind.  Exit status: 1 when a case failed or a ground did not
# boot, 75 when nothing failed but a root could not be made, 2 when nothing could be run.
#
# GROUNDS=DIR    where roots are kept between runs, each for a week (~/.cache/ocigpu-grounds); about 2 GB each.
# VERBOSE=1      prints each case, and how long it took.
# WRITE=1        notes what was tested in docs/tested.json (packaging/tested.py).
# PYTEST_OPTIONS, WORKERS: of the tests that run there.
# Needs root, mmdebstrap, a cgroup2 mount, and the registries of Debian and PyPI.
set -euo pipefail
umask 022
here=$(cd "$(dirname "$0")" && pwd)
repository=$(cd "$here/../.." && pwd)
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
    exec unshare --mount --fork "$here/boot.sh" "$2" "$run" "$repository" "$3" 9>&-
  ) >"$run/log" 2>&1 </dev/null &
  disown # that it is killed at the end is no news
  read -r -t 1200 state <"$run/booted" || state='no answer'
  if [ "$state" != booted ]; then
    cat "$run/log" >&2
    echo "test-grounds: $1 does not boot: $state" >&2
    finish
    return 1
  fi
  # As a unit of its own there: beside process 1 it would be in a cgroup that the ground does not see.
  local status=0 record enter=(nsenter --target "$(cat "$run/pid")" --mount --pid --net --uts --ipc --cgroup --root --wd)
  "${enter[@]}" env -i systemd-run --quiet --pipe --wait --collect --setenv=HOME=/root --setenv=TERM=dumb --setenv=LC_ALL=C.UTF-8 \
    --setenv=PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin --setenv="VERBOSE=${VERBOSE:-}" \
    --setenv="WORKERS=${WORKERS:-$(($(nproc) * 2))}" --setenv="PYTEST_OPTIONS=${PYTEST_OPTIONS:-}" \
    bash /root/ocigpu/tests/grounds/inside.sh "$1" 9>&- &
  wait $! || status=$? # so that a signal is not kept waiting
  [ ! -e "$run/upper/root/record" ] || mapfile -t record <"$run/upper/root/record"
  rm -rf "$2.kept.new"
  [ ! -d "$run/kept" ] || mv "$run/kept" "$2.kept.new"
  finish
  [ ! -d "$2.kept.new" ] || { rm -rf "$2.kept"; mv "$2.kept.new" "$2.kept"; }
  [ "${#record[@]}" -eq 0 ] || python3 "$repository/packaging/tested.py" grounds "$1" "${record[@]}"
  return "$status"
}

mkdir -p "$grounds"
exec 9>"$grounds/lock"
flock --nonblock 9 || { echo "another run has $grounds: waiting for its end"; flock 9; }
failed='' unmade=''
for suite in "$@"; do
  if ! image=$(keep trixie.tar essential '') || ! root=$(keep_ground "$suite"); then
    unmade="$unmade $suite"
    continue
  fi
  try_ground "$suite" "$root" "$image" || failed="$failed $suite"
done
[ -z "$unmade" ] || echo "test-grounds: NOT TESTED, as no root could be made:$unmade"
[ -z "$failed" ] || { echo "test-grounds: FAILED:$failed"; exit 1; }
[ -z "$unmade" ] || exit 75
