#!/bin/bash
# inside.sh SUITE: run.sh's part in the booted ground, whose machine is its own: daemons, /etc and packages are changed.
# Each case is a command and the number of GPUs that it has to list ("-": none are listed; "no": it has to fail).
set -uo pipefail
suite=$1
cd /root/ocigpu || exit 2
declare -A cases=()
failed=0

try() { # ENGINE GPUS COMMAND...
  local engine=$1 wanted=$2 said status=0 seen begun=$SECONDS
  shift 2
  cases[$engine]=$((${cases[$engine]:-0} + 1))
  said=$(timeout 180 "$@" 2>&1 </dev/null) || status=$?
  seen=$(grep -cE '^([a-z0-9-]+ *\| )?(GPU [0-9]+: |\|   [0-9]+  NVIDIA )' <<<"$(sed 's/\x1b\[[0-9;]*[A-Za-z]//g' <<<"$said")")
  [ -z "${VERBOSE:-}" ] || echo "$((SECONDS - begun)) s: $engine: $*"
  case $wanted in
    no) [ "$status" -ne 0 ] && return ;;
    -) [ "$status" -eq 0 ] && return ;;
    *) [ "$status" -eq 0 ] && [ "$seen" = "$wanted" ] && return ;;
  esac
  failed=$((failed + 1))
  printf 'FAILED %s: %s: %s\n    status %s, %s GPUs (wanted: %s)\n' "$suite" "$engine" "$*" "$status" "$seen" "$wanted"
  tail -n 12 <<<"$said" | sed 's/^/    /'
}

section() { # PAGE HEADING: prints the commands that a page has there, without their comments
  awk -v heading="## $2" '$0 == heading { on = 1; next } /^## / { on = 0 } on && sub(/^    /, "") { sub(/ +# .*/, ""); print }' "$1"
}

# What this machine lacks is not the engines' fault: controllers of cgroup v2 (they may all be of v1) and limits.
controllers=$(cat /sys/fs/cgroup/cgroup.controllers)
case " $controllers " in
  *' pids '*) ;;
  *)
    mkdir -p /etc/containers/containers.conf.d
    printf '[containers]\npids_limit = 0\n' >/etc/containers/containers.conf.d/00-ground.conf
    ;;
esac
case " $controllers " in
  *' cpu '*) ;;
  *) install -m 755 tests/grounds/runc_without_cpu.py /usr/local/sbin/runc ;;
esac
# systemd allows three starts in a minute.
restart=(sh -c 'systemctl reset-failed docker.service docker.socket; systemctl restart docker')
limits=(--ulimit "nofile=1024:1024" --ulimit "nproc=1024:1024")

# -- the README, word for word: five minutes with Docker, without a GPU ------------------------------------------------
mapfile -t typed < <(section README.md 'With Docker, in five minutes')
docker import /root/debian.tar debian >/dev/null # for the registry, which a ground cannot reach
[ "${#typed[@]}" -ge 7 ] || { echo "README.md has ${#typed[@]} commands, not 7"; exit 2; }
export DEBIAN_FRONTEND=noninteractive
try package - sh -c "${typed[0]#*&& } -y"
try README - sh -c "${typed[5]}"
try README - sh -c "${typed[6]}"
try README no sh -c "${typed[1]}" # the doctor: no engine is configured
try README - sh -c "${typed[2]}"
try README - sh -c "${typed[3]}"
try README 1 sh -c "${typed[4]}"
ocigpu sim remove /opt/gpus
try README - ocigpu sim create /opt/gpus --gpus 2 --model l40s
# A real driver's nodes are in /dev, where engines look that bind them into a user namespace.
cp -a /opt/gpus/dev/. /dev/

