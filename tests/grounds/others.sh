#!/bin/bash
# others.sh: inside.sh's part for what gives GPUs without Docker and without a runtime of ours, as docs/ENGINES.md says:
# LXC and Incus, Apptainer, podman kube play.  inside.sh reads it; the user newcomer, the image debian.tar and the
# simulated GPUs are there.  What a ground's system has no package of is left out.

try package - dpkg -i build/packages/ocigpu-nvidia-names_*.deb

# -- LXC and Incus -----------------------------------------------------------------------------------------------------
if command -v incus >/dev/null; then
  for file in /etc/subuid /etc/subgid; do grep -q '^root:' "$file" || echo 'root:10000000:65536' >>"$file"; done
  try incus - systemctl start incus
  try incus - incus admin init --minimal
  printf 'architecture: %s\ncreation_date: 1700000000\n' "$(uname -m)" >/root/metadata.yaml
  tar -C /root -cf /root/metadata.tar metadata.yaml
  try incus - incus image import /root/metadata.tar /root/debian.tar --alias debian
  incus profile device remove default eth0 >/dev/null # the image starts no network
  # A simulated GPU is on no PCI bus, where "incus config device add gpu gpu0 gpu" looks: its nodes one by one.
  try incus - incus init debian gpu -c nvidia.runtime=true -c raw.lxc='lxc.init.cmd = /bin/sleep infinity'
  for node in nvidia0 nvidiactl nvidia-uvm; do
    try incus - incus config device add gpu $node unix-char source=/dev/$node path=/dev/$node
  done
  try incus - incus start gpu
  try incus 1 incus exec gpu -- nvidia-smi -L
  try incus - incus restart --force gpu
  try incus 1 incus exec gpu -- nvidia-smi -L
  try incus - incus exec gpu -- sh -c 'ldconfig -p | grep -q libcuda.so.1'
  try incus - incus delete --force gpu
  named='lxc.init.cmd = /bin/sleep infinity
lxc.environment = NVIDIA_VISIBLE_DEVICES='
  try incus - incus launch debian two -c nvidia.runtime=true -c raw.lxc="${named}all"
  try incus 2 incus exec two -- nvidia-smi -L
  try incus no incus launch debian none -c nvidia.runtime=true -c raw.lxc="${named}7"
  try incus - incus delete --force two none
fi

# -- Apptainer, of a user ----------------------------------------------------------------------------------------------
if command -v apptainer >/dev/null; then
  mkdir -p /home/newcomer/image
  tar -C /home/newcomer/image -xf /root/debian.tar --exclude './dev/*' --exclude 'dev/*'
  chown -R newcomer: /home/newcomer/image
  apptainer=(runuser -u newcomer -- env -C /home/newcomer HOME=/home/newcomer NVIDIA_VISIBLE_DEVICES=0 apptainer exec)
  try apptainer 1 "${apptainer[@]}" --contain --nvccli image nvidia-smi -L
  try apptainer 1 "${apptainer[@]}" --contain --nvccli --writable image nvidia-smi -L
  try apptainer 1 "${apptainer[@]}" --contain --nvccli --fakeroot image nvidia-smi -L
  try apptainer 2 "${apptainer[@]}" --nvccli image nvidia-smi -L # the host's /dev
  try apptainer no "${apptainer[@]/%=0/=7}" --contain --nvccli image nvidia-smi -L
fi

# -- podman kube play --------------------------------------------------------------------------------------------------
pod() { # LIMITS VARIABLES: writes one that lists its GPUs
  printf '%s\n' 'apiVersion: v1' 'kind: Pod' 'metadata: {name: gpu}' \
    'spec: {hostNetwork: true, restartPolicy: Never, containers: [{' \
    'name: main, image: localhost/debian, imagePullPolicy: Never, command: [sh, -c, "nvidia-smi -L; exec sleep 1000"],' \
    "resources: {limits: {$1}}, env: [$2]}]}"
}
if command -v catatonit >/dev/null; then
  pod '"nvidia.com/gpu=0": 1' '' >/root/by-cdi.yaml
  pod '' '{name: NVIDIA_VISIBLE_DEVICES, value: "1"}' >/root/by-runtime.yaml
  logs=(sh -c 'for _ in $(seq 100); do podman logs gpu-main 2>&1 | grep GPU && exit; sleep 0.1; done; podman logs gpu-main; exit 1')
  try podman - podman kube play /root/by-cdi.yaml
  try podman 1 "${logs[@]}"
  try podman - podman kube play --down --force /root/by-cdi.yaml
  try podman - podman --runtime ocigpu kube play /root/by-runtime.yaml
  try podman 1 "${logs[@]}"
  try podman - podman kube play --down --force /root/by-runtime.yaml
fi

# Its hook has replaced the link that configure had made; containers of --gpus would be left without one.
try package no dpkg --purge ocigpu-nvidia-names
try docker - docker rm -f hook one
try package - dpkg --purge ocigpu-nvidia-names
try docker - ocigpu engine configure docker ${cdi:+"$cdi"}
try docker - "${restart[@]}"
try docker - docker run -d --stop-timeout 1 --name hook --gpus all debian sleep infinity
