#!/bin/sh
# ocigpu-hook: OCI prestart hook, runs ocigpu.hook; written by packaging/install.sh
# Where sh is bash it takes functions from the environment; unset comes before functions.
unset -f command echo kill read [
full() { # Python does it
  @python@ 'from ocigpu import leave; from ocigpu.hook import main' 'leave(main(sys.argv[1:]))' @config@"$@"
}
[ "${1:-}" = --early ] && [ $# -ge 2 ] || full "$@"
# The shim has left a process that is ready for this container: ocigpu/entry/prepared.py says how it is asked.
early=$2 begun= at= child=
shift 2
[ -O "$early/request" ] && [ -p "$early/request" ] && [ -O "$early/answer" ] && [ -p "$early/answer" ] || full "$@"
# One that is stopped, perhaps before it had a timer of its own, answers nobody; its parent is ours, the shim that was.
if [ -O "$early/child" ] && read -r child <"$early/child" && read -r at <"/proc/$child/stat"; then
  case ${at##*)} in
    " T $PPID "*) kill -9 "$child" ;;
  esac
fi 2>/dev/null
at=
# answer: opened for writing too, so that opening it does not wait; then for reading alone, so that reading ends when that
# process does.  5: where it finds the container's state.  (exec, because other redirections leave a copy to go back to.)
if command exec 5<&0 3<>"$early/answer" 4<"$early/answer" 3<&- && echo $$ 1<>"$early/request"; then
  while read -r word pid status; do
    [ "$pid" = $$ ] || break
    case $word in
      begin) begun=1 at=$status ;;
      exit) exit "$status" ;;
    esac
  done <&4
fi
[ -n "$begun" ] || full "$@" 4<&- 5<&-
echo "$0: OCIGPU-INT-2: ${at:+$at: }the process that prepared the container was killed, or gave no answer; what it had begun is undone" >&2
exit 1
