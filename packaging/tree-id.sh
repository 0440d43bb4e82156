#!/bin/sh
# tree-id.sh PYTHON VENDORED [MADE]: prints a name for what is built of these sources with that Python, the libraries in
# the directory VENDORED and, where there is a snapshot, what packaging/snapshot/build.sh has made: the version, and a
# number made of all the content.
set -eu
vendored=$2 made=${3:-}
cd "$(dirname "$0")/.."
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' ocigpu/__init__.py)
content=$({
  find ocigpu packaging -type f ! -name '*.pyc' -exec cksum {} + | sort
  for directory in "$vendored" ${made:+"$made"}; do
    (cd "$directory" && find . -type f ! -name '*.pyc' -exec cksum {} + | sort)
  done
  "$1" -I -VV
} | cksum)
echo "$version-${content%% *}"
