#!/bin/sh
# vendor_hook.sh COMMAND WORD...: calls nvidia-container-cli as NVIDIA's prestart hook does, which takes the process and
# the bundle from the container's state on standard input, and becomes the program.
state=$(cat)
field() { printf '%s' "$state" | sed -n "s/.*\"$1\": *\"\{0,1\}\([^\",}]*\).*/\1/p" | head -n 1; }
exec "$@" "--pid=$(field pid)" "$(field bundle)/rootfs"
