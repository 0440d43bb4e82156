#!/bin/sh
# bootstrap.sh demo|test: makes .venv and its commands, after installing what is missing on this machine.
# bootstrap.sh install|deb|rpm|image: only installs what packaging/install.sh, package.sh and kubernetes/image.sh need.
# On Debian and Ubuntu it installs with apt-get and says so; elsewhere it says what to install and stops.
set -eu
umask 022 # what is made here runs as root too
cd "$(dirname "$0")/.."
purpose=${1:-demo}
missing='' packages='' fedora=''
need() { # COMMAND-OR-FILE DEBIAN-PACKAGE FEDORA-PACKAGE
  case $1 in
    /*) [ -e "$1" ] && return ;;
    *) PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin command -v "$1" >/dev/null 2>&1 && return ;;
  esac
  missing="$missing ${1##*/}" packages="$packages $2" fedora="$fedora $3"
}
# Where the system's Python is older, another one of the distribution: Ubuntu 22.04 and RHEL 9 have 3.11 beside theirs.
if python=$(packaging/find-python.sh 2>/dev/null); then
  name=${python##*/}
else
  name=python3
  /usr/bin/python3 -I -c 'import sys; sys.exit(sys.version_info >= (3, 11))' 2>/dev/null && name=python3.11
  python=/usr/bin/$name
  need /nonexistent/python3 "$name $name-venv" "$name"
fi
header() { "$python" -I -c 'import sysconfig; print(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null || echo /nonexistent/Python.h; }
need cc gcc gcc
printf '#include <stdlib.h>\n' | cc -E -xc - >/dev/null 2>&1 || need /nonexistent/libc-headers libc6-dev glibc-devel
need "$(header)" "$name-dev" "$name-devel"
need /usr/include/sys/capability.h libcap-dev libcap-devel
case $purpose in deb | test) need dpkg-shlibdeps dpkg-dev dpkg-dev ;; esac
case $purpose in rpm | test) need rpmbuild rpm rpm-build ;; esac
case $purpose in install | deb | rpm | image | test) need musl-gcc musl-tools musl-gcc ;; esac # the stubs start quicker with it: packaging/stub.sh
case $purpose in image) need debootstrap debootstrap debootstrap; need patchelf patchelf patchelf; need patch patch patch; need /usr/share/misc/pci.ids pci.ids hwdata ;; esac
case $purpose in install | deb | rpm | image) only_install=1 ;; *) only_install='' ;; esac
if [ -z "$only_install" ]; then
  need runc runc runc
  need busybox busybox-static busybox
fi
if [ "$purpose" = test ]; then
  printf 'int main(void) { return 0; }\n' | cc -static -o /dev/null -xc - >/dev/null 2>&1 ||
    need /nonexistent/libc.a libc6-dev glibc-static
  need crun crun crun
  need containerd containerd containerd
  need dockerd docker.io moby-engine
  need docker docker-cli docker-cli
  need newuidmap uidmap shadow-utils
  need setpriv util-linux util-linux
  need podman podman podman
  need lxc-execute lxc lxc
  need strace strace strace
  need systemctl systemd systemd
  need openssl openssl openssl
  need patchelf patchelf patchelf
  need apt-ftparchive apt-utils apt
  need createrepo_c createrepo-c createrepo_c
  need gpg gnupg gnupg2
  ls /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1 || need postgres postgresql postgresql-server
fi
if [ -n "$packages" ]; then
  if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "missing:$missing; installing with apt-get:$packages"
    export DEBIAN_FRONTEND=noninteractive
    case $packages in *' postgresql'*) # the tests make clusters of their own: Debian shall start none
      [ -e /etc/postgresql-common/createcluster.conf ] || {
        mkdir -p /etc/postgresql-common && echo 'create_main_cluster = false' >/etc/postgresql-common/createcluster.conf
      } ;;
    esac
    apt-get -qq update
    # until Debian 12 the client is part of docker.io
    apt-cache show docker-cli >/dev/null 2>&1 || packages=$(echo "$packages" | sed 's/ docker-cli/ docker.io/')
    # shellcheck disable=SC2086 # a list of words
    apt-get -qq install -y --no-install-recommends $packages >/dev/null
  else
    echo "missing:$missing" >&2
    echo "install these packages, then try again (as root on Debian or Ubuntu this is done for you):" >&2
    case $packages in *docker-cli*) note=' (docker-cli: part of docker.io until Debian 12)' ;; *) note='' ;; esac
    echo "  Debian, Ubuntu:$packages$note" >&2
    echo "  Fedora:$fedora" >&2
    exit 1
  fi
fi
python=$(packaging/find-python.sh)
[ -z "$only_install" ] || exit 0
# The virtual environment is made again when the interpreter or the dependencies change.
stamp=.venv/.ocigpu-ready
want="$python $("$python" -I -V) $(cksum pyproject.toml ocigpu/__init__.py packaging/install.sh packaging/byte_code.py ocigpu/entry/image.py packaging/stub.* packaging/ocigpu-* packaging/wheel/* packaging/snapshot/* packaging/kubernetes/*helm* | tr '\n' ' ')$PWD ${SNAPSHOT:+$SNAPSHOT $(find ocigpu -name '*.py' -exec cksum {} + | sort | cksum)}"
if [ "$(cat "$stamp" 2>/dev/null)" != "$want" ]; then
  echo "making .venv with $python (about half a minute)"
  "$python" -m venv --clear .venv
  .venv/bin/pip install --quiet --disable-pip-version-check --use-pep517 ${OCIGPU_PIP_OPTIONS:-} -e '.[dev]'
  packaging/install.sh --bin .venv/bin --venv .venv --python "$python"
  printf '%s\n' "$want" >"$stamp"
fi
if [ "$purpose" = test ]; then .venv/bin/python packaging/kubernetes/get_helm.py .venv/bin; fi
