#!/bin/sh
# What the stubs as scripts (ocigpu-*.sh) have in common: stub.sh puts what follows in place of their line with @python@,
# with what that line imports and calls.
[ -x @interpreter@ ] && [ -e @encodings@ ] || {
  echo "$0: OCIGPU-INT-3: @interpreter@ or its library is missing" >&2
  echo "hint: install that Python again, or ocigpu for the one that is there" >&2
  exit 127
}
exec @interpreter@ -I -S -c 'import gc, marshal, sys; gc.disable(); sys.path += ["@library@", "@site@"]
try:
 with open(f"{sys.path[-2]}/ocigpu/__pycache__/hot.{sys.implementation.cache_tag}", "rb") as file:
  part = lambda: marshal.loads(file.read(int.from_bytes(file.read(4), "big")))
  exec(part()); use_image(file, part(), sys.path[-2] + "/")
except Exception: pass # not there, or of another version: from the files
try: @import@
except Exception as error: # whatever it is, it must be one line
 sys.exit(f"{sys.argv[1]}: OCIGPU-INT-3: {type(error).__name__}: {error}")
@call@' "$0" @words@
