#!/bin/bash
# inside.sh SUITE: run.sh's part in the booted ground, whose machine is its own: daemons, /etc and packages are changed.
# Each case is a command and the number of GPUs that it has to list ("-": none are listed; "no": it has to fail).  What
# fails is tried once more, as by tests/support/again.py.  /root/record: the words of it for packaging/tested.py.
set -uo pipefail
suite=$1
cd /root/ocigpu || exit 2
declare -A cases=()
failed=0

try() { # ENGINE GPUS COMMAND...
  local engine=$1 wanted=$2 name
  shift 2
  cases[$engine]=$((${cases[$engine]:-0} + 1))
  attempt "$@" && return
  name=$(sed -n 's/.* --name \([^ ]*\).*/\1/p' <<<"$*") # what the first attempt has left of it
  [ -z "$name" ] || "$1" rm -f "$name" >/dev/null 2>&1
  attempt "$@" && { echo "FLAKY $suite: $engine: $*"; return; }
  failed=$((failed + 1))
  printf 'FAILED %s: %s: %s\n    status %s, %s GPUs (expected: %s)\n' "$suite" "$engine" "$*" "$status" "$seen" "$wanted"
  tail -n 12 <<<"$said" | sed 's/^/    /'
}

attempt() { # try's command, once
  local begun=$SECONDS
  status=0
  said=$(timeout 180 "$@" 2>&1 </dev/null) || status=$?
  seen=$(grep -cE '^([a-z0-9-]+ *\| )?(GPU [0-9]+: |\|   [0-9]+  NVIDIA )' <<<"$(sed 's/\x1b\[[0-9;]*[A-Za-z]//g' <<<"$said")")
  [ -z "${VERBOSE:-}" ] || echo "$((SECONDS - begun)) s: $engine: $*"
  case $wanted in
    no) [ "$status" -ne 0 ] ;;
    -) [ "$status" -eq 0 ] ;;
    *) [ "$status" -eq 0 ] && [ "$seen" = "$wanted" ] ;;
  esac
}

count() { # of pytest's cases, which it lists: each is the engine's that its name has, and else runc's
  awk '/^(PASSED|FAILED|ERROR) / {
    sub(/ - .*/, "") # why it failed
    engine = "runc"
    if (match($0, /podman|docker|containerd|kubernetes|crun/)) engine = substr($0, RSTART, RLENGTH)
    if (engine == "kubernetes") engine = "containerd"
    cases[engine]++
  } END { for (engine in cases) print engine, cases[engine] }'
}

section() { # PAGE HEADING: prints the commands that a page has there, without their comments
  awk -v heading="## $2" '$0 == heading { on = 1; next } /^## / { on = 0 } on && sub(/^    /, "") { sub(/ +# .*/, ""); print }' "$1"
}

add_setting() { # FILE KEY VALUE: into a JSON object
  python3 -c 'import json, sys; file, key, value = sys.argv[1:]
data = json.load(open(file)) | {key: json.loads(value)}; json.dump(data, open(file, "w"))' "$@"
}

running_cases() { # ENGINE CONTAINER COMMAND...: a container of two GPUs' machine that has GPU 0; COMMAND runs one in it
  local engine=$1 container=$2
  shift 2
  try "$engine" 1 "$@" nvidia-smi -L
  try "$engine" - systemctl daemon-reload
  try "$engine" 1 "$@" nvidia-smi -L
  try "$engine" - ocigpu verify "$container"
  try "$engine" - ocigpu explain "$container"
  try "$engine" - ocigpu diff "$container"
  try "$engine" - ocigpu attach "$container" --gpu 1
  try "$engine" 2 "$@" nvidia-smi -L
  try "$engine" - systemctl daemon-reload
  try "$engine" 2 "$@" nvidia-smi -L
  try "$engine" - ocigpu detach "$container" --gpu 1
  try "$engine" 1 "$@" nvidia-smi -L
  try "$engine" - ocigpu repair "$container"
  try "$engine" - sh -c "ocigpu ps | grep -w $container"
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
  *)
    dpkg-divert --quiet --local --rename --divert /usr/libexec/runc --add /usr/sbin/runc
    install -m 755 tests/grounds/runc_without_cpu.py /usr/libexec/runc-without-cpu
    install -m 755 /dev/stdin /usr/sbin/runc <<'SH'
#!/bin/sh
case " $* " in *" create "* | *" run "*) exec /usr/libexec/runc-without-cpu "$@" ;; esac
exec /usr/libexec/runc "$@"
SH
    ;;
