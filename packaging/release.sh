#!/bin/bash
# release.sh VERSION: makes everything of a release in build/release/VERSION, which any web server can serve as it is:
#
#   *.deb, *.rpm                packages, for the Python of each of SUITES (Debian: bookworm trixie sid)
#   *.whl, *.tar.gz             wheel and source distribution
#   *.tgz, *-image.tar          Helm chart, and the image of the pods ("IMAGE=no": without)
#   ocigpu-VERSION.cdx.json     the libraries and sources of others that packages contain (CycloneDX)
#   dists/, rpm/                an apt repository with a suite for each of SUITES, a dnf repository for each Python
#   ocigpu-archive-keyring.asc  the public part of KEY, whose secret part has signed the repositories and SHA256SUMS
#   SHA256SUMS                  of all files beside it, which packaging/get reads
#
# Each suite's packages are built in a root of that suite, from what is committed and nothing else: with the same roots
# two runs give the same bytes, but for signatures and the image.  KEY: fingerprint of a key of gpg (GNUPGHOME); without
# it nothing is signed.
# Needs root, mmdebstrap, the registries of Debian and PyPI; a quarter of an hour for each suite the first time.
set -euo pipefail
umask 022
cd "$(dirname "$0")/.."
target=release
# shellcheck source=tests/grounds/roots.sh
. tests/grounds/roots.sh

build_in() { # ROOT RUN WHAT...: as process of a mount namespace of its own, with what is committed on descriptor 0
  local root=$1 run=$2 made=build/packages
  mount --make-rprivate /
  mkdir -p "$root.release/packages" "$root.release/cache" "$run/root" "$run/upper" "$run/work"
  mkdir -m 1777 "$run/tmp" # apt checks signatures as a user of its own
  mount -t overlay overlay -o "lowerdir=$root,upperdir=$run/upper,workdir=$run/work" "$run/root"
  mount --bind "$run/tmp" "$run/root/tmp"
  mkdir -p "$run/root/root/ocigpu/$made" "$run/root/root/.cache" "$run/root/root/made"
  # libraries and the interpreter that is kept started, by the sums of what they are made of
  mount --bind "$root.release/packages" "$run/root/root/ocigpu/$made"
  mount --bind "$root.release/cache" "$run/root/root/.cache"
  mount --bind "$out" "$run/root/root/made"
  tar -x --no-same-owner -C "$run/root/root/ocigpu"
  in_root "$run/root" env -C /root/ocigpu "SOURCE_DATE_EPOCH=$SOURCE_DATE_EPOCH" "SNAPSHOT=${SNAPSHOT:-yes}" \
    bash packaging/release.sh --here "${@:3}" </dev/null >&2
}

build_here() { # deb|rpm|python|image...: in a root, as in this directory; what is made goes to /root/made
  local word place
  for word; do
    case $word in
      deb | rpm)
        rm -f build/packages/ocigpu*
        make "$word"
        mv -n build/packages/ocigpu*."$word" /root/made # NVIDIA's names are there from the first suite, if at all
        ;;
      image)
        make image
        mv build/ocigpu-*-image.tar /root/made
        ;;
      python)
        place=$(mktemp -d)
        python3 -m venv "$place/venv"
        packaging/by-hash.sh "$place/venv/bin/pip" install requirements-build.txt
        "$place/venv/bin/python" -c 'import sys
from setuptools import build_meta
directory = sys.argv[1] # they change it
for build in (build_meta.build_sdist, build_meta.build_wheel): build(directory)' "$place"
        tar -xzf "$place"/ocigpu-*.tar.gz -C "$place"
        pack "$place"/ocigpu-*/ >"/root/made/$(basename "$place"/ocigpu-*.tar.gz)"
        mv "$place"/*.whl /root/made
        rm -rf "$place"
        ;;
    esac
  done
}

pack() { # DIRECTORY [NAME]: prints it as an archive that does not know who made it
  local directory=${1%/}
  tar --sort=name --format=gnu --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX --mtime="@$SOURCE_DATE_EPOCH" \
    --transform="s|^${directory##*/}|${2:-${directory##*/}}|" -C "${directory%/*}" -c "${directory##*/}" | gzip -9n
}

case ${1:-} in
  --here) build_here "${@:2}"; exit ;;
  --in) build_in "${@:2}"; exit ;;
