#!/bin/bash
# run.sh arm64|kernels [NAME...]: virtual machines under QEMU, each with a kernel of Debian's.  Package and wheel are built
# in a root of Debian 13, arm64's by user-mode emulation, but for the Python of its snapshot, which is cross-compiled; a
# disk is made of it, and each machine starts from that: inside.sh, with the tests of tests.txt.
# A machine has one processor, and as many run at once as this one has: half of what they do is one process after another.
# make test-arm64: kernels with pages of 4 and of 16 KiB.  make test-kernels: this machine's architecture, older kernels.
#
# GROUNDS=DIR    where roots and kernels are kept between runs, each for a week (~/.cache/ocigpu-grounds)
# WRITE=1        writes the result into the tables of what was tested
# Needs root and the registries of Debian and PyPI.  KVM is used where it works.
set -euo pipefail
umask 022
here=$(cd "$(dirname "$0")" && pwd)
repository=$(cd "$here/../.." && pwd)
kind=$1
target=test-$kind
shift
packages=python3,python3-venv,python3-dev,gcc,libc6-dev,libcap-dev,make,dpkg-dev,patch,xz-utils,musl-tools,busybox-static
packages=$packages,runc,crun,strace,iproute2,mount,procps,patchelf
case $kind in
  arm64)
    architecture=arm64
    machines='
      arm64      trixie   linux-image-arm64
      arm64-16k  trixie   linux-image-arm64-16k'
    qemu=(qemu-system-aarch64 -machine virt,gic-version=max)
    # the default for guests is an algorithm that takes emulation most of its time
    if [ "$(uname -m)" = aarch64 ]; then qemu+=(-cpu max); else qemu+=(-cpu max,pauth-impdef=on); fi
    console=ttyAMA0
    ;;
  kernels)
    architecture=amd64
    machines='
      5.10     bullseye  linux-image-amd64
      5.10-v1  bullseye  linux-image-amd64  cgroups=v1
      6.1      bookworm  linux-image-amd64
      6.12     trixie    linux-image-amd64
      sid      sid       linux-image-amd64'
    qemu=(qemu-system-x86_64 -machine q35 -cpu max)
    console=ttyS0
    ;;
esac

qemu+=(-m 3072 -nodefaults -no-user-config -display none -no-reboot -nic none)

# shellcheck source=tests/grounds/roots.sh
. "$here/../grounds/roots.sh"
[ "$(id -u)" -eq 0 ] || die 'needs root'
need mmdebstrap mmdebstrap qemu-system-x86_64 qemu-system-x86 qemu-system-aarch64 qemu-system-arm kmod kmod cpio cpio mke2fs e2fsprogs

run='' mounted='' registered=''
finish() {
  trap '' INT TERM
  [ -z "$run" ] || {
    # shellcheck disable=SC2046 # a list of words
    kill $(jobs -p) 2>/dev/null || true
    wait
    rm -rf --one-file-system "$run"
  }
  [ -z "$registered" ] || echo -1 >/proc/sys/fs/binfmt_misc/qemu-aarch64
  [ -z "$mounted" ] || umount /proc/sys/fs/binfmt_misc
}
trap finish EXIT
trap 'exit 130' INT TERM

emulate() { # lets this machine run programs of arm64, until the end of this script
  [ "$(uname -m)" != aarch64 ] || return 0
  need qemu-aarch64-static qemu-user-static
  [ -e /proc/sys/fs/binfmt_misc/register ] || { mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc && mounted=1; }
  [ ! -e /proc/sys/fs/binfmt_misc/qemu-aarch64 ] || return 0
  cat /usr/lib/binfmt.d/qemu-aarch64.conf >/proc/sys/fs/binfmt_misc/register
  registered=1
}

await() { # SECONDS COMMAND...: runs it so that a signal ends it at once
  timeout --kill-after=10 "$@" </dev/null &
  wait $!
}

