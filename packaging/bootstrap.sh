#!/bin/sh
# bootstrap.sh demo|test: makes .venv and its commands, after installing what is missing on this machine.
# On Debian and Ubuntu it installs with apt-get and says so; elsewhere it says what to install and stops.
set -eu
cd "$(dirname "$0")/.."
purpose=${1:-demo}
missing='' packages=''
need() { # COMMAND-OR-FILE PACKAGE
  case $1 in
    /*) [ -e "$1" ] && return ;;
    *) PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin command -v "$1" >/dev/null 2>&1 && return ;;
  esac
  missing="$missing ${1##*/}" packages="$packages $2"
}
packaging/find-python.sh >/dev/null 2>&1 || { missing="$missing python3-venv" packages="$packages python3 python3-venv"; }
python=$(packaging/find-python.sh 2>/dev/null || echo /usr/bin/python3)
header() { "$python" -I -c 'import sysconfig; print(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null || echo /nonexistent/Python.h; }
need cc gcc
printf '#include <stdlib.h>\n' | cc -E -xc - >/dev/null 2>&1 || need /nonexistent/libc-headers libc6-dev
need "$(header)" python3-dev
need /usr/include/sys/capability.h libcap-dev
need runc runc
need busybox busybox-static
if [ "$purpose" = test ]; then
  need crun crun
  need containerd containerd
  need dockerd docker.io
  need docker docker.io
  need newuidmap uidmap
  need setpriv util-linux
  need strace strace
fi
if [ -n "$packages" ]; then
  if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "missing:$missing; installing with apt-get:$packages"
    export DEBIAN_FRONTEND=noninteractive
    apt-get -qq update
    # shellcheck disable=SC2086 # a list of words
    apt-get -qq install -y --no-install-recommends $packages >/dev/null
  else
    echo "missing:$missing" >&2
    echo "install (Debian names):$packages" >&2
    echo 'Fedora names: gcc glibc-static python3-devel libcap-devel runc busybox crun containerd moby-engine shadow-utils' >&2
    exit 1
  fi
fi
python=$(packaging/find-python.sh)
# The virtual environment is made again when the interpreter or the dependencies change.
stamp=.venv/.ocigpu-ready
want="$python $(cksum pyproject.toml packaging/install.sh | tr '\n' ' ')$PWD"
if [ "$(cat "$stamp" 2>/dev/null)" != "$want" ]; then
  echo "making .venv with $python (about half a minute)"
  "$python" -m venv --clear .venv
  .venv/bin/pip install --quiet --disable-pip-version-check ${OCIGPU_PIP_OPTIONS:-} -e '.[dev]'
  packaging/install.sh --bin .venv/bin --venv .venv --python "$python"
  printf '%s\n' "$want" >"$stamp"
fi