# -- Docker ------------------------------------------------------------------------------------------------------------
try docker - ocigpu engine configure docker --cdi
try docker - "${restart[@]}"
try docker - ocigpu cdi refresh
try docker - ocigpu engine test docker
docker_ways=("hook --gpus all" "runtime --runtime=ocigpu -e NVIDIA_VISIBLE_DEVICES=all" "cdi --device nvidia.com/gpu=all")
for way in "${docker_ways[@]}"; do
  read -r name words <<<"$way"
  # shellcheck disable=SC2086 # a list of words
  try docker 2 docker run --rm $words debian nvidia-smi -L
  # shellcheck disable=SC2086
  try docker - docker run -d --stop-timeout 1 --name "$name" $words debian sleep infinity
  try docker 2 docker exec "$name" nvidia-smi -L
  try docker - systemctl daemon-reload
  try docker 2 docker exec "$name" nvidia-smi -L
  try docker - docker update --memory-reservation 100m "$name"
  try docker - ocigpu verify "$name"
  try docker - ocigpu explain "$name"
  try docker - ocigpu diff "$name"
  try docker - docker restart -t 1 "$name"
  try docker 2 docker exec "$name" nvidia-smi -L
done
try docker 2 docker exec hook sh -c 'nvidia-smi -L; test ! -e /dev/nvidia7'
try docker 1 docker run --rm --runtime=ocigpu -e NVIDIA_VISIBLE_DEVICES=1 debian nvidia-smi -L
try docker no docker run --rm --runtime=ocigpu -e NVIDIA_VISIBLE_DEVICES=7 debian true
try docker - docker run -d --stop-timeout 1 --name one --gpus device=0 debian sleep infinity
try docker - ocigpu attach one --gpu 1
try docker 2 docker exec one nvidia-smi -L
try docker - ocigpu detach one --gpu 0
try docker - systemctl daemon-reload
try docker 1 docker exec one nvidia-smi -L
try docker - ocigpu verify one
try docker - ocigpu repair one
try docker - ocigpu ps
try docker - ocigpu top --once
cat >/root/compose.yaml <<'YAML'
services:
  a: {image: debian, command: nvidia-smi -L, runtime: ocigpu, environment: [NVIDIA_VISIBLE_DEVICES=0]}
  b: {image: debian, command: nvidia-smi -L, deploy: {resources: {reservations: {devices: [{driver: nvidia, count: 1, capabilities: [gpu]}]}}}}
  c: {image: debian, command: nvidia-smi -L, deploy: {resources: {reservations: {devices: [{driver: cdi, device_ids: [nvidia.com/gpu=1], capabilities: [gpu]}]}}}}
YAML
try docker 3 docker compose -f /root/compose.yaml up --pull never
try docker - docker compose -f /root/compose.yaml down
try docker - "${restart[@]}"
try docker 2 sh -c 'docker start hook >/dev/null && docker exec hook nvidia-smi -L'

# -- the package, while containers run ---------------------------------------------------------------------------------
try package - dpkg -i build/packages/ocigpu_*.deb
try package 2 docker exec hook nvidia-smi -L
try package - systemctl daemon-reload
try package 2 docker exec hook nvidia-smi -L

# -- Docker with userns-remap ------------------------------------------------------------------------------------------
useradd --system dockremap
for file in /etc/subuid /etc/subgid; do echo 'dockremap:200000:65536' >>"$file"; done
cp /etc/docker/daemon.json /root/daemon.json
python3 - <<'PYTHON'
import json
with open("/etc/docker/daemon.json", "r+") as file:
    settings = json.load(file) | {"userns-remap": "default"}
    file.seek(0)
    json.dump(settings, file)
    file.truncate()
