#!/bin/sh
# vendored.sh PYTHON [LIST]: prints the directory of the libraries that go into packages, made for that Python of the
# wheels of packaging/LIST (requirements.txt); they are fetched from the package index once for each state of the list.
set -eu
umask 022
cd "$(dirname "$0")/.."
python=$1 list=${2:-requirements.txt} work=$PWD/build/packages
mkdir -p "$work"
case $list in requirements.txt) name=vendored ;; *) list_name=${list#requirements-} name=${list_name%.txt} ;; esac
vendored=$work/$name-$({ cat packaging/requirements-build.txt "packaging/$list"; "$python" -I -VV; } | cksum | tr -c '0-9\n' -)
if [ ! -d "$vendored" ]; then
  exec 9>"$work/lock"
  flock 9 # another run may be fetching them
fi
if [ ! -d "$vendored" ]; then
  echo "fetching the libraries of packaging/$list, which go into the packages (about half a minute)" >&2
  rm -rf "$work/$name"-* "$work/new"
  "$python" -I -m venv "$work/new/pip"
  { packaging/by-hash.sh "$work/new/pip/bin/pip" install requirements-build.txt &&
    packaging/by-hash.sh "$work/new/pip/bin/pip" download "$list" --dest "$work/new/files"; } || {
    echo 'vendored.sh: the libraries were not fetched: the first build needs a package index (OCIGPU_PIP_OPTIONS=--index-url=URL)' >&2
    exit 1
  }
  packaging/by-hash.sh "$work/new/pip/bin/pip" install "$list" --find-links "$work/new/files" --no-compile --target "$work/new/libraries"
  rm -rf "$work/new/libraries/bin"
  mkdir "$work/new/libraries/source"
  find "$work/new/files" -name '*.tar.gz' -exec mv {} "$work/new/libraries/source" \;
  rmdir "$work/new/libraries/source" 2>/dev/null || true
  "$python" -I -m compileall -q -s "$work/new/libraries" -p /usr/lib/ocigpu/vendor --invalidation-mode unchecked-hash \
    "$work/new/libraries"
  mv "$work/new/libraries" "$vendored"
  rm -rf "$work/new"
fi >&2
echo "$vendored"