esac
# Debian 12's crun raises a limit that a container's root may not raise on all machines.
if [ "$suite" = bookworm ] && ! prlimit --memlock=unlimited true 2>/dev/null; then
  dpkg-divert --quiet --local --rename --divert /usr/libexec/crun --add /usr/bin/crun
  gcc -shared -fPIC -o /usr/libexec/memlock.so tests/support/memlock.c -ldl
  printf '#!/bin/sh\nLD_PRELOAD=/usr/libexec/memlock.so exec /usr/libexec/crun "$@"\n' >/usr/bin/crun
  chmod 755 /usr/bin/crun
fi
version() { dpkg-query -W -f '${Version}' "$1" | sed 's/[~+-].*//'; }
cdi=--cdi # since Docker 25
[ "$(version docker.io | cut -d. -f1)" -ge 25 ] || cdi=''
# systemd allows three starts in a minute.
restart=(sh -c 'systemctl reset-failed docker.service docker.socket; systemctl restart docker')
limits=(--ulimit "nofile=1024:1024" --ulimit "nproc=1024:1024")

# -- the README, word for word: five minutes with Docker, without a GPU ------------------------------------------------
mapfile -t typed < <(section README.md 'With Docker, in five minutes')
docker import /root/debian.tar debian >/dev/null # for the registry, which a ground cannot reach
[ "${#typed[@]}" -ge 8 ] || { echo "README.md has ${#typed[@]} commands, not 8"; exit 2; }
export DEBIAN_FRONTEND=noninteractive
try package - sh -c "${typed[0]#*&& } -y"
# What the README says that the package starts, and no daemon.
units() { systemctl list-unit-files --no-legend --state=enabled 'ocigpu-*' | awk '{ printf "%s ", $1 }'; }
export -f units
try package - bash -c '[ "$(units)" = "ocigpu-cdi-refresh.path ocigpu-cdi-refresh.service " ]'
try package - bash -c '[ -z "$(systemctl list-units --no-legend --state=running "ocigpu-*"; pgrep -a "^ocigpu")" ]'
try README - sh -c "${typed[6]}"
try README - sh -c "${typed[7]}"
try README no sh -c "${typed[2]}" # the doctor: no engine is configured
try README - sh -c "${typed[1]} --yes"
try README 1 sh -c "${typed[5]}"
try README - sh -c "${typed[1]} --undo --yes"
try README no sh -c "${typed[5]}"
systemctl reset-failed docker.service docker.socket # systemd allows three starts in a minute
try README - sh -c "${typed[3]}"
try README - sh -c "${typed[4]}"
try README 1 sh -c "${typed[5]}"
ocigpu sim remove /opt/gpus
try README - ocigpu sim create /opt/gpus --gpus 2 --model l40s
# A real driver's nodes are in /dev, where engines look that bind them into a user namespace.
cp -a /opt/gpus/dev/. /dev/

# -- Docker ------------------------------------------------------------------------------------------------------------
# shellcheck disable=SC2086 # one word or none
try docker - ocigpu engine configure docker $cdi
try docker - "${restart[@]}"
try docker - ocigpu cdi refresh
try docker - ocigpu engine test docker
docker_ways=("hook --gpus all" "runtime --runtime=ocigpu -e NVIDIA_VISIBLE_DEVICES=all")
[ -z "$cdi" ] || docker_ways+=("cdi --device nvidia.com/gpu=all")
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
# Debian 12 has the first Compose, a program of its own, which knows neither way.
if docker compose version >/dev/null 2>&1; then
  cat >/root/compose.yaml <<'YAML'
services:
  a: {image: debian, command: nvidia-smi -L, runtime: ocigpu, environment: [NVIDIA_VISIBLE_DEVICES=0]}
  b: {image: debian, command: nvidia-smi -L, deploy: {resources: {reservations: {devices: [{driver: nvidia, count: 1, capabilities: [gpu]}]}}}}
  c: {image: debian, command: nvidia-smi -L, deploy: {resources: {reservations: {devices: [{driver: cdi, device_ids: [nvidia.com/gpu=1], capabilities: [gpu]}]}}}}
YAML
  try docker 3 docker compose -f /root/compose.yaml up --pull never
  try docker - docker compose -f /root/compose.yaml down
fi
try docker - "${restart[@]}"
try docker 2 sh -c 'docker start hook >/dev/null && docker exec hook nvidia-smi -L'

# -- Docker with userns-remap ------------------------------------------------------------------------------------------
useradd --system dockremap
for file in /etc/subuid /etc/subgid; do echo 'dockremap:200000:65536' >>"$file"; done
cp /etc/docker/daemon.json /root/daemon.json
add_setting /etc/docker/daemon.json userns-remap '"default"'
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
docker save -o /root/image.tar debian
try containerd - ctr images import /root/image.tar
ctr_run=(ctr run --runc-binary /usr/bin/ocigpu-runtime --env)
try containerd 2 "${ctr_run[@]}" NVIDIA_VISIBLE_DEVICES=all --rm docker.io/library/debian:latest both nvidia-smi -L
try containerd - "${ctr_run[@]}" NVIDIA_VISIBLE_DEVICES=0 --detach docker.io/library/debian:latest web sleep infinity
running_cases containerd web ctr task exec --exec-id again web
try containerd - systemctl restart containerd
try containerd 1 ctr task exec --exec-id again web nvidia-smi -L