accelerate() { # KERNEL: KVM where a kernel comes up under it, which a device that is there does not promise
  accelerator=tcg,thread=multi
  await 20 "${qemu[@]}" -accel kvm -kernel "$1/vmlinuz" -append 'panic=-1 root=/none' 2>/dev/null && accelerator=kvm
  echo "$target: -accel $accelerator"
}

start() { # NAME KERNEL WORDS: a machine in the background
  TMPDIR=$run timeout --kill-after=10 3600 "${qemu[@]}" -accel "$accelerator" -kernel "$2/vmlinuz" -initrd "$2/initrd.gz" \
    -append "console=$console panic=-1 quiet machine=$1 $3" -serial "file:$run/$1.kernel" \
    -drive "file=$run/disk,format=raw,if=virtio,snapshot=on,cache=unsafe" -device virtio-serial-pci \
    -device virtserialport,chardev=words -chardev "file,id=words,path=$run/$1.words" 2>"$run/$1.errors" </dev/null &
  names[$!]=$1
}

report() { # waits until a machine has ended, prints its words and records what it has shown
  local process='' status=0 name record
  until [ -n "$process" ]; do
    for process in "${!names[@]}" ''; do
      [ -z "$process" ] || kill -0 "$process" 2>/dev/null || break
    done
    sleep 1
  done
  wait "$process" || status=$?
  name=${names[$process]}
  unset "names[$process]"
  grep -v '^tested' "$run/$name.words" 2>/dev/null || true
  if ! IFS=$'\t' read -r -a record < <(sed -n 's/^tested\t//p' "$run/$name.words"); then
    echo "FAILED $name: the machine ended (status $status) before its tests" >&2
    tail -n 40 "$run/$name.errors" "$run/$name.kernel" >&2
    failed="$failed $name"
    return
  fi
  "$python" -I "$repository/packaging/tested.py" "$kind" "${record[@]}"
  [ "${record[2]}" -eq 0 ] || failed="$failed $name"
}

mkdir -p "$grounds"
python=$("$repository/packaging/find-python.sh")
[ "$architecture" = "$(dpkg --print-architecture)" ] || emulate
root=$(keep "trixie.$architecture" apt "$packages" "--architectures=$architecture")
cross=''
[ "$architecture" = "$(dpkg --print-architecture)" ] ||
  cross=$(keep trixie.cross apt "python3-venv,python3-dev,gcc,libc6-dev,libcap-dev,make,patch,xz-utils,ca-certificates,musl-tools,gcc-aarch64-linux-gnu,musl-dev:$architecture" \
    "--architectures=$(dpkg --print-architecture),$architecture")
run=$(mktemp -d "$grounds/run.XXXXXX")
mkdir "$run/root" "$run/upper" "$run/work"
if ! await 3600 unshare --mount --pid --fork --kill-child=KILL "$here/build.sh" "$root" "$run" "$repository" "$cross" >"$run/log" 2>&1; then
  cat "$run/log" >&2
  die 'the package was not built'
fi
rm -rf --one-file-system "$run/upper"
export INITRD=$here/initrd.sh
hook="\"\$INITRD\" \"\$1\" # $(cksum <"$INITRD")" # so that what is kept is kept for any clone, until this changes
failed='' accelerator='' names=()
while read -r name suite package words; do
  case " ${*:-$name} " in *" $name "*) ;; *) continue ;; esac
  kernel=$(keep "$suite.$package" extract "$package,busybox-static" "--architectures=$architecture" --extract-hook="$hook")
  [ -n "$accelerator" ] || accelerate "$kernel"
  [ "${#names[@]}" -lt "$(nproc)" ] || report
  start "$name" "$kernel" "$words"
done < <(grep . <<<"$machines")
while [ "${#names[@]}" -gt 0 ]; do report; done
[ -z "$failed" ] || { echo "$target: FAILED:$failed"; exit 1; }
