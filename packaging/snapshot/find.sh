#!/bin/sh
# find.sh PYTHON: prints the directory of what build.sh makes, or nothing where a package does without it, which it says:
# SNAPSHOT=no, or it cannot be built and SNAPSHOT is not "yes".
set -eu
if [ "${SNAPSHOT:-}" = no ] || ! "$(dirname "$0")/build.sh" "$1"; then
  [ "${SNAPSHOT:-}" != yes ] || exit 1
  echo 'snapshot/find.sh: without the interpreter that is started already: a start takes some 8 ms longer' >&2
fi
