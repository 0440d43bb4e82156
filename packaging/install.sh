#!/bin/sh
# install.sh: puts the four commands into place.
#
#   install.sh --prefix DIR [--config FILE] [--vendor-names] [--shell-stubs] [--systemd] [--kubernetes]
#                                            library, commands, man pages and shell completion below DIR (DIR/lib/ocigpu,
#                                            DIR/bin, DIR/share).  Over another installation it is built beside that one
#                                            and exchanged by a rename: containers can be started all the time
#   install.sh --bin DIR --venv DIR [--config FILE] [--vendor-names] [--shell-stubs]
#                                            commands only, for an existing virtual environment
#   install.sh --prefix DIR --uninstall      removes what the first form made
#   install.sh --prefix DIR --stage TREE --vendored DIR --id ID [--vendor-names] [--systemd] [--snapshot MADE]
#                                            the same as files of a package, below the new directory TREE; libraries from
#                                            DIR with their byte code, no virtual environment (packaging/package.sh)
#   install.sh --bin DIR --venv DIR --stage TREE --vendored DIR
#                                            the library and its commands alone (packaging/kubernetes/host-tree.sh)
#
# Below DIR/lib/ocigpu a version is a directory, versions/ID, made for that path and never changed; the link current
# leads to the one in use (packaging/switch.sh), and the commands in DIR/bin are links into that.
#
# --config FILE    settings the commands use when none are named (default: /etc/ocigpu/config.toml)
# --vendor-names   also makes links with NVIDIA's names: nvidia-container-runtime-hook (Docker's --gpus looks for it),
#                  nvidia-container-toolkit (its older name), nvidia-cdi-hook (existing CDI specifications start it), nvidia-container-runtime (settings of engines
#                  name it), nvidia-container-cli (other tools start it) and nvidia-ctk (scripts and roles call it)
# --systemd        also puts units below DIR/lib/systemd/system and a udev rule below DIR/lib/udev/rules.d, where both are
#                  looked for when DIR is /usr/local or /usr; nothing is enabled or started
# --kubernetes     also installs what the parts for Kubernetes and tenants need: requirements-kubernetes.txt
# --shell-stubs    what is in front of shim and hook is a script, as where there is no C compiler (packaging/stub.sh)
# --snapshot MADE  also makes ocigpu-python, which shim and hook start in place of the interpreter, of what
#                  packaging/snapshot/build.sh has made; SNAPSHOT=yes in the environment has it made
# --python FILE    the interpreter (default: found by packaging/find-python.sh)
set -eu
umask 022 # other users run the shim too (rootless containers)
here=$(cd "$(dirname "$0")" && pwd)
prefix='' bin='' venv='' stage='' vendored='' id='' config='' vendor='' python='' snapshot='' systemd='' kubernetes='' uninstall='' stubs=compiled
die() { echo "install.sh: $1" >&2; exit 2; }
while [ $# -gt 0 ]; do
  case $1 in
    --prefix | --bin | --venv | --stage | --vendored | --id | --config | --python | --snapshot)
      [ $# -ge 2 ] || die "$1 needs a value"
      case $1:$2 in --id:* | *:/*) value=$2 ;; *) value=$PWD/$2 ;; esac
      case $value in *[!A-Za-z0-9_./+@%:,=-]*) die "$1 $value: only letters, digits and _./+@%:,=- can stand in a path here" ;; esac
      eval "${1#--}=\$value"
      shift 2
      ;;
    --vendor-names) vendor=1; shift ;;
    --shell-stubs) stubs=sh; shift ;;
    --systemd) systemd=1; shift ;;
    --kubernetes) kubernetes=1; shift ;;
    --uninstall) uninstall=1; shift ;;
    *) die "unknown option $1" ;;
  esac
done
front=$bin home=$prefix/lib/ocigpu # front: where users and engines find the commands
versions=$home/versions
in_version() { bin=$1/bin venv=$1/library; }
if [ -n "$prefix" ]; then
  front=$prefix/bin
  in_version "$versions/$id"
fi
[ -n "$bin" ] && [ -n "$venv" ] || die 'give --prefix, or --bin and --venv'
[ -z "$systemd" ] || [ -n "$prefix" ] || die '--systemd needs --prefix'
[ -z "$stage" ] || [ -z "$prefix" ] || [ -n "$id" ] || die '--stage with --prefix needs --id'
[ -z "$stage" ] || [ -d "$vendored" ] || die '--stage needs --vendored with an existing directory'
links='nvidia-container-runtime-hook:ocigpu-hook nvidia-container-toolkit:ocigpu-hook nvidia-cdi-hook:ocigpu-hook
nvidia-container-runtime:ocigpu-runtime nvidia-container-cli:ocigpu-container-cli nvidia-ctk:ocigpu'
units=$prefix/lib/systemd/system rules=$prefix/lib/udev/rules.d share=$prefix/share
documents="$share/man/man1 $share/bash-completion/completions $share/zsh/site-functions $share/fish/vendor_completions.d"
service_files() { # the path of each unit and rule below the prefix
  for file in "$here"/systemd/*; do echo "$units/${file##*/}"; done
  for file in "$here"/udev/*; do echo "$rules/${file##*/}"; done
}

