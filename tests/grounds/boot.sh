#!/bin/bash
# boot.sh ROOT RUN REPOSITORY IMAGE: in a mount namespace of its own, builds the package in an overlay on ROOT and boots
# systemd there as process 1 of private namespaces; run.sh calls it.  RUN/pid is process 1, RUN/booted a word of how it
# went.  ROOT.kept: the tests' environment, of which packaging/bootstrap.sh knows when it is too old, what pip fetched, and what a snapshot is made of;
# RUN/kept: a new one.
set -euo pipefail
root=$1 run=$2 repository=$3 image=$4 new=$2/root
# shellcheck source=tests/grounds/roots.sh
. "$(dirname "$0")/roots.sh"
trap 'echo "it ended before it was up" >"$run/booted"' EXIT
mount --make-rprivate /
mkdir -p "$root.kept"
mount -t overlay overlay -o "lowerdir=$root.kept:$root,upperdir=$run/upper,workdir=$run/work" "$new"
# Engines keep overlays of their own, which cannot lie on this one.
for directory in var/lib/docker var/lib/containerd var/lib/containers home tmp; do
  mkdir -p "$run/data/$directory" "$new/$directory"
  mount --bind "$run/data/$directory" "$new/$directory"
done
chmod 1777 "$new/tmp"
mkdir -p "$new/old" "$new/root"
cp "$image" "$new/root/debian.tar"
take_repository "$repository" "$new"
# The README's first line, and what the tests need; the ground itself has no network.
in_root "$new" sh -c 'make -C /root/ocigpu deb && /root/ocigpu/packaging/bootstrap.sh test'
made=root/ocigpu/.venv/.ocigpu-ready
snapshots=root/.cache/ocigpu/snapshot
{ cmp --quiet "$new/$made" "$root.kept/$made" && [ "$(ls "$new/$snapshots")" = "$(ls "$root.kept/$snapshots" 2>/dev/null)" ]; } ||
  (mkdir "$run/kept" && cd "$new" && cp -a --parents root/ocigpu/.venv root/.cache/pip "$snapshots" "$run/kept")

cat >"$run/init" <<'INIT'
#!/bin/bash
# process 1 of the private namespaces, until it is systemd
set -euo pipefail
new=$1
mount -t proc proc "$new/proc"
mount -t sysfs sysfs "$new/sys"
mount -t cgroup2 cgroup2 "$new/sys/fs/cgroup"
mount -t tmpfs -o mode=755,dev tmpfs "$new/dev"
while read -r name major minor; do mknod -m 666 "$new/dev/$name" c "$major" "$minor"; done <<'NODES'
null 1 3
zero 1 5
full 1 7
random 1 8
urandom 1 9
tty 5 0
console 5 1
fuse 10 229
kmsg 1 11
NODES
mkdir "$new/dev/pts" "$new/dev/shm" "$new/dev/mqueue" "$new/dev/net"
mknod -m 666 "$new/dev/net/tun" c 10 200
mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts "$new/dev/pts"
mount -t tmpfs -o mode=1777 tmpfs "$new/dev/shm"
mount -t tmpfs -o mode=755 tmpfs "$new/run"
ln -s pts/ptmx "$new/dev/ptmx"
ln -s /proc/self/fd "$new/dev/fd"
for number in 0:stdin 1:stdout 2:stderr; do ln -s "/proc/self/fd/${number%%:*}" "$new/dev/${number#*:}"; done
ip link set lo up
# Leads nowhere; pasta, the network of rootless Podman, wants a route to copy.
ip link add eth0 type veth peer name nowhere
ip address add 192.0.2.2/24 dev eth0
ip link set nowhere up
ip link set eth0 up
ip route add default via 192.0.2.1
hostname ground
cd "$new"
pivot_root . old
cd /
umount -l /old
exec env -i container=oci PATH=/usr/sbin:/usr/bin:/sbin:/bin TERM=dumb /lib/systemd/systemd --log-target=null
INIT
chmod 755 "$run/init"
unshare --mount --pid --net --uts --ipc --cgroup --fork --kill-child=KILL "$run/init" "$new" &
outer=$!
state='systemd does not answer'
for _ in $(seq 900); do
  pid=$(pgrep -P "$outer" || true)
  if [ -n "$pid" ] && [ "$(cat "/proc/$pid/comm" 2>/dev/null)" = systemd ]; then
    echo "$pid" >"$run/pid"
    case $(nsenter --target "$pid" --mount --pid --net --uts --ipc --cgroup --root --wd systemctl is-system-running 2>/dev/null) in
      running | degraded) state=booted; break ;;
    esac
  fi
  sleep 0.2
done
trap - EXIT
echo "$state" >"$run/booted"
wait "$outer" || true
