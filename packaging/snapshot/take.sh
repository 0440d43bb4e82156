#!/bin/sh
# take.sh MADE SNAPSHOT PYTHON LIBRARY LIBRARY-NOW SITE SITE-NOW STUBS: makes the program SNAPSHOT of what build.sh has made
# (MADE), for the interpreter PYTHON.  STUBS: directory with .NAME.sh, the stubs as scripts.  What it is made of is named by
# descriptors, so that nothing of this machine gets into it.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
made=$1 snapshot=$2 python=$3 library=$4 site=$6
exec 3<"$made/library" 4<"$5" 5<"$7" 6<"$here" 7<"$8"
trap 'rm -f "$snapshot.memory"' EXIT
rm -f "$snapshot.memory" "$snapshot" # those of an attempt that was ended
seed=$(printf '%s' "$library" | cksum | cut -d ' ' -f 1) # of the version's directory, which has the version's id
fd=/proc/self/fd
env -i TZ=UTC "$made/snapshot" $fd/6/take.py "$snapshot.memory" "$seed" "$python" $fd/3 $fd/6 "$library" $fd/4 "$site" $fd/5 $fd/7 \
  </dev/null 9<&- 2>&1 | cat >&2 # streams of one kind, wherever it runs
[ -s "$snapshot.memory" ] || exit 1 # the reason was said
"$python" -I "$here/assemble.py" "$made/snapshot" "$snapshot.memory" "$snapshot"