# -- Podman ------------------------------------------------------------------------------------------------------------
try podman - podman import /root/debian.tar localhost/debian
try podman - ocigpu engine configure podman
try podman - ocigpu engine test podman
try podman 1 podman --runtime ocigpu run --rm -e NVIDIA_VISIBLE_DEVICES=0 localhost/debian nvidia-smi -L
try podman 1 podman run --rm --device nvidia.com/gpu=0 localhost/debian nvidia-smi -L
useradd --system containers # whose ids --userns=auto takes
for file in /etc/subuid /etc/subgid; do echo 'containers:1000000:1000000' >>"$file"; done
for userns in "--uidmap 0:100000:65536" --userns=auto; do
  # shellcheck disable=SC2086 # a list of words
  try podman-userns 1 podman --runtime ocigpu run --rm $userns -e NVIDIA_VISIBLE_DEVICES=0 localhost/debian nvidia-smi -L
  # shellcheck disable=SC2086
  try podman-userns 1 podman --runtime runc run --rm $userns --device nvidia.com/gpu=0 localhost/debian nvidia-smi -L
done
try podman - podman run -d --name pod --device nvidia.com/gpu=0 localhost/debian sleep infinity
running_cases podman pod podman exec pod
try podman - podman restart -t 1 pod
try podman 1 podman exec pod nvidia-smi -L
printf 'FROM localhost/debian\nRUN nvidia-smi -L\n' >/root/Containerfile
# Podman 5.4 builds look into /etc/cdi alone, which refresh says, with the command; before 5.1 they take no devices of CDI.
more=$(ocigpu cdi refresh 2>&1 | sed -n 's/^note: podman build .*: for builds, \(.* --output [^ ]*\) .*/\1/p')
[ -z "$more" ] || try podman - sh -c "$more"
[ "$suite" = bookworm ] ||
  try podman 1 podman build --no-cache "${limits[@]}" --device nvidia.com/gpu=0 -f /root/Containerfile /root/ocigpu/docs

# -- rootless Podman ---------------------------------------------------------------------------------------------------
useradd -m newcomer
user=$(id -u newcomer)
loginctl enable-linger newcomer
for _ in $(seq 300); do [ -S "/run/user/$user/bus" ] && break; sleep 0.2; done
cat >/usr/local/bin/as-newcomer <<SH
#!/bin/sh
cd /home/newcomer && exec runuser -u newcomer -- env HOME=/home/newcomer XDG_RUNTIME_DIR=/run/user/$user \\
  DBUS_SESSION_BUS_ADDRESS=unix:path=/run/user/$user/bus DOCKER_HOST=unix:///run/user/$user/docker.sock "\$@"
SH
chmod 755 /usr/local/bin/as-newcomer
chmod 755 /root && chmod 644 /root/debian.tar
try podman-rootless - as-newcomer podman import /root/debian.tar localhost/debian
try podman-rootless - as-newcomer ocigpu engine configure podman
try podman-rootless - as-newcomer ocigpu engine test podman
try podman-rootless 1 as-newcomer podman --runtime ocigpu run --rm -e NVIDIA_VISIBLE_DEVICES=0 localhost/debian nvidia-smi -L
try podman-rootless 1 as-newcomer podman run --rm --device nvidia.com/gpu=0 localhost/debian nvidia-smi -L
try podman-rootless - as-newcomer ocigpu engine remove podman

# -- rootless Docker ---------------------------------------------------------------------------------------------------
# Debian keeps its scripts where no PATH leads.
ln -s /usr/share/docker.io/contrib/dockerd-rootless.sh /usr/share/docker.io/contrib/dockerd-rootless-setuptool.sh /usr/bin/docker /usr/local/bin
try docker-rootless - as-newcomer dockerd-rootless-setuptool.sh install --skip-iptables
# shellcheck disable=SC2086 # one word or none
try docker-rootless - as-newcomer ocigpu engine configure docker $cdi
if [ -n "$cdi" ] && [ "$(version docker.io | cut -d. -f1)" -lt 28 ]; then
  # Its script hides /etc/cdi and /run/cdi from the daemon: docs/ENGINES.md has the way.
  try docker-rootless - as-newcomer ocigpu cdi generate --output /home/newcomer/.config/cdi/nvidia.yaml
  add_setting /home/newcomer/.config/docker/daemon.json cdi-spec-dirs '["/home/newcomer/.config/cdi"]'
