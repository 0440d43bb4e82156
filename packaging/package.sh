#!/bin/sh
# package.sh deb|rpm...: builds the packages ocigpu, ocigpu-kubernetes and ocigpu-nvidia-names in build/packages, for
# this machine's distribution and architecture; prints their paths.
#
# Libraries: the wheels of packaging/requirements.txt and, for ocigpu-kubernetes, packaging/requirements-kubernetes.txt,
# by their hashes from the package index, kept in build/packages; their licences and the source of python-prctl (GPL) go
# along.  Root is not needed.  SOURCE_DATE_EPOCH: time of the files.  SNAPSHOT=no: without the interpreter that is
# started already, which is built once, in three minutes (packaging/snapshot/build.sh); "yes": not without it.
set -eu
umask 022
cd "$(dirname "$0")/.."
for kind in "${@:-none}"; do
  case $kind in deb | rpm) ;; *) echo 'usage: package.sh deb|rpm...' >&2; exit 2 ;; esac
done
work=$PWD/build/packages
tree=$work/tree names=$work/names kubernetes=$work/tree-kubernetes
python=$(packaging/find-python.sh)
python=$("$python" -I -c 'import os, sys; print(os.path.realpath(sys.executable))')
case $python in
  /usr/bin/*) ;;
  *) echo "package.sh: $python is not the distribution's: the packages would depend on a Python that no package has" >&2; exit 1 ;;
esac
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' ocigpu/__init__.py)
vendor=$(sed -n 's/^VENDOR_VERSION = "\(.*\)"$/\1/p' ocigpu/__init__.py) # other packages need one of NVIDIA's at least
export SOURCE_DATE_EPOCH="${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct 2>/dev/null || date +%s)}"
revision=${python##*/} # of packages for another Python the same version differs in this
vendored=$(packaging/vendored.sh "$python")
more=$(packaging/vendored.sh "$python" requirements-kubernetes.txt)
snapshot=$(packaging/snapshot/find.sh "$python")
rm -rf "$tree" "$names" "$kubernetes"
id=$(packaging/tree-id.sh "$python" "$vendored" "$snapshot")
packaging/install.sh --prefix /usr --stage "$tree" --vendored "$vendored" --id "$id" --python "$python" --vendor-names --systemd ${snapshot:+--snapshot "$snapshot"}
# Simulated GPUs for machines without a C compiler, as a wheel brings them.
"$python" -I -S -B -c 'import sys; sys.path += sys.argv[1:3]
from pathlib import Path
from ocigpu.sim.libraries import prebuild
made = Path(sys.argv[1], "ocigpu/sim/prebuilt")
for lacks in filter(None, prebuild(made, native=True).values()):
    print(f"package.sh: simulated GPUs: {lacks}", file=sys.stderr)
sys.exit(not any(made.iterdir()))' \
  "$tree/usr/lib/ocigpu/versions/$id/library" "$vendored"
