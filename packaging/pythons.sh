#!/bin/sh
# pythons.sh [PYTEST-OPTION...]: passes the tests that need neither root nor an engine on every Python >= 3.11 that is
# there: of the system, /usr/local, pyenv, and PYTHONS.  Environments are kept in build/pythons.
set -eu
umask 022
cd "$(dirname "$0")/.."
seen='' failed=''
for python in ${PYTHONS:-} /usr/bin/python3.1[1-9] /usr/local/bin/python3.1[1-9] "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[1-9].*/bin/python3; do
  version=$("$python" -I -c 'import sys, venv, ensurepip; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) || continue
  case " $seen " in *" $version "*) continue ;; esac
  seen="$seen $version" place=$PWD/build/pythons/$version
  echo "== $("$python" -V), $python"
  if [ "$(cat "$place/made" 2>/dev/null)" != "$(cksum pyproject.toml)" ]; then
    "$python" -m venv --clear "$place"
    "$place/bin/pip" install --quiet --disable-pip-version-check --use-pep517 ${OCIGPU_PIP_OPTIONS:-} -e '.[dev]'
    cksum pyproject.toml >"$place/made"
  fi
  packaging/install.sh --bin "$place/bin" --venv "$place" --python "$python"
  "$place/bin/python" -m pytest -q -n "${WORKERS:-2}" -p no:cacheprovider \
    -m 'not root and not engine and not rest and not cluster' "$@" || failed="$failed $version"
done
echo "Python versions:${seen:- none}; failed:${failed:- none}"
[ -n "$seen" ] && [ -z "$failed" ]
