#!/bin/sh
# gpu-test.sh: real GPU work in containers (make gpu-test), on machines that may have neither network nor apt.
#   RUNC=/path      low-level runtime, when there is none on PATH
#   WHEELS=DIR      wheels of the dependencies (python-prctl built, setuptools), when PyPI cannot be reached
# Needs a C compiler and busybox.
set -eu
cd "$(dirname "$0")/.."
if [ ! -e /proc/driver/nvidia/version ]; then
  echo 'gpu-test: skipped: no NVIDIA driver is loaded on this machine (/proc/driver/nvidia/version is missing)'
  exit 0
fi
if [ -n "${WHEELS:-}" ]; then
  python=$(packaging/find-python.sh)
  [ -e .venv/.ocigpu-ready ] || {
    "$python" -m venv --clear .venv
    .venv/bin/pip install --quiet --no-index --find-links "$WHEELS" setuptools wheel
    .venv/bin/pip install --quiet --no-index --find-links "$WHEELS" --no-build-isolation -e '.[cli]'
    packaging/install.sh --bin .venv/bin --venv .venv
  }
else
  packaging/bootstrap.sh demo
fi
exec .venv/bin/python tests/gpu/real_gpu.py
