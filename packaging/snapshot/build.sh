#!/bin/sh
# build.sh PYTHON: prints the directory of what take.sh needs, made once for each state of what it is made of: the program
# snapshot, linked statically with musl, and its standard library.  PYTHON: the ordinary interpreter, whose words for
# errors it takes.  Takes some three minutes of two processors; needs musl-gcc, make, patch and, for sources.txt, Debian's
# archive, and keeps all in ~/.cache/ocigpu/snapshot.  SNAPSHOT=DIR: such a directory, made before.  CROSS=aarch64: for
# that machine, with Debian's compiler for it, its musl-dev and a PYTHON of the version that is built.
set -eu
umask 022
here=$(cd "$(dirname "$0")" && pwd)
python=$1
if [ -d "${SNAPSHOT:-}" ]; then
  echo "$SNAPSHOT"
  exit 0
fi
prctl=$(echo "$("$here/../vendored.sh" "$python")"/source/python[-_]prctl-*.tar.gz)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/ocigpu/snapshot
case $cache in *[!A-Za-z0-9_./+@%:,=-]*) echo "snapshot/build.sh: $cache: a path of other characters, which compilers are not given" >&2; exit 1 ;; esac
errors=$("$python" -I -c 'import os
for number in range(134): print(f"[{number}] = \"{os.strerror(number)}\",")')
target=${CROSS:+$CROSS-linux-gnu-} musl_gcc=${CROSS:+$CROSS-linux-}musl-gcc
# Which musl it is: newest.py compares it with the distribution's.
musl="$(. /etc/os-release && echo "$ID ${VERSION_CODENAME:-$ID}") $({ dpkg-query -W -f '${Version}\n' musl-dev || rpm -q --qf '%{VERSION}-%{RELEASE}\n' musl-libc-static; } 2>/dev/null | head -n 1)"
id=$({ cat "$here/build.sh" "$here/sources.txt" "$here/snapshot.c" "$here/snapshot.ld" "$prctl"
  echo "$errors $musl"; "$musl_gcc" -v 2>&1; echo "${CROSS:-$(uname -m)}"; } | sha256sum | cut -c1-16)
mkdir -p "$cache"
exec 9>"$cache/lock"
flock 9 # another run may be building it
if [ -d "$cache/$id" ]; then
  echo "$cache/$id"
  exit 0
fi
find "$cache" -mindepth 1 -maxdepth 1 -mtime +7 ! -name lock -exec rm -rf {} + # of former states, and of what was killed
work=$(mktemp -d "$cache/new.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
note() { echo "snapshot/build.sh: $1" >&2; }
run() { # COMMAND...: what it says is shown only if it fails
  "$@" >"$work/log" 2>&1 || {
    tail -n 20 "$work/log" >&2
    note "failed: $*"
    exit 1
  }
}
note 'building a Python that starts in a millisecond, once (about three minutes)'
grep -v '^#' "$here/sources.txt" | while read -r sum address; do
  file=$cache/${address##*/}
  if ! echo "$sum  $file" | sha256sum --status -c - 2>/dev/null; then
    for try in 1 2 3; do # an archive of many servers, one of which may not answer
      "$python" -I -c 'import shutil, sys, urllib.request
with urllib.request.urlopen(sys.argv[1], timeout=60) as source, open(sys.argv[2], "wb") as file: shutil.copyfileobj(source, file)' \
        "$address" "$file.new" 2>"$work/log" && break
      [ $try -lt 3 ] || { note "$address: $(tail -n 1 "$work/log")"; exit 1; }
      sleep 2
    done
    echo "$sum  $file.new" | sha256sum --status -c - || { note "$address is another file than sources.txt says"; exit 1; }
    mv "$file.new" "$file"
  fi
done
unpack() { # PATTERN DIRECTORY: the file of sources.txt
  tar -C "$2" -xf "$cache/$(sed -n "s|^[^#].*/\($1\)\$|\1|p" "$here/sources.txt")"
}
unpack 'python3.*\.orig\..*' "$work"
source=$(echo "$work"/Python-*)
unpack 'python3.*\.debian\..*' "$source"
# All but those for how Debian lays Python out and tests it.
grep -v '^#' "$source/debian/patches/series" | grep -vE '^(deb-locations|distutils-|sysconfig-debian|tkinter-|gdbm-|link-opt|setup-modules|profiled-build|langpack|disable-sem-check|multiarch|ensurepip-disabled|destshared|min-|makefile-|test-|stable-abi|issue127330|no-sphinx|Add-Debian-specific|revert-logger)' |
  while read -r name; do run patch -d "$source" -p1 -i "$source/debian/patches/$name"; done
# A start ends before what Python learns of its own code is of use, and would copy the pages that it is written to.
run sed -i '/^#define ENABLE_SPECIALIZATION 1$/{s/1/0/;h;};${x;/./!q1;x;}' "$source/Include/internal/pycore_code.h"
unpack 'libcap2.*' "$work"
libcap=$(echo "$work"/libcap-*)/libcap
tar -C "$work" -xf "$prctl"
# musl-gcc knows no header of the kernel, and is asked for a directory of the GNU library's.
mkdir "$work/headers" "$work/build" "$work/build/Modules" "$work/made"
for name in linux asm-generic asm; do
  found=$(echo "#include <$name/types.h>" | "${target}gcc" -E -xc - | sed -n "s|^# 1 \"\(/.*/$name\)/types.h\".*|\1|p" | head -n 1)
  ln -s "$found" "$work/headers/$name"
done
cat >"$work/cc" <<END
#!/bin/sh
case " \$* " in *" --print-multiarch "*) exit 0 ;; esac
exec $musl_gcc -idirafter $work/headers "\$@"
END
chmod 0755 "$work/cc"
flags="-O2 -fno-pie -fstack-protector-strong -ffile-prefix-map=$work=."
cat >"$work/build/Modules/Setup.local" <<'END'
*static*
_datetime _datetimemodule.c
_json _json.c
_struct _struct.c
array arraymodule.c
binascii binascii.c
fcntl fcntlmodule.c
math mathmodule.c
mmap mmapmodule.c
resource resource.c
select selectmodule.c
END
cross=''
if [ -n "$target" ]; then # what configure cannot try out
  cross="--host=${target%-} --build=$(uname -m)-linux-gnu --with-build-python=$python AR=${target}ar ac_cv_file__dev_ptmx=yes ac_cv_file__dev_ptc=no ac_cv_buggy_getaddrinfo=no"
fi
cd "$work/build"
# shellcheck disable=SC2086 # words
run env PKG_CONFIG=false SOURCE_DATE_EPOCH=0 "../${source##*/}/configure" -q "CC=$work/cc" "CFLAGS=$flags" 'LDFLAGS=-static -no-pie' --disable-shared \
  --without-ensurepip --without-mimalloc --disable-test-modules --without-doc-strings --without-readline $cross
run env SOURCE_DATE_EPOCH=0 make -s -j "$(nproc)" MODULE_BINASCII_CFLAGS= MODULE_BINASCII_LDFLAGS= libpython3.13.a
run make -s -C "$libcap" libcap.a "CC=$work/cc $flags" "AR=${target}ar" "RANLIB=${target}ranlib" BUILD_CC=cc USE_GPERF=no SHARED=no PTHREADS=no
echo "$errors" >errors.h
for unit in "$here/snapshot.c" "$work"/python-prctl-*/_prctlmodule.c; do
  # shellcheck disable=SC2086 # words
  run "$work/cc" $flags -std=gnu11 -D_GNU_SOURCE -DHAVE_CONFIG_H -DHAVE_SYS_CAPABILITY_H -I"$source/Include" -I. \
    -I"$libcap/include" -c "$unit" -o "${unit##*/}.o"
done
run "$work/cc" -static -no-pie -s -o "$work/made/snapshot" snapshot.c.o _prctlmodule.c.o libpython3.13.a "$libcap/libcap.a" -lm \
  -Wl,--gc-sections,--wrap=strerror,--wrap=malloc,--wrap=calloc,--wrap=realloc,--wrap=free "-Wl,-T,$here/snapshot.ld" \
  -Wl,-z,norelro,-z,noexecstack,--build-id=none
cp -R "$source/Lib" "$work/made/library"
rm -rf "$work/made/library/test" "$work/made/library/idlelib"
find "$work/made/library" -name __pycache__ -prune -exec rm -rf {} +
echo "$musl" >"$work/made/musl.txt"
cp "$source/LICENSE" "$work/made/LICENSE.python"
cp "$libcap/../License" "$work/made/LICENSE.libcap"
for file in /usr/share/doc/musl*/copyright /usr/share/licenses/musl*/COPYRIGHT; do
  [ ! -e "$file" ] || cp "$file" "$work/made/LICENSE.musl"
done
chmod 0755 "$work/made"
mv "$work/made" "$cache/$id"
echo "$cache/$id"