# dpkg and rpm replace files one after another, and remove those of the former version when they like.  A start must not
# see that: the package's own are only what postinst makes hard links of, in versions/ID.
files=/usr/lib/ocigpu/package/$id
mkdir "$tree/usr/lib/ocigpu/package"
mv "$tree/usr/lib/ocigpu/versions/$id" "$tree$files"
rmdir "$tree/usr/lib/ocigpu/versions"
cp packaging/switch.sh "$tree$files"
mkdir -p "$names/usr/bin" "$tree/usr/share/doc/ocigpu"
mv "$tree"/usr/bin/nvidia-* "$names/usr/bin"
mv "$tree$files/library/vendor/source" "$tree/usr/share/doc/ocigpu/source"
cp packaging/stub.* packaging/ocigpu-* "$tree/usr/share/doc/ocigpu/source"
find "$tree/usr/share/man" -type f -exec gzip -9n {} +
gzip -9nc CHANGELOG.md >"$tree/usr/share/doc/ocigpu/changelog.gz"
"$python" -I packaging/copyright.py "$tree$files/library/vendor" "$files/library/vendor" >"$tree/usr/share/doc/ocigpu/copyright"
if [ -n "$snapshot" ]; then
  mkdir "$tree/usr/share/doc/ocigpu/source/snapshot"
  cp packaging/snapshot/* "$snapshot"/LICENSE* "$snapshot/musl.txt" "$tree/usr/share/doc/ocigpu/source/snapshot"
  cat packaging/snapshot/copyright >>"$tree/usr/share/doc/ocigpu/copyright"
fi
mkdir -p "$kubernetes/usr/lib/ocigpu" "$kubernetes/usr/share/doc/ocigpu-kubernetes"
cp -R "$more" "$kubernetes/usr/lib/ocigpu/kubernetes"
"$python" -I packaging/copyright.py "$more" /usr/lib/ocigpu/kubernetes ocigpu-kubernetes >"$kubernetes/usr/share/doc/ocigpu-kubernetes/copyright"
chmod -R u=rwX,go=rX "$tree" "$names" "$kubernetes"

size() { du -sk --apparent-size "$1" | cut -f1; }
build_deb() { # TREE CONTROL ARCHITECTURE [DEPENDS [SCRIPT...]]
  mkdir "$1/DEBIAN"
  (cd "$1" && find usr -type f -exec md5sum {} +) >"$1/DEBIAN/md5sums"
  sed -e "s|@version@|$version|g; s|@vendor@|$vendor|g; s|@revision@|+$revision|g; s|@architecture@|$3|; s|@size@|$(size "$1")|; s|@depends@|${4:-}|" \
    -e "s|@maintainer@|${DEBFULLNAME:-ocigpu maintainers} <${DEBEMAIL:-root@localhost}>|" "packaging/deb/$2" >"$1/DEBIAN/control"
  name=$(sed -n 's/^Package: //p' "$1/DEBIAN/control")
  place=$1
  shift 4
  for script; do
    sed "s|@id@|$id|" "packaging/deb/$script" >"$place/DEBIAN/${script%%-*}"
    chmod 0755 "$place/DEBIAN/${script%%-*}"
  done
  rm -f "$work/${name}"_*.deb
  dpkg-deb --root-owner-group -Zzstd --build "$place" "$work" >/dev/null
  rm -rf "$place/DEBIAN"
  echo "$work/${name}"_*.deb
}
build_debs() {
  mv "$tree/usr/share/zsh/site-functions" "$tree/usr/share/zsh/vendor-completions" # where Debian's zsh looks
  rm -rf "$work/shlibs"
  mkdir -p "$work/shlibs/debian"
  printf 'Source: ocigpu\n\nPackage: ocigpu\nArchitecture: any\n' >"$work/shlibs/debian/control"
  needed() { # TREE: the packages that its libraries need
    libraries=$(cd "$work/shlibs" && find "$1/usr/lib/ocigpu" -name prebuilt -prune -o -name '*.so' -exec dpkg-shlibdeps --warnings=0 -O {} +)
    echo "${libraries#*=}"
  }
  machine=$(dpkg --print-architecture)
  build_deb "$tree" control "$machine" "${python##*/}, $(needed "$tree")" postinst prerm postrm
  build_deb "$kubernetes" control-kubernetes "$machine" "$(needed "$kubernetes")"
  build_deb "$names" control-nvidia-names all '' prerm-nvidia-names
  rm -rf "$work/shlibs"
  mv "$tree/usr/share/zsh/vendor-completions" "$tree/usr/share/zsh/site-functions"
}
build_rpms() {
  mkdir -p "$tree/usr/lib/systemd/system-preset"
  cp packaging/rpm/90-ocigpu.preset "$tree/usr/lib/systemd/system-preset"
  # Directories too: of those that other packages have as well the last one to go removes them.
  (cd "$tree" && printf '%s\n' '%dir /usr/lib/ocigpu' /usr/lib/ocigpu/package &&
    find usr -mindepth 2 \( -path usr/lib/ocigpu -o -path usr/share/doc -o -path usr/share/man \) -prune -o \
      -type d -printf '%%dir /%p\n' -o -printf '/%p\n' && echo '/usr/share/man/man1/*') >"$work/files"
  rm -rf "$work"/ocigpu*.rpm "$work/rpm"
  rpmbuild -bb --quiet --define "_buildhost reproducible" --define "use_source_date_epoch_as_buildtime 1" \
    --define "clamp_mtime_to_source_date_epoch 1" --define "build_mtime_policy clamp_to_source_date_epoch" \
    --define "_topdir $work/rpm" --define "built_version $version" --define "built_vendor $vendor" --define "built_revision $revision" --define "built_id $id" --define "built_for $python" \
    --define "built_tree $tree" --define "built_names $names" --define "built_kubernetes $kubernetes" --define "built_list $work/files" packaging/rpm/ocigpu.spec
  find "$work/rpm/RPMS" -name '*.rpm' -exec mv {} "$work" \;
  rm -rf "$work/rpm" "$work/files"
  printf '%s\n' "$work"/ocigpu*.rpm
  rm -rf "$tree/usr/lib/systemd/system-preset"
}
for kind in "$@"; do
  case $kind in
    deb) build_debs ;;
    rpm) build_rpms ;;
  esac
done
rm -rf "$tree" "$names" "$kubernetes"
cd "$work" && find . -maxdepth 1 -type f -name 'ocigpu*' -printf '%P\n' | sort | xargs sha256sum >SHA256SUMS # for packaging/get
