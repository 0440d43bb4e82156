#!/bin/sh
# host-tree.sh OUT: the package as "ocigpu node-installer" puts it on hosts, for /opt/ocigpu: one directory in the new
# directory OUT, named after the version and its content.  It brings the Python that runs this (with its C library: a
# host may have an older one, or none of glibc), and the libraries that are installed for it.  Needs patchelf and ldd;
# packaging/kubernetes/Containerfile runs it as root of the image that is being built.
#
#   --python FILE     the interpreter to bring, with its standard library (default: python3)
#   --vendored DIR    libraries, as pip install --target made them
#   --prefix DIR      the directory on hosts (default: /opt/ocigpu); made here too, while it runs
#   --snapshot MADE   with ocigpu-python for that directory, of what packaging/snapshot/build.sh has made
set -eu
umask 022
here=$(cd "$(dirname "$0")" && pwd)
python=python3 vendored='' prefix=/opt/ocigpu snapshot='' out=''
while [ $# -gt 0 ]; do
  case $1 in
    --python) python=$2; shift 2 ;;
    --vendored) vendored=$2; shift 2 ;;
    --prefix) prefix=$2; shift 2 ;;
    --snapshot) snapshot=$2; shift 2 ;;
    *) out=$1; shift ;;
  esac
done
[ -n "$out" ] && [ -d "$vendored" ] && [ ! -e "$out" ] || { echo 'usage: host-tree.sh --vendored DIR OUT, which does not exist yet' >&2; exit 2; }
vendored=$(cd "$vendored" && pwd)
python=$("$python" -I -c 'import os, sys; print(os.path.realpath(sys.executable))')
library=$("$python" -I -c 'import os; print(os.path.dirname(os.__file__))')
name=$("$here/../tree-id.sh" "$python" "$vendored" "$snapshot")
final=$prefix/versions/$name
[ ! -e "$final" ] || { echo "host-tree.sh: $final exists" >&2; exit 1; }
trap 'rm -rf "$final"; rmdir -p "$prefix/versions" 2>/dev/null || true' EXIT

# The interpreter, where it will be: the stubs name it by this path.
mkdir -p "$final/python/bin" "$final/python/lib"
cp "$python" "$final/python/bin/"
carried=$final/python/bin/${python##*/}
cp -R "$library" "$final/python/lib/"
inner=$final/python/lib/${library##*/}
for left in test idlelib tkinter turtledemo ensurepip lib2to3 site-packages dist-packages config-*; do rm -rf "$inner"/$left; done
find "$inner" -name __pycache__ -type d -prune -exec rm -rf {} +
# Every shared library that any of it needs, and those that the driver's need (libnvidia-ml.so.1 is loaded by it).
loader=''
for file in "$carried" $(find "$inner" "$vendored" -name '*.so*' -type f); do
  for needed in $(ldd "$file" 2>/dev/null | awk '$2 == "=>" && $3 ~ /^\// { print $3 } $1 ~ /^\// { print $1 }'); do
    [ -e "$final/python/lib/${needed##*/}" ] || cp -L "$needed" "$final/python/lib/"
    case ${needed##*/} in ld-linux*) loader=$needed ;; libc.so.6) system=${needed%/*} ;; esac
  done
done
for needed in libm.so.6 libdl.so.2 libpthread.so.0 librt.so.1; do
  [ -e "$final/python/lib/$needed" ] || cp -L "$system/$needed" "$final/python/lib/"
done
# DT_RPATH, not DT_RUNPATH: it holds for what the libraries need in turn.
patchelf --set-interpreter "$final/python/lib/${loader##*/}" --force-rpath --set-rpath "$final/python/lib" "$carried"
"$carried" -I -m compileall -q -j 0 -s "$inner" -p "$inner" --invalidation-mode unchecked-hash "$inner" >/dev/null || true

stage=$(mktemp -d)/tree
"$here/../install.sh" --bin "$final/bin" --venv "$final/library" --stage "$stage" --vendored "$vendored" --python "$carried" ${snapshot:+--snapshot "$snapshot"}
cp -R "$final/python" "$stage$final/"
mkdir -p "$out"
mv "$stage$final" "$out/$name"
rm -rf "${stage%/tree}"
echo "$out/$name"
