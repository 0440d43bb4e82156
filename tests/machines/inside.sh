#!/bin/bash
# inside.sh: run.sh's part in a virtual machine.  Its last line has what packaging/tested.py wants to know.
set -uo pipefail
cd /root/ocigpu || exit
word() { sed -n "s/.*\b$1=\([^ ]*\).*/\1/p" /proc/cmdline; }
name=$(word machine)
cases=0 failed=0 begun=0

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
  local said status=0 passed bad
  begun=$SECONDS
  said=$(.venv/bin/python -m pytest -q -ra -n 2 --timeout=1500 "$@" 2>&1) || status=$?
  count() { tail -n 1 <<<"$said" | grep -oE "[0-9]+ $1" | awk '{ sum += $1 } END { print sum + 0 }'; }
  passed=$(count passed) bad=$(count '(failed|error)')
  [ "$status" -eq 0 ] || [ "$bad" -gt 0 ] || bad=1
  cases=$((cases + passed + bad)) failed=$((failed + bad))
  echo "$name: $((SECONDS - begun)) s: $*: $(tail -n 1 <<<"$said")"
  grep -E '^SKIPPED' <<<"$said" || true
  [ "$bad" -eq 0 ] || { echo "FAILED $name: pytest $*"; tail -n 400 <<<"$said"; }
}

packages=(build/packages/ocigpu_*.deb)
try dpkg -i "${packages[@]}"
try ocigpu demo
try ocigpu-runtime --version

try python3 -m venv --without-pip /opt/wheel
try .venv/bin/pip --python /opt/wheel/bin/python install --no-index --no-compile --find-links .venv/wheels 'ocigpu[cli]'
try /opt/wheel/bin/ocigpu demo --gpus 2 --devices 1

# Tests take the installed package's programs.
for program in ocigpu ocigpu-runtime ocigpu-hook ocigpu-container-cli; do ln -sf "/usr/bin/$program" ".venv/bin/$program"; done
read -r -a chosen < <(word tests | tr ',' ' ')
tests tests/machines "${chosen[@]}"

version() { dpkg-query -W -f '${Version}' "$1" | sed 's/[~+-].*//'; }
missing=$(python3 tests/machines/calls.py)
kernel="$(uname -r), $(($(getconf PAGESIZE) / 1024)) KiB pages, cgroup $(word cgroups | grep . || echo v2)${missing:+, without $missing}"
printf 'tested\t%s\t%s\t%s\t--system\t%s\t--kernel\t%s\t--python\t%s\t--runtimes\t%s\n' "$name" "$cases" "$failed" \
  "Debian $(cut -d. -f1 /etc/debian_version), $(uname -m), QEMU" "$kernel" "$(version python3)" "runc $(version runc), crun $(version crun)"
