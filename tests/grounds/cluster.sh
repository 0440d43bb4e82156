#!/bin/bash
# cluster.sh: runs the tests that judge ocigpu by a real Kubernetes; make cluster-test.  KUBE_APISERVER and
# KUBE_CONTROLLER_MANAGER name programs, also KUBE_SCHEDULER, KUBELET, K8S_DEVICE_PLUGIN and GPU_FEATURE_DISCOVERY:
# no registry has them.  The others come from packages of Debian unstable, whose files are kept for a week in
# ~/.cache/ocigpu-grounds and not installed; ETCD and CONTAINERD name others.  Helm is that of the virtual environment.
set -euo pipefail
umask 022
here=$(cd "$(dirname "$0")" && pwd)
repository=$(cd "$here/../.." && pwd)
target=cluster-test
# shellcheck source=tests/grounds/roots.sh
. "$here/roots.sh"
for name in KUBE_APISERVER KUBE_CONTROLLER_MANAGER; do
  [ -x "${!name:-}" ] || die "$name=PROGRAM is needed: CONTRIBUTING.md"
done
if [ -z "${ETCD:-}" ] || [ -n "${KUBELET:-}" -a -z "${CONTAINERD:-}" ]; then
  [ "$(id -u)" -eq 0 ] || die 'needs root, or ETCD=PROGRAM and CONTAINERD=PROGRAM'
  need mmdebstrap mmdebstrap
  mkdir -p "$grounds"
  exec 9>"$grounds/lock"
  flock 9
  root=$(keep sid.cluster extract etcd-server,containerd)
  exec 9>&-
  export ETCD=${ETCD:-$root/usr/bin/etcd} CONTAINERD=${CONTAINERD:-$root/usr/bin/containerd}
fi
cd "$repository"
packaging/bootstrap.sh test
for name in KUBE_APISERVER ETCD ${KUBELET:+KUBELET CONTAINERD}; do
  printf '%s: %s\n' "$name" "$("${!name}" --version | head -n 1)"
done
# shellcheck disable=SC2086 # a list of words
exec .venv/bin/python -m pytest tests/kubernetes/test_real_cluster.py tests/kubernetes/test_node_installer.py \
  tests/kubernetes/test_vendor_programs.py \
  --rows all ${PYTEST_OPTIONS:-}
