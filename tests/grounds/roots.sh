# shellcheck shell=bash
# roots.sh: what scripts share that make roots of Debian and keep them between runs ($GROUNDS); $target is make's word.
grounds=${GROUNDS:-${XDG_CACHE_HOME:-$HOME/.cache}/ocigpu-grounds}
mirror=${MIRROR:-http://deb.debian.org/debian}

die() { echo "${target:?}: $*" >&2; exit 2; }

need() { # PROGRAM PACKAGE...: installs the packages of the programs that are missing
  local missing='' packages=''
  while [ $# -gt 0 ]; do
    command -v "$1" >/dev/null || { missing="$missing $1"; packages="$packages $2"; }
    shift 2
  done
  [ -n "$missing" ] || return 0
  command -v apt-get >/dev/null || die "missing:$missing: install them with the package manager"
  echo "missing:$missing; installing with apt-get:$packages"
  # shellcheck disable=SC2086 # a list of words
  apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends $packages >/dev/null
}

thrice() { # COMMAND...: a registry may be busy for a moment
  local pause
  for pause in 10 30; do
    "$@" && return
    echo "$1 failed; once more in $pause s" >&2
    sleep "$pause"
  done
  "$@"
}

make_root() { # PATH ARGUMENT...: mmdebstrap's, in a fresh directory or file
  rm -rf --one-file-system "$1"
  # unstable's list of packages is not signed for long
  mmdebstrap --quiet --mode=root --aptopt='Acquire::Languages "none"' --aptopt='Acquire::Check-Valid-Until "false"' \
    "${@:2}" "$1" "$mirror" >&2
}

keep() { # NAME VARIANT PACKAGES [OPTION...]: prints the path of what mmdebstrap makes so, made anew after a week
  # NAME: a suite, or SUITE.tar for an archive, or SUITE.WORD for another directory of that suite
  local suite=${1%%.*} kind=${1#"${1%%.*}"} path
  path=$grounds/$suite-$(echo "${*:2} $mirror" | cksum | cut -d' ' -f1)$kind
  if [ -z "$(find "$path" -maxdepth 0 -mtime -7 2>/dev/null)" ]; then
    echo "making $path (some minutes)" >&2
    find "$grounds" -maxdepth 1 -regex ".*/$suite-[0-9]+$kind\(\.new$kind\|\.kept\(\.new\)?\|\.release\)?" -exec rm -rf --one-file-system {} +
    thrice make_root "$path.new$kind" --variant="$2" ${3:+--include="$3"} "${@:4}" "$suite" ||
      die "no root of $suite could be made from $mirror in three tries: nothing was tested there"
    touch "$path.new$kind"
    mv "$path.new$kind" "$path"
  fi
  echo "$path"
}

keep_ground() { # SUITE: prints the path of the root that make test-grounds boots
  local packages more
  packages=systemd,systemd-sysv,libnss-systemd,dbus,dbus-user-session,udev,procps,kmod,sudo,iproute2,iptables,ca-certificates
  packages=$packages,docker.io,docker-compose,containerd,podman,runc,crun,uidmap,rootlesskit,slirp4netns,passt,fuse-overlayfs
  packages=$packages,python3,python3-venv,python3-dev,gcc,libc6-dev,libcap-dev,make,git,dpkg-dev,musl-tools,busybox-static
  packages=$packages,rpm,strace,openssl,patchelf
  case $1 in
    bookworm) more='' ;; # docker.io has the client; neither buildx nor Incus is there
    trixie) more=,docker-cli,docker-buildx,lxc,incus-base,incus-client,catatonit ;; # what others.sh needs
    *) more=,docker-cli,docker-buildx,lxc,incus-base,incus-client,catatonit,apptainer ;;
  esac
  keep "$1" important "$packages$more"
}

take_repository() { # REPOSITORY ROOT: copies what git does not ignore to /root/ocigpu there
  mkdir -p "$2/root/ocigpu"
  git -C "$1" ls-files -z --cached --others --exclude-standard |
    (cd "$1" && tar -c --null --files-from=- --ignore-failed-read) | tar -x --no-same-owner -C "$2/root/ocigpu"
}

in_root() { # ROOT COMMAND...: runs it there with the machine's network; in a mount namespace of the caller's
  local root=$1 proxy
  # Of pip's settings the index alone is taken along: what else they name are files of this machine.
  PIP_INDEX_URL=${PIP_INDEX_URL:-$(python3 -m pip config get global.index-url 2>/dev/null || true)}
  [ -z "$PIP_INDEX_URL" ] || export PIP_INDEX_URL
  cat /etc/resolv.conf >"$root/etc/resolv.conf"
  mkdir -p "$root/etc/ssl/certs"
  [ ! -e /etc/ssl/certs/ca-certificates.crt ] || cat /etc/ssl/certs/ca-certificates.crt >"$root/etc/ssl/certs/ca-certificates.crt"
  mount -t proc proc "$root/proc"
  mount -t sysfs sysfs "$root/sys"
  mount --bind /dev "$root/dev"
  mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts "$root/dev/pts"
  mapfile -t proxy < <(env | grep -E '^(https?_proxy|no_proxy|HTTPS?_PROXY|NO_PROXY|PIP_INDEX_URL)=')
  thrice chroot "$root" env -i "${proxy[@]}" HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 "${@:2}"
  umount "$root/dev/pts" "$root/dev" "$root/sys" "$root/proc"
}
