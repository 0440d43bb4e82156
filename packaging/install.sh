#!/bin/sh
# install.sh: puts the four commands into place.
#
#   install.sh --prefix DIR [--config FILE] [--vendor-names]            library and commands below DIR (DIR/lib/ocigpu, DIR/bin)
#   install.sh --bin DIR --venv DIR [--config FILE] [--vendor-names]    commands only, for an existing virtual environment
#   install.sh --prefix DIR --uninstall                                 removes what the first form made
#
# --config FILE    settings the commands use when none are named (default: /etc/ocigpu/config.toml)
# --vendor-names   also makes nvidia-container-runtime-hook (Docker's --gpus looks for it) a link to ocigpu-hook
# --python FILE    the interpreter (default: found by packaging/find-python.sh)
set -eu
here=$(cd "$(dirname "$0")" && pwd)
prefix='' bin='' venv='' config='' vendor='' python='' uninstall=''
die() { echo "install.sh: $1" >&2; exit 2; }
while [ $# -gt 0 ]; do
  case $1 in
    --prefix | --bin | --venv | --config | --python)
      [ $# -ge 2 ] || die "$1 needs a value"
      case $2 in *[!A-Za-z0-9_./+@%:,=-]*) die "$1 $2: only letters, digits and _./+@%:,=- can stand in a path here" ;; esac
      case $2 in /*) value=$2 ;; *) value=$PWD/$2 ;; esac
      eval "${1#--}=\$value"
      shift 2
      ;;
    --vendor-names) vendor=1; shift ;;
    --uninstall) uninstall=1; shift ;;
    *) die "unknown option $1" ;;
  esac
done
if [ -n "$prefix" ]; then
  bin=$prefix/bin venv=$prefix/lib/ocigpu
fi
[ -n "$bin" ] && [ -n "$venv" ] || die 'give --prefix, or --bin and --venv'
link=$bin/nvidia-container-runtime-hook

if [ -n "$uninstall" ]; then
  [ -n "$prefix" ] || die '--uninstall needs --prefix'
  [ "$(readlink "$link" 2>/dev/null)" != ocigpu-hook ] || rm -f "$link"
  for name in ocigpu ocigpu-runtime ocigpu-hook ocigpu-container-cli; do rm -f "$bin/$name"; done
  [ ! -e "$venv/.ocigpu-installed" ] || rm -rf "$venv"
  exit 0
fi

[ -n "$python" ] || python=$("$here/find-python.sh")
if [ -n "$prefix" ]; then
  if [ -d "$venv" ] && [ ! -e "$venv/.ocigpu-installed" ]; then die "$venv exists and was not made by this script"; fi
  mkdir -p "$prefix/lib"
  echo "installing the library into $venv" >&2
  "$python" -m venv --clear "$venv"
  : >"$venv/.ocigpu-installed"
  "$venv/bin/pip" install --quiet --disable-pip-version-check ${OCIGPU_PIP_OPTIONS:-} "$here/.."
  "$venv/bin/python" -m compileall -q "$venv/lib" >/dev/null || true
fi
# Where the package is (the source tree in a development environment) and where python-prctl is.
library=$("$venv/bin/python" -I -c 'import ocigpu, os; print(os.path.dirname(os.path.dirname(ocigpu.__file__)))')
site=$("$venv/bin/python" -I -c 'import prctl, os; print(os.path.dirname(prctl.__file__))')
interpreter=$("$venv/bin/python" -I -c 'import os, sys; print(os.path.realpath(sys.executable))')
for path in "$library" "$site" "$interpreter"; do
  case $path in *[!A-Za-z0-9_./+@%:,=-]*) die "$path: only letters, digits and _./+@%:,=- can stand in this path" ;; esac
done

write() { # NAME, then the text on standard input
  mkdir -p "$bin"
  cat >"$bin/.$1.new"
  chmod 0755 "$bin/.$1.new"
  mv -f "$bin/.$1.new" "$bin/$1"
}
# -I: no PYTHON* variables, no current directory, no user site. -S: no site scan; the two paths are all that is needed.
path='import sys; sys.path += ["'$library'", "'$site'"]'
write ocigpu-runtime <<END
#!/bin/sh
# ocigpu-runtime: OCI runtime shim, runs ocigpu.runtime; written by packaging/install.sh
${config:+export OCIGPU_CONFIG="\${OCIGPU_CONFIG:-$config}"
}exec $interpreter -I -S -c '$path; from ocigpu.runtime import main; sys.exit(main(sys.argv[1:]))' "\$0" "\$@"
END
write ocigpu-hook <<END
#!/bin/sh
# ocigpu-hook: OCI prestart hook; written by packaging/install.sh
exec $interpreter -I -S -c '$path; from ocigpu.hook import main; sys.exit(main(sys.argv[1:]))' "\$0" ${config:+--config $config }"\$@"
END
for name in ocigpu:cli ocigpu-container-cli:container_cli; do
  write "${name%%:*}" <<END
#!/bin/sh
# ${name%%:*}: written by packaging/install.sh
${config:+export OCIGPU_CONFIG="\${OCIGPU_CONFIG:-$config}"
}exec $venv/bin/python -I -c 'import sys; sys.argv[0] = "${name%%:*}"; from ocigpu.${name##*:} import main; sys.exit(main())' "\$@"
END
done
[ -z "$vendor" ] || ln -sfn ocigpu-hook "$link"
