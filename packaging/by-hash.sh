#!/bin/sh
# by-hash.sh PIP install|download LIST [OPTION...]: has the program PIP fetch what a list of this directory names, by its
# hash, and nothing else: what builds a library is what PIP's environment has, from requirements-build.txt.
# OCIGPU_PIP_OPTIONS: more of pip's, such as --index-url=URL.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
pip=$1 command=$2 list=$3
shift 3
# shellcheck disable=SC2086 # a list of words
exec "$pip" "$command" --quiet --disable-pip-version-check --use-pep517 --no-build-isolation --no-deps --require-hashes \
  --only-binary :all: --no-binary python-prctl ${OCIGPU_PIP_OPTIONS:-} --requirement "$here/$list" "$@"
