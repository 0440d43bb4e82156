#!/bin/bash
# pythons.sh [PYTEST-OPTION...]: passes lint, types and the tests that need neither root nor an engine on every Python
# >= 3.11 that is there: of the system, /usr/local, pyenv, and PYTHONS.  For root also on those of Debian's SUITES
# ("trixie sid"; "": none), in the roots of make test-grounds.  Environments are kept in build/pythons.
# WRITE=1 records what was tested (packaging/tested.py).
set -euo pipefail
umask 022
cd "$(dirname "$0")/.."
target=test-pythons
. tests/grounds/roots.sh
tests='not root and not engine and not rest and not cluster'
seen='' failed=''

try_python() { # PYTHON PYTEST-OPTION...: once for each version
  local version place status=0 cases bad
  version=$("$1" -I -c 'import sys, venv, ensurepip; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null) || return 0
  place=$PWD/build/pythons/${version%.*}
  case " $seen" in *" ${version%.*}."*) return 0 ;; esac
  seen="$seen $version"
  echo "== Python $version, $1"
  if [ "$(cat "$place/made" 2>/dev/null)" != "$(cksum pyproject.toml)" ]; then
    "$1" -m venv --clear "$place"
    # shellcheck disable=SC2086 # a list of words
    "$place/bin/pip" install --quiet --disable-pip-version-check --use-pep517 ${OCIGPU_PIP_OPTIONS:-} -e '.[dev]'
    cksum pyproject.toml >"$place/made"
  fi
  "$place/bin/python" packaging/kubernetes/get_helm.py "$place/bin"
  packaging/install.sh --bin "$place/bin" --venv "$place" --python "$1"
  "$place/bin/python" -m pytest -q -n "${WORKERS:-2}" -p no:cacheprovider -m "$tests" "${@:2}" | tee "$place/log" || status=$?
  cases=$(count passed "$place/log") bad=$(count 'failed|errors?' "$place/log")
  [ "$status" -eq 0 ] || failed="$failed $version"
  note "$version" "$((cases + bad))" "$((bad + (status != 0 && bad == 0)))" "$(. /etc/os-release && echo "$PRETTY_NAME")"
}

count() { # WORD LOG: of pytest's last line
  tail -n 1 "$2" | awk -v word="^($1),?\$" '{ for (i = 2; i <= NF; i++) if ($i ~ word) sum += $(i - 1) } END { print sum + 0 }'
}

note() { # VERSION CASES FAILED SYSTEM: in a root for who called, else in the tables
  if [ -n "${NOTE:-}" ]; then
    printf '%s\n' "$@" >"$NOTE"
  else
    python3 packaging/tested.py pythons "${1%.*}" "$2" "$3" --python "$1" --system "$4" --kernel "$(uname -r | cut -d- -f1)"
  fi
}

in_suite() { # ROOT PYTEST-OPTION...: as process of a mount namespace of its own
  mount --make-rprivate /
  mount -t tmpfs none "$run"
  mkdir "$run/root" "$run/upper" "$run/work"
  mount -t overlay overlay -o "lowerdir=$1,upperdir=$run/upper,workdir=$run/work" "$run/root"
  mount -t tmpfs -o mode=1777 none "$run/root/tmp"
  take_repository "$PWD" "$run/root"
  in_root "$run/root" sh -c 'apt-get -qq update && apt-get -qq install -y --no-install-recommends curl >/dev/null'
  in_root "$run/root" env -C /root/ocigpu NOTE=/root/note SUITES= "WORKERS=${WORKERS:-2}" \
    bash -c 'packaging/pythons.sh "$@" || true' bash "${@:2}" # what failed is in the note
  [ ! -e "$run/root/root/note" ] || cat "$run/root/root/note" >&3
}

if [ -n "${run:-}" ]; then
  in_suite "$@"
  exit
fi
for python in ${PYTHONS:-} /usr/bin/python3.1[1-9] /usr/local/bin/python3.1[1-9] "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[1-9].*/bin/python3; do
  try_python "$python" "$@"
done
suites=${SUITES-trixie sid}
[ "$(id -u)" -eq 0 ] || suites=''
if [ -n "$suites" ]; then
  need mmdebstrap mmdebstrap
  mkdir -p "$grounds"
  exec 9>"$grounds/lock"
  flock 9 # make test-grounds may be about to make these roots
fi
for suite in $suites; do
  root=$(keep_ground "$suite")
  version=$(basename "$(find "$root/usr/bin" -name 'python3.1[1-9]')" | sed 's/python//')
  case " $seen" in *" $version."*) continue ;; esac
  run=$(mktemp -d "$grounds/run.XXXXXX")
  mapfile -t noted < <(run=$run unshare --mount packaging/pythons.sh "$root" "$@" 3>&1 >&2)
  rmdir "$run"
  unset run
  seen="$seen ${noted[0]:-$version}"
  [ "${noted[2]:-1}" = 0 ] || failed="$failed ${noted[0]:-$version}"
  [ "${#noted[@]}" -eq 0 ] || note "${noted[@]}"
done
echo "Python versions:${seen:- none}; failed:${failed:- none}"
[ -n "$seen" ] && [ -z "$failed" ]
