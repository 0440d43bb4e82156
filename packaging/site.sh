#!/bin/sh
# site.sh: builds the site of docs/ in build/site; a warning is an error.
# site.sh mkdocs serve: shows it, as it is now; site.sh mike deploy ...: publishes a version (docs/howto/publish-the-site.md).
# It makes its own virtual environment, build/site-venv, from packaging/requirements-site.txt; .venv is not needed.
# OCIGPU_REPOSITORY: address of the repository, for links to files outside docs/; SITE_URL: that of the site.
set -eu
umask 022
cd "$(dirname "$0")/.."
python=$(packaging/find-python.sh)
venv=build/site-venv
stamp=$venv/.ocigpu-ready
want="$python $("$python" -I -V) $(cksum packaging/requirements-site.txt) $PWD"
if [ "$(cat "$stamp" 2>/dev/null)" != "$want" ]; then
  echo "making $venv with $python"
  "$python" -m venv --clear "$venv"
  packaging/by-hash.sh "$venv/bin/pip" install requirements-site.txt
  printf '%s\n' "$want" >"$stamp"
fi
export PYTHONDONTWRITEBYTECODE=1 NO_MKDOCS_2_WARNING=1
"$venv/bin/python" packaging/documents.py site build/site-source "${1:-}"
case ${1:-build} in
  build) exec "$venv/bin/mkdocs" build --strict --clean --site-dir "$PWD/build/site" --config-file build/site-source/mkdocs.yml ;;
  *)
    program=$1
    shift
    PATH="$PWD/$venv/bin:$PATH" exec "$program" "$@" --config-file build/site-source/mkdocs.yml
    ;;
esac