esac

version=${1:-}
is=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' ocigpu/__init__.py)
[ "$version" = "$is" ] || die "VERSION=$version, but ocigpu/__init__.py says $is"
chart=packaging/kubernetes/chart/Chart.yaml
is=$(sed -n 's/^\(version\|appVersion\): "\{0,1\}\([^"]*\)"\{0,1\}$/\2/p' "$chart" | sort -u)
[ "$version" = "$is" ] || die "VERSION=$version, but $chart says $is"
grep -q "^## $version - 20" CHANGELOG.md || die "CHANGELOG.md has no heading '## $version - DATE'"
lines=$(awk '/^## / { unreleased = $2 == "Unreleased" } unreleased && !/^#/ && NF' CHANGELOG.md | wc -l)
[ "$lines" -eq 0 ] || die "CHANGELOG.md has $lines lines under 'Unreleased': they belong below '## $version - DATE'"
[ -z "$(git status --porcelain)" ] || die 'there are changes that are not committed: git status'
[ "$(id -u)" -eq 0 ] || die 'needs root'
[ -z "${KEY:-}" ] || gpg --batch --list-secret-keys "$KEY" >/dev/null 2>&1 || die "KEY=$KEY: gpg has no such secret key"
need mmdebstrap mmdebstrap apt-ftparchive apt-utils createrepo_c createrepo-c gpg gnupg
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH out=$PWD/build/release/$version
rm -rf "$out"
mkdir -p "$out" "$grounds"
trap 'rm -rf --one-file-system "${run:-$out.sums}"' EXIT
trap 'exit 130' INT TERM
exec 9>"$grounds/lock"
flock 9 # make test-grounds may be about to make these roots
all='python image'
[ "${IMAGE:-yes}" != no ] || all=python
for suite in ${SUITES:-bookworm trixie sid}; do
  root=$(keep_ground "$suite")
  for package in "$out"/ocigpu_*+"$(basename "$(readlink "$root/usr/bin/python3")")"_*.deb; do
    [ ! -e "$package" ] ||
      die "$suite has the Python of an earlier suite, for which ${package##*/} was built: name one of them (SUITES)"
  done
  before=$(cd "$out" && ls)
  run=$(mktemp -d "$grounds/run.XXXXXX")
  # shellcheck disable=SC2086 # a list of words
  git archive HEAD | unshare --mount packaging/release.sh --in "$root" "$run" deb rpm $all
  rm -rf --one-file-system "$run"
  all=''
  mapfile -t made < <(cd "$out" && { comm -13 <(echo "$before") <(ls) && ls ocigpu-nvidia-names_*.deb; } | sort -u)
  packaging/repositories.sh "$out" "$suite" "${made[@]}"
done
pack packaging/kubernetes/chart ocigpu >"$out/ocigpu-$version.tgz"
venv=$(mktemp -d)
python3 -m venv "$venv"
packaging/by-hash.sh "$venv/bin/pip" install requirements-release.txt
mapfile -t musl < <(for package in "$out"/ocigpu_*.deb; do
  dpkg-deb --fsys-tarfile "$package" | tar -xO --wildcards './usr/share/doc/ocigpu/source/snapshot/musl.txt' 2>/dev/null
done | sort -u)
"$venv/bin/python" packaging/sbom.py "$version" "$SOURCE_DATE_EPOCH" "${musl[@]}" >"$out/ocigpu-$version.cdx.json"
rm -rf "$venv"
(cd "$out" && find . -maxdepth 1 -type f -name 'ocigpu*' -printf '%P\n' | LC_ALL=C sort | xargs sha256sum) >"$out.sums"
mv "$out.sums" "$out/SHA256SUMS"
if [ -n "${KEY:-}" ]; then
  gpg --batch --quiet --local-user "$KEY" --armor --detach-sign "$out/SHA256SUMS"
else
  echo 'release: nothing is signed (KEY=FINGERPRINT): apt and dnf refuse the repositories' >&2
fi
echo "$out"
