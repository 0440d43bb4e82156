#!/bin/bash
# inside.sh: run.sh's part in a virtual machine.  Its last line has what packaging/tested.py wants to know.
set -uo pipefail
cd /root/ocigpu || exit
word() { sed -n "s/.*\b$1=\([^ ]*\).*/\1/p" /proc/cmdline; }
name=$(word machine)
cases=0 failed=0 begun=0
log=/root/tests.log

try() { # COMMAND...: a case
  local said status=0
  begun=$SECONDS cases=$((cases + 1))
  said=$("$@" 2>&1) || status=$?
  echo "$name: $((SECONDS - begun)) s: $*"
  [ "$status" -eq 0 ] && return
  failed=$((failed + 1))
  printf 'FAILED %s: %s\n    status %s\n' "$name" "$*" "$status"
  tail -n 20 <<<"$said" | sed 's/^/    /'
}

tests() { # WORD...: pytest's; each test is a case
  # Into a file: whoever a test leaves behind would keep a pipe open, and this script waiting for its end.
  local status=0 passed bad
  begun=$SECONDS
  timeout --kill-after=30 2400 .venv/bin/python -m pytest -v -ra --rows all --timeout=600 "$@" >"$log" 2>&1 || status=$?
  count() { tail -n 1 "$log" | grep -oE "[0-9]+ $1" | awk '{ sum += $1 } END { print sum + 0 }'; }
  passed=$(count passed) bad=$(count '(failed|error)')
  [ "$status" -eq 0 ] || [ "$bad" -gt 0 ] || bad=1
  cases=$((cases + passed + bad)) failed=$((failed + bad))
  echo "$name: $((SECONDS - begun)) s: $*: $(tail -n 1 "$log")"
  grep -E '^SKIPPED' "$log" || true
  [ "$bad" -eq 0 ] || { echo "FAILED $name: pytest $*, status $status"; tail -n 400 "$log"; }
  [ "$status" -lt 124 ] || ps -eo pid,ppid,stat,etimes,wchan:30,args --forest
}

packages=(build/packages/ocigpu_*.deb)
try dpkg -i "${packages[@]}"
try ocigpu demo
try ocigpu-runtime --version
# the last program that a start executes is the snapshot
try sh -c 'strace -f -qq -e trace=execve -e signal=none -o /root/calls ocigpu-hook --version && tail -n 1 /root/calls | grep /bin/ocigpu-python'

try python3 -m venv --without-pip /opt/wheel
try .venv/bin/pip --python /opt/wheel/bin/python install --no-index --no-compile --find-links .venv/wheels 'ocigpu[cli]'
try /opt/wheel/bin/ocigpu demo --gpus 2 --devices 1

# Tests take the installed package's programs.
for program in ocigpu ocigpu-runtime ocigpu-hook ocigpu-container-cli; do ln -sf "/usr/bin/$program" ".venv/bin/$program"; done
export SNAPSHOT=/root/snapshot # of build.sh, as the package's
mapfile -t chosen < <(grep -v '^#' tests/machines/tests.txt)
tests "${chosen[@]}"

version() { dpkg-query -W -f '${Version}' "$1" | sed 's/[~+-].*//'; }
missing=$(python3 tests/machines/calls.py)
kernel="$(uname -r), $(($(getconf PAGESIZE) / 1024)) KiB pages, cgroup $(word cgroups | grep . || echo v2)${missing:+, without $missing}"
containers() { # RUNTIME: how many cases have passed whose names have it
  grep -cE "[^a-z]$1[^a-z].* PASSED" "$log"
}
runc="runc $(version runc)" crun="crun $(version crun)"
printf 'tested%s\n' "$(printf '\t%s' "$name" "$cases" "$failed" --system "Debian $(cut -d. -f1 /etc/debian_version), $(uname -m), QEMU" \
  --kernel "$kernel" --python "$(version python3)" --runtimes "$runc, $crun" \
  --engine "$runc" "$(containers runc)" --engine "$crun" "$(containers crun)")"
