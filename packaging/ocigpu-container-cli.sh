#!/bin/sh
# ocigpu-container-cli: runs ocigpu.entry.container_cli; written by packaging/install.sh
unset -f command echo exec [
export OCIGPU_CONFIG="${OCIGPU_CONFIG:-@config@}"
@python@ 'from ocigpu import leave; from ocigpu.entry.container_cli.main import main' 'leave(main(sys.argv[2:]))' "$@"
