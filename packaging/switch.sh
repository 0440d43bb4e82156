#!/bin/sh
# switch.sh HOME ID: makes HOME/versions/ID, which is complete, the version in use, by one rename of the link
# HOME/current.  A start of a container that is under way goes on with the version it began with: a start has 30
# seconds, and a version stays for a minute at least after it went out of use, until the next one is installed.
set -eu
home=$1 id=$2
former=$home/$(readlink "$home/current" || true)
if [ "$former" != "$home/versions/$id" ]; then
  # When it went out of use; and what its starts have kept counts no more: ocigpu/entry/pass_through.py compares times.
  touch -c "$former" "$former"/library/ocigpu "$former"/library/lib/python3*/site-packages/ocigpu
  ln -sfn "versions/$id" "$home/.current.new"
  mv -fT "$home/.current.new" "$home/current"
fi
rm -f /run/ocigpu/next-* 2>/dev/null || true
find "$home/versions" -mindepth 1 -maxdepth 1 ! -name "$id" -mmin +1 -exec rm -rf {} +
