#!/bin/sh
# vendored.sh PYTHON: prints the directory of the libraries that go into packages, made for that Python of the wheels of
# packaging/requirements.txt; they are fetched from the package index once for each state of the list.
set -eu
umask 022
cd "$(dirname "$0")/.."
python=$1 work=$PWD/build/packages
mkdir -p "$work"
vendored=$work/vendored-$({ cat packaging/requirements.txt; "$python" -I -VV; } | cksum | tr -c '0-9\n' -)
if [ ! -d "$vendored" ]; then
  echo 'fetching the libraries that go into the packages (about half a minute)' >&2
  rm -rf "$work"/vendored-* "$work/new"
  "$python" -I -m venv "$work/new/pip"
  pip() { # COMMAND [OPTION...]
    "$work/new/pip/bin/pip" "$@" --quiet --disable-pip-version-check --use-pep517 --no-deps --require-hashes \
      --only-binary :all: --no-binary python-prctl ${OCIGPU_PIP_OPTIONS:-} --requirement packaging/requirements.txt
  }
  pip download --dest "$work/new/files" || {
    echo 'vendored.sh: the libraries were not fetched: the first build needs a package index (OCIGPU_PIP_OPTIONS=--index-url=URL)' >&2
    exit 1
  }
  pip install --find-links "$work/new/files" --no-compile --target "$work/new/libraries"
  rm -rf "$work/new/libraries/bin"
  mkdir "$work/new/libraries/source"
  mv "$work"/new/files/python[-_]prctl-*.tar.gz "$work/new/libraries/source"
  "$python" -I -m compileall -q -s "$work/new/libraries" -p /usr/lib/ocigpu/vendor --invalidation-mode unchecked-hash \
    "$work/new/libraries"
  mv "$work/new/libraries" "$vendored"
  rm -rf "$work/new"
fi >&2
echo "$vendored"