names='ocigpu ocigpu-runtime ocigpu-hook ocigpu-container-cli'
ours() { grep -q 'written by packaging/install.sh' "$1" 2>/dev/null; }
points() { [ "$(readlink "$front/${1%:*}" 2>/dev/null)" = "${1#*:}" ]; } # NAME:COMMAND
is_front() { [ "$(readlink "$front/$1" 2>/dev/null)" = "../lib/ocigpu/current/bin/$1" ] || ours "$front/$1"; }
remove_documents() { # of any version: commands come and go
  for directory in $documents; do
    for file in "$directory"/ocigpu* "$directory"/_ocigpu; do ! ours "$file" || rm -f "$file"; done
  done
}
marker=$home/.ocigpu-installed # holds the directories that were made beside it

if [ -n "$uninstall" ]; then
  [ -n "$prefix" ] || die '--uninstall needs --prefix'
  [ -e "$marker" ] || die "nothing of this script is installed in $prefix ($marker is missing)"
  { "$front/ocigpu" engine status 2>/dev/null || true; } | while read -r engine rest; do
    case " $rest " in *" = $front/ocigpu-runtime "*)
      echo "install.sh: $engine still names $front/ocigpu-runtime: containers with it will not start" >&2
      echo "hint: take it out by hand, or install ocigpu again and run: ocigpu engine remove $engine" >&2
      ;;
    esac
  done
  for link in $links; do ! points "$link" || rm -f "$front/${link%:*}"; done
  for name in $names; do ! is_front "$name" || rm -f "$front/$name"; done
  for path in $(service_files); do ! ours "$path" || rm -f "$path"; done
  remove_documents
  made=$(tr ' ' '\n' <"$marker" | sort -r) # the inner ones first
  rm -rf "$home"
  for directory in $made; do rmdir "$directory" 2>/dev/null || true; done # not empty: it holds something else by now
  exit 0
fi

if [ -z "$stage" ]; then
  for link in ${vendor:+$links}; do
    path=$front/${link%:*}
    if { [ -e "$path" ] || [ -L "$path" ]; } && ! points "$link"; then
      die "$path exists and was not made by this script: remove the other toolkit first"
    fi
  done
  for name in ${prefix:+$names}; do
    [ ! -e "$front/$name" ] || is_front "$name" || die "$front/$name exists and was not made by this script"
  done
  for path in ${systemd:+$(service_files)}; do
    [ ! -e "$path" ] || ours "$path" || die "$path exists and was not made by this script"
  done
fi

[ -n "$python" ] || python=$("$here/find-python.sh")
if [ -n "$stage" ]; then
  library=$venv site=$venv/vendor
  interpreter=$("$python" -I -c 'import os, sys; print(os.path.realpath(sys.executable))')
  mkdir "$stage"
  mkdir -p "$stage$venv"
  (cd "$here/.." && cp -R ocigpu "$stage$venv")
  cp -R "$vendored" "$stage$site"
  find "$stage$venv/ocigpu" -name __pycache__ -type d -prune -exec rm -rf {} +
  # Byte code is part of the package, for the Python it depends on.  unchecked: the files change together, and their
  # times are the package manager's.
  "$python" -I -m compileall -q -s "$stage" -p / --invalidation-mode unchecked-hash "$stage$venv/ocigpu"