PYTHON
try userns-remap - "${restart[@]}"
try userns-remap - docker import /root/debian.tar debian
for way in "${docker_ways[@]}"; do
  # shellcheck disable=SC2086
  try userns-remap 2 docker run --rm ${way#* } debian nvidia-smi -L
done
try userns-remap - ocigpu engine test docker
cp /root/daemon.json /etc/docker/daemon.json
try docker - "${restart[@]}"

# -- containerd --------------------------------------------------------------------------------------------------------
try containerd - ocigpu engine configure containerd
try containerd - systemctl restart containerd
try containerd - ocigpu engine status
try containerd - ocigpu engine test containerd

# -- Podman ------------------------------------------------------------------------------------------------------------
try podman - podman import /root/debian.tar localhost/debian
try podman - ocigpu engine configure podman
try podman - ocigpu engine test podman
try podman 1 podman --runtime ocigpu run --rm -e NVIDIA_VISIBLE_DEVICES=0 localhost/debian nvidia-smi -L
try podman 1 podman run --rm --device nvidia.com/gpu=0 localhost/debian nvidia-smi -L
echo 'containers:1000000:1000000' | tee -a /etc/subuid >>/etc/subgid
userns=(--uidmap 0:100000:65536)
try podman 1 podman --runtime ocigpu run --rm "${userns[@]}" -e NVIDIA_VISIBLE_DEVICES=0 localhost/debian nvidia-smi -L
try podman 1 podman --runtime runc run --rm "${userns[@]}" --device nvidia.com/gpu=0 localhost/debian nvidia-smi -L
try podman - podman run -d --name pod --device nvidia.com/gpu=1 localhost/debian sleep infinity
try podman 1 podman exec pod nvidia-smi -L
try podman - systemctl daemon-reload
try podman 1 podman exec pod nvidia-smi -L
try podman - ocigpu verify pod
try podman - podman restart -t 1 pod
try podman 1 podman exec pod nvidia-smi -L
printf 'FROM localhost/debian\nRUN nvidia-smi -L\n' >/root/Containerfile
# Podman 5.4 builds look into /etc/cdi alone, which refresh says, with the command.
more=$(ocigpu cdi refresh 2>&1 | sed -n 's/^note: podman build .*: for builds, \(.* --output [^ ]*\) .*/\1/p')
[ -z "$more" ] || try podman - sh -c "$more"
try podman 1 podman build --no-cache "${limits[@]}" --device nvidia.com/gpu=0 -f /root/Containerfile /root/ocigpu/docs
try podman - podman rm -f -t 0 pod

# -- rootless Podman ---------------------------------------------------------------------------------------------------
useradd -m newcomer
user=$(id -u newcomer)
loginctl enable-linger newcomer
for _ in $(seq 300); do [ -S "/run/user/$user/bus" ] && break; sleep 0.2; done
as_user=(runuser -u newcomer -- env HOME=/home/newcomer "XDG_RUNTIME_DIR=/run/user/$user"
  "DBUS_SESSION_BUS_ADDRESS=unix:path=/run/user/$user/bus" sh -c 'cd && exec "$@"' sh)
chmod 755 /root && chmod 644 /root/debian.tar
try rootless - "${as_user[@]}" podman import /root/debian.tar localhost/debian
try rootless - "${as_user[@]}" ocigpu engine configure podman
try rootless - "${as_user[@]}" ocigpu engine test podman
try rootless 1 "${as_user[@]}" podman --runtime ocigpu run --rm -e NVIDIA_VISIBLE_DEVICES=0 localhost/debian nvidia-smi -L
try rootless 1 "${as_user[@]}" podman run --rm --device nvidia.com/gpu=0 localhost/debian nvidia-smi -L
try rootless - "${as_user[@]}" ocigpu engine remove podman

# shellcheck source=tests/grounds/others.sh
. tests/grounds/others.sh

# -- the end of it -----------------------------------------------------------------------------------------------------
try README - sh -c 'ocigpu doctor; test $? -eq 3' # one warning: the host is simulated
try package - docker rm -f runtime cdi one
try package - docker start hook
try package - ocigpu engine remove --yes
try package - apt-get -qq purge -y ocigpu
try package - docker exec hook true
try package - "${restart[@]}"
try package - docker run --rm debian true
try package - docker rm -f hook

version() { dpkg-query -W -f '${Version}' "$1" | sed 's/[~+-].*//'; }
engines=''
for engine in docker userns-remap containerd podman rootless incus apptainer package README; do
  engines="$engines, ${cases[$engine]:-0} $engine"
done
printf '%s: systemd %s, Docker %s, containerd %s, Podman %s, runc %s, crun %s, Python %s; cases:%s; failed: %s\n' "$suite" \
  "$(version systemd)" "$(version docker.io)" "$(version containerd)" "$(version podman)" "$(version runc)" \
  "$(version crun)" "$(version python3)" "${engines#,}" "$failed"
[ "$failed" -eq 0 ]
