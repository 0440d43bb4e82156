#!/bin/sh
# stub.sh sh|compiled NAME FILE KEY=VALUE...: writes the stub of a program (NAME), as a script or, if
# a C compiler (CC; else musl-gcc, cc) makes it, as a program: static where it can be, so that no library is loaded for it.
# KEY: interpreter encodings library site; config, run, grep, if they are not the usual ones; snapshot (packaging/snapshot).  VALUE: of the letters that
# install.sh accepts in paths.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
kind=$1 name=$2 file=$3
shift 3
config='' run=/run snapshot='' grep=$(command -v grep)
for pair; do eval "${pair%%=*}=\${pair#*=}"; done
version=$(sed -n 's/^__version__ = "\(.*\)"$/\1/p' "$here/../ocigpu/__init__.py")
vendor=$(sed -n 's/^VENDOR_VERSION = "\(.*\)"$/\1/p' "$here/../ocigpu/__init__.py")
spec=$(sed -n 's/^RUNTIME_SPEC = "\(.*\)"$/\1/p' "$here/../ocigpu/__init__.py")
case $name in
  ocigpu-hook) named="${config:+--config $config }" words=${config:+"\"--config\", \"$config\""} ;;
  *) named=$config words='' ;;
esac
line=$(grep '^ *@python@ ' "$here/$name.sh")
field() { printf '%s\n' "$line" | sed "s/^ *@python@ '\(.*\)' '\(.*\)' \(.*\)\$/\\$1/"; }
text=$(sed "/^#/d; s|@import@|$(field 1)|; s|@call@|$(field 2)|; s|@words@|$(field 3)|" "$here/stub.python.sh" |
  sed -e '/^ *@python@ /{r /dev/stdin' -e 'd;}' "$here/$name.sh" |
  sed -e "s|@interpreter@|$interpreter|g; s|@encodings@|$encodings|; s|@library@|$library|; s|@site@|$site|; s|@grep@|$grep|" \
  -e "s|@version@|$version|g; s|@vendor@|$vendor|; s|@spec@|$spec|; s|@run@|$run|; ${config:+s|@config@|$named|;} /^export.*@config@/d; s|@config@||")
if [ "$kind" = sh ]; then
  printf '%s\n' "$text" >"$file"
  chmod 0755 "$file"
  exit 0
fi
# What is told of the program and to Python is what the script tells.
quoted() { printf '%s\n' "$text" | sed -n "$1" | sed 's/[\\"]/\\&/g; s/$/\\n/' | tr -d '\n'; }
mark=$(quoted '2{s/^# //p;}') start=$(quoted "/-c 'import/,/main(sys.argv/{s/^.* -c '//; s/' \"\$0\".*//; p;}")
set -- -std=gnu11 -D_GNU_SOURCE -O2 -fstack-protector-strong -U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=2 -Wl,-z,relro,-z,now -s \
  "-DMARK=\"$mark\"" "-DSTART=\"$start\"" "-DINTERPRETER=\"$interpreter\"" "-DENCODINGS=\"$encodings\"" "-DSNAPSHOT=\"$snapshot\"" "-DCONFIG=\"$config\"" \
  "-DFIRST_WORDS=$words" "-DRUN=\"$run\"" "-DVERSION=\"$version\"" "-DVENDOR=\"$vendor\"" "-DSPEC=\"$spec\"" -o "$file" "$here/$name.c"
# musl starts in a sixth of the time: the GNU library asks the processor what it is, which a virtual one is slow to say.
[ -n "${CC:-}" ] || ! command -v musl-gcc >/dev/null || ! musl-gcc -static "$@" || exit 0
# shellcheck disable=SC2086 # CC may be words
${CC:-cc} -fPIE -static-pie "$@" || ${CC:-cc} -fPIE -pie "$@"
