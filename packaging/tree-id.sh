#!/bin/sh
# tree-id.sh PYTHON VENDORED: prints a name for what is built of these sources with that Python and the libraries in the
# directory VENDORED: the version, and a number made of all the content.
set -eu
vendored=$2
cd "$(dirname "$0")/.."
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' ocigpu/__init__.py)
content=$({
  find ocigpu packaging -type f ! -name '*.pyc' -exec cksum {} + | sort
  (cd "$vendored" && find . -type f ! -name '*.pyc' -exec cksum {} + | sort)
  "$1" -I -VV
} | cksum)
echo "$version-${content%% *}"