else
  if [ -n "$prefix" ]; then
    if [ -d "$home" ] && [ ! -e "$marker" ]; then die "$home exists and was not made by this script"; fi
    made=$(cat "$marker" 2>/dev/null || true)
    for directory in "$front" "$prefix/lib" $documents ${systemd:+"$units" "$rules"}; do
      while [ ! -d "$directory" ]; do
        case " $made " in *" $directory "*) ;; *) made="$made $directory" ;; esac
        directory=$(dirname "$directory")
      done
    done
    echo "installing the library into $versions" >&2
    { mkdir -p "$home" "$front" && [ -w "$front" ] && printf '%s\n' "$made" >"$marker"; } 2>/dev/null ||
      die "cannot write to $home and $front: run it as root, or name another --prefix"
    mkdir -p "$versions"
    for left in "$versions"/*/.building; do rm -rf "${left%/.building}"; done # of an installation that was killed
    version=$(mktemp -d "$versions/$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' "$here/../ocigpu/__init__.py")-XXXXXX")
    source=$(mktemp -d) # a copy: building leaves files beside the source
    trap 'rm -rf "$source" ${version:+"$version"}' EXIT
    trap 'exit 130' INT TERM
    touch "$version/.building"
    chmod 0755 "$version"
    in_version "$version"
    mkdir "$bin"
    mkdir "$source/packaging"
    (cd "$here/.." && cp -R pyproject.toml README.md LICENSE ocigpu "$source" && cp -R packaging/wheel "$source/packaging")
    "$python" -m venv "$venv"
    pip=$venv/bin/pip
    for list in requirements-build.txt requirements.txt ${kubernetes:+requirements-kubernetes.txt}; do
      "$here/by-hash.sh" "$pip" install "$list" --compile
    done
    "$pip" install --quiet --disable-pip-version-check --no-index --no-deps --use-pep517 --no-build-isolation --compile "$source"
    "$pip" uninstall --quiet --disable-pip-version-check --yes setuptools # it has built
  fi
  # Where the package is (the source tree in a development environment) and where python-prctl is.
  library=$("$venv/bin/python" -I -c 'import ocigpu, os; print(os.path.dirname(os.path.dirname(ocigpu.__file__)))')
  site=$("$venv/bin/python" -I -c 'import prctl, os; print(os.path.dirname(prctl.__file__))')
  interpreter=$("$venv/bin/python" -I -c 'import os, sys; print(os.path.realpath(sys.executable))')
fi
[ "${SNAPSHOT:-no}" = no ] || [ -n "$stage$snapshot" ] || snapshot=yes
[ ! -w "$stage$library/ocigpu" ] || "$interpreter" -I -S -B "$here/byte_code.py" "$stage$library" ${stage:+"$library"}
# What Python cannot start without.  Of a package's it is the package manager that has it, in one place or another.
encodings=$interpreter
[ -n "$stage" ] || encodings=$("$interpreter" -I -c 'import encodings; print(encodings.__file__)')
grep=$(command -v grep)
for path in "$library" "$site" "$interpreter" "$encodings" "$grep"; do
  case $path in [!/]* | *[!A-Za-z0-9_./+@%:,=-]*) die "$path: only letters, digits and _./+@%:,=- can stand in this path" ;; esac
done

write() { # NAME [DIRECTORY MODE], then the text on standard input
  directory=$stage${2:-$bin}
  mkdir -p "$directory"
  cat >"$directory/.$1.new"
  chmod "${3:-0755}" "$directory/.$1.new"
  mv -f "$directory/.$1.new" "$directory/$1"
}
# -I: no PYTHON* variables, no current directory, no user site. -S: no site scan; the two paths are all that is needed.
# A package has them compiled; an installation has scripts where there is no compiler.
mkdir -p "$stage$bin"
stubbed='ocigpu-runtime ocigpu-hook ocigpu-container-cli'
write_stubs() { # sh|compiled: all, beside where they belong
  for name in $stubbed; do
    "$here/stub.sh" "$1" "$name" "$stage$bin/.$name.$1" config="$config" encodings="$encodings" grep="$grep" interpreter="$interpreter" \
      library="$library" site="$site" snapshot="${snapshot:+$bin/ocigpu-python}" || return 1
  done
}
if [ $stubs = compiled ] && ! write_stubs compiled 2>/dev/null; then
  [ -z "$stage" ] || die 'no C compiler (CC, else cc) makes programs of ocigpu-*.c'
  stubs=sh
fi
write_stubs sh
if [ -n "$snapshot" ] && [ $stubs = sh ]; then
  echo 'install.sh: no ocigpu-python is made: shim and hook are scripts here, which start the interpreter' >&2
elif [ -n "$snapshot" ]; then
  [ -d "$snapshot" ] || snapshot=$("$here/snapshot/build.sh" "$interpreter")
  "$here/snapshot/take.sh" "$snapshot" "$stage$bin/ocigpu-python" "$interpreter" "$library" "$stage$library" "$site" "$stage$site" "$stage$bin"
fi
for name in $stubbed; do mv -f "$stage$bin/.$name.$stubs" "$stage$bin/$name"; done
rm -f "$stage$bin"/.ocigpu-*.sh "$stage$bin"/.ocigpu-*.compiled
# What the package ocigpu-kubernetes brings; nothing that a start of a container uses.
more=''
[ -z "$stage" ] || [ -z "$prefix" ] || more=", \"$home/kubernetes\""
# No collection of garbage while modules are imported.
image=$(sed -n '/^try:$/,/^except/p' "$here/stub.python.sh") # what these share with a start is read as there
write ocigpu <<END
#!/bin/sh
# ocigpu: written by packaging/install.sh
${config:+export OCIGPU_CONFIG="\${OCIGPU_CONFIG:-$config}"
}[ "\${0##*/}" != nvidia-ctk ] || set -- nvidia-ctk "\$@" # what the name of its link says
exec $interpreter -I -S -c 'import gc, marshal, sys; gc.disable(); sys.path += ["$library", "$site"$more]; sys.argv[0] = "$front/ocigpu"
$image
from ocigpu.cli.front.main import main; from ocigpu import leave; leave(main())' "\$@"
END
link() { # NAME TARGET: in front, in one step
  mkdir -p "$stage$front"
  ln -sfn "$2" "$stage$front/.$1.new"
  mv -fT "$stage$front/.$1.new" "$stage$front/$1"
}
if [ -n "$prefix" ]; then
  if [ -z "$stage" ]; then
    rm "$version/.building"
    id=${version##*/} version='' # whole: from here on it stays, also when a signal ends us before or after the switch
    sh "$here/switch.sh" "$home" "$id"
    remove_documents
  fi
  for name in $names; do link "$name" "../lib/ocigpu/current/bin/$name"; done
elif [ -z "$stage" ]; then
  rm -f /run/ocigpu/next-* 2>/dev/null || true # what the former one knew
fi
for link in ${vendor:+$links}; do link "${link%:*}" "${link#*:}"; done
if [ -n "$prefix" ]; then
  "$interpreter" -I -S -B "$here/documents.py" "$stage$share" "$stage$library" "$stage$site"
fi
if [ -n "$systemd" ]; then
  directory_in_units=$(echo "$front" | sed 's/%/%%/g') # % begins a specifier there
  for path in $(service_files); do
    name=${path##*/}
    { echo '# written by packaging/install.sh'; sed "s|/usr/local/bin/|$directory_in_units/|g" "$here"/*/"$name"; } | write "$name" "${path%/*}" 0644
  done
  [ -n "$stage" ] || echo 'to use them: systemctl daemon-reload && systemctl enable --now ocigpu-cdi-refresh.path ocigpu-cdi-refresh.service' >&2
fi
