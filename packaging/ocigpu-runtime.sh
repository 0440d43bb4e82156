#!/bin/sh
# ocigpu-runtime: OCI runtime shim, runs ocigpu.runtime; written by packaging/install.sh
# Where sh is bash it takes functions and options from the environment; unset and set come before functions.
unset -f command echo [
set +aeu
export OCIGPU_CONFIG="${OCIGPU_CONFIG:-@config@}"
full() { # Python decides
  @python@ 'from ocigpu.runtime import main' 'sys.exit(main(sys.argv[1:]))' "$@"
}
# What needs nothing of us becomes the low-level runtime at once; in any doubt Python decides.  ocigpu/entry/pass_through.py has
# left which runtime that is ($runtime), and the words ($words) of which every request for a device contains one.
[ -z "${at+x}${bundle+x}${cache+x}${create+x}${next+x}${odd+x}${runtime+x}${value+x}${word+x}${words+x}" ] ||
  full "$@" # the environment has a variable of a name used here: it must arrive as it is
if [ -O / ]; then cache=@run@; else cache=${XDG_RUNTIME_DIR:-}; fi # root's, or the user's
case $cache in /*) [ -O "$cache" ] || full "$@" ;; *) full "$@" ;; esac
cache=$cache/ocigpu
next=$cache/next-${#OCIGPU_CONFIG}-${#PATH}-${OCIGPU_CONFIG##*/} # engines differ in these; what is in it compares the whole
same() { [ "$1" = "$OCIGPU_CONFIG" ] && [ "$2" = "$PATH" ]; }
is() { # whether a file has the time that it had; older ones are put back, and clocks set
  if [ "$2" = none ]; then [ ! -e "$1" ]; else
    [ -e "$1" ] && [ -e "$cache/$2" ] && [ ! "$1" -nt "$cache/$2" ] && [ ! "$1" -ot "$cache/$2" ]
  fi
}
[ -O "$cache" ] && [ ! -h "$cache" ] && [ -f "$next" ] && [ -O "$next" ] && [ ! -h "$next" ] &&
  [ -z "${OCIGPU_RUNTIME_PID:-}" ] && command . "$next" 2>/dev/null && [ -x "$runtime" ] || full "$@"
# The options as in ocigpu/entry/arguments.py; what is not in the usual form is odd.
at=global bundle= create= odd= value=
for word; do
  case $word in create | run) create=1 ;; esac
  if [ -n "$value" ]; then
    [ "$value" != --bundle ] || bundle=$word
    value=
    continue
  fi
  case $at$word in
    global--log | global--log-format | global--log-level | global--root | global--criu | global--rootless) value=$word ;;
    global--cgroup-manager) value=$word ;;
    global--version | global-version | global-v) at=version ;;
    global--*=* | global--debug | global--systemd-cgroup) ;;
    globalcreate | globalrun) at=create ;;
    global[!-]*) odd=1 at=end ;; # what follows another subcommand is not ours
    create--bundle | create--console-socket | create--pid-file | create--preserve-fds | create--user) value=$word ;;
    create--bundle=*) bundle=${word#*=} ;;
    create-- | create--config*) odd=1 ;; # crun's name of another config.json
    create--*) ;;
    create-*) odd=1 ;; # short options may stand together; Go's long ones may have one dash
    create*) at=end ;;
    *) odd=1 ;;
  esac
done
if [ -n "$create" ]; then
  [ -z "$odd$value" ] && [ -f "${bundle:-.}/config.json" ] || full "$@"
  LC_ALL=C GREP_OPTIONS='' @grep@ -qF -e "$words" -- "${bundle:-.}/config.json" 2>/dev/null
  [ $? -eq 1 ] || full "$@" # 0: there is such a word; else grep could not tell
fi
if [ "$at" = version ]; then # as print_version in ocigpu/runtime.py
  case ${0##*/} in
    nvidia-*) echo "NVIDIA Container Runtime version @vendor@"; echo "ocigpu: @version@" ;;
    *) echo "ocigpu-runtime @version@" ;;
  esac
  echo "spec: @spec@"
  echo
fi
export OCIGPU_RUNTIME_PID=$$
exec "$runtime" "$@"