fi
try docker-rootless - as-newcomer systemctl --user restart docker
try docker-rootless - as-newcomer sh -c 'until docker version >/dev/null 2>&1; do sleep 0.2; done' # 20.10 does not tell systemd
try docker-rootless - as-newcomer docker import /root/debian.tar debian
try docker-rootless - as-newcomer ocigpu engine test docker
for way in "${docker_ways[@]}"; do
  # shellcheck disable=SC2086
  try docker-rootless 2 as-newcomer docker run --rm ${way#* } debian nvidia-smi -L
done
try docker-rootless - as-newcomer docker run -d --gpus device=0 --stop-timeout 1 --name own debian sleep infinity
try docker-rootless - as-newcomer systemctl --user daemon-reload
try docker-rootless 1 as-newcomer docker exec own nvidia-smi -L
try docker-rootless - as-newcomer docker rm -f own
try docker-rootless - as-newcomer ocigpu engine remove docker --yes
try docker-rootless - as-newcomer systemctl --user restart docker
try docker-rootless no as-newcomer docker run --rm --runtime=ocigpu debian true

# shellcheck source=tests/grounds/others.sh
. tests/grounds/others.sh

# -- the package, while containers of all run --------------------------------------------------------------------------
docker start hook >/dev/null
all_run=(sh -c 'for one in "docker exec hook" "ctr task exec --exec-id again web" "podman exec pod"; do $one "$@" || exit; done' sh)
try package 4 "${all_run[@]}" nvidia-smi -L
try package - dpkg -i build/packages/ocigpu_*.deb
try package 4 "${all_run[@]}" nvidia-smi -L
try package - systemctl daemon-reload
try package 4 "${all_run[@]}" nvidia-smi -L
try README - sh -c 'ocigpu doctor; test $? -eq 3' # one warning: the host is simulated
try package - ocigpu engine remove --yes
try package no apt-get -qq purge -y ocigpu # the containers that need its runtime or hook for their next start
try package - docker rm -f runtime
try package no apt-get -qq purge -y ocigpu
try package - sh -c 'ctr task kill --signal KILL web; until ctr container rm web; do sleep 0.2; done'
try package - apt-get -qq purge -y ocigpu
try package - docker exec hook true
try package - podman exec pod true
try package - "${restart[@]}"
try package - docker run --rm debian true

# -- tests/engines, with the engines of this ground --------------------------------------------------------------------
loginctl disable-linger newcomer
podman rm -f -a -t 0 >/dev/null 2>&1
docker ps -aq | xargs -r docker rm -f >/dev/null
systemctl stop docker.socket docker containerd
# shellcheck disable=SC2086 # a list of words
OCIGPU_NO_SKIP=1 .venv/bin/python -m pytest -q -n "${WORKERS:-4}" --again -rsfEp -m engine tests/engines tests/containers \
  ${PYTEST_OPTIONS:-} >/root/engines.log 2>&1 </dev/null || {
  grep -vE '^(PASSED|SKIPPED) ' /root/engines.log
  failed=$((failed + $(grep -cE '^(FAILED|ERROR) ' /root/engines.log)))
}
grep '^FLAKY ' /root/engines.log | sed "s/^FLAKY/FLAKY $suite:/"
while read -r engine number; do
  cases[$engine]=$((${cases[$engine]:-0} + number))
done < <(count </root/engines.log)

# -- the record --------------------------------------------------------------------------------------------------------
# shellcheck source=/dev/null
. /etc/os-release
total=0
for number in "${cases[@]}"; do total=$((total + number)); done
{
  printf '%s\n' "$total" "$failed" --system "Debian ${VERSION_ID:-unstable}, systemd $(version systemd)" --kernel "$(uname -r | cut -d. -f1,2)"
  printf '%s\n' --python "$(version python3)" --runtimes "runc $(version runc), crun $(version crun)"
  while IFS=: read -r engine name; do
    [ -z "${cases[$engine]:-}" ] || printf '%s\n' --engine "$name" "${cases[$engine]}"
  done <<ENGINES
docker:Docker $(version docker.io)
userns-remap:Docker $(version docker.io) with userns-remap
docker-rootless:Docker $(version docker.io), rootless
containerd:containerd $(version containerd)
podman:Podman $(version podman)
podman-userns:Podman $(version podman) with --userns=auto
podman-rootless:Podman $(version podman), rootless
incus:Incus $(version incus-base)
apptainer:Apptainer $(version apptainer 2>/dev/null)
runc:runc $(version runc)
crun:crun $(version crun)
ENGINES
} >/root/record
[ "$failed" -eq 0 ]
