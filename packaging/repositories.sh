#!/bin/bash
# repositories.sh DIRECTORY SUITE FILE...: makes, in the directory of a release, what apt and dnf read: two suites of an
# apt repository of these packages, named after the system and after the Python that they are for (dists/SUITE,
# dists/PYTHON), and a dnf repository (rpm/PYTHON).
# FILE: .deb or .rpm, names of files there.  KEY: fingerprint of a key of gpg that signs them, whose public part is
# written to ocigpu-archive-keyring.asc; but for signatures the same packages give the same bytes.  SOURCE_DATE_EPOCH:
# their time.
set -euo pipefail
umask 022
out=$(cd "$1" && pwd) suite=$2
mapfile -t debs < <(printf '%s\n' "${@:3}" | grep '\.deb$' || true)
mapfile -t rpms < <(printf '%s\n' "${@:3}" | grep '\.rpm$' || true)
date=$(LC_ALL=C date -u -d "@${SOURCE_DATE_EPOCH:=$(date +%s)}" '+%a, %d %b %Y %H:%M:%S +0000')
place=$(mktemp -d "$out/XXXXXX")
trap 'rm -rf "$place"' EXIT

sign() { # FILE TARGET KIND
  [ -z "${KEY:-}" ] || gpg --batch --yes --quiet --local-user "$KEY" --armor "$3" --output "$2" "$1"
}

python_of() { # EXTENSION FILE...
  printf '%s\n' "${@:2}" | sed -n "s/.*[+.]\(python3\.[0-9]*\)[_.].*\.$1\$/\1/p" | head -n 1
}

write_suite() { # NAME: of the packages in $place
  local dists=$out/dists/$1 architecture architectures list
  rm -rf "$dists"
  for architecture in $(printf '%s\n' "${debs[@]}" | sed -n 's/.*_\(.*\)\.deb$/\1/p' | sort -u | grep -vx all ||
    { echo "repositories.sh: $1: no package is for an architecture: ${debs[*]}" >&2; exit 1; }); do
    list=$dists/main/binary-$architecture
    mkdir -p "$list"
    (cd "$place" && apt-ftparchive --arch "$architecture" packages .) |
      sed 's|^Filename: \./|Filename: |' >"$list/Packages"
    gzip -9nk "$list/Packages"
  done
  architectures=$(cd "$dists/main" && echo binary-*)
  local about='-o APT::FTPArchive::Release'
  # shellcheck disable=SC2086 # two words
  apt-ftparchive $about::Origin=ocigpu $about::Label=ocigpu $about::Components=main \
    $about::Suite="$1" $about::Codename="$1" \
    -o "APT::FTPArchive::Release::Architectures=${architectures//binary-/}" release "$dists" |
    sed "s/^Date: .*/Date: $date/" >"$place/Release"
  mv "$place/Release" "$dists/Release" # now: it is not listed in itself
  sign "$dists/Release" "$dists/InRelease" --clearsign
  sign "$dists/Release" "$dists/Release.gpg" --detach-sign
}

touch --no-create --date="@$SOURCE_DATE_EPOCH" "${debs[@]/#/$out/}" "${rpms[@]/#/$out/}" # createrepo_c notes it
[ -z "${KEY:-}" ] || gpg --batch --armor --export "$KEY" >"$out/ocigpu-archive-keyring.asc"
if [ "${#debs[@]}" -gt 0 ]; then
  (cd "$out" && ln "${debs[@]}" "$place")
  write_suite "$suite"
  write_suite "$(python_of deb "${debs[@]}")"
fi

if [ "${#rpms[@]}" -gt 0 ]; then
  python=$(python_of rpm "${rpms[@]}")
  mkdir -p "$out/rpm/$python"
  (cd "$out" && ln -f "${rpms[@]}" "rpm/$python")
  createrepo_c --quiet --no-database --simple-md-filenames --general-compress-type=gz \
    --revision "$SOURCE_DATE_EPOCH" --set-timestamp-to-revision "$out/rpm/$python"
  sign "$out/rpm/$python/repodata/repomd.xml" "$out/rpm/$python/repodata/repomd.xml.asc" --detach-sign
fi
