#!/bin/sh
# find-python.sh: prints the path of a Python >= 3.11 with venv; exit 1 and says what to install when there is none.
# A version manager's wrapper on PATH is slow and may change under a running system: real interpreters only.
set -u
for candidate in ${OCIGPU_PYTHON:-} /usr/bin/python3 /usr/bin/python3.1[1-9] /usr/local/bin/python3 /usr/local/bin/python3.1[1-9] \
  "$(command -v python3 2>/dev/null)"; do
  [ -x "$candidate" ] || continue
  real=$("$candidate" -I -c 'import sys, venv, ensurepip
if sys.version_info >= (3, 11): print(sys.executable)' 2>/dev/null) || continue
  if [ -n "$real" ]; then echo "$real"; exit 0; fi
done
echo 'find-python.sh: no Python >= 3.11 with venv; apt-get install python3-venv (Ubuntu 22.04: python3.11-venv); dnf install python3 (RHEL 9: python3.11)' >&2
exit 1
