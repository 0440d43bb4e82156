"""A whole system around a simulated driver: engines, users, cgroups and logs, as a healthy host has them.

None of its programs can be run: they are there to be looked at.
"""

import json
from pathlib import Path

from ocigpu.core.errors import CdiError
from ocigpu.core.settings import Settings
from ocigpu.gpus.nvidia.nodes import apply_changes, find_link_changes, plan_nodes, read_driver
from ocigpu.sim.kernel_files import write_file

KERNEL = "6.8.0-45-generic"
USER = 1000
SPEC = "var/run/cdi/nvidia.yaml"
PROGRAMS = ("usr/bin/dockerd", "usr/bin/docker", "usr/bin/podman", "usr/sbin/runc", "usr/bin/python3")
CGROUP = f"sys/fs/cgroup/user.slice/user-{USER}.slice/user@{USER}.service/cgroup.controllers"
STUB = '#!/bin/sh\n[ -x /usr/bin/python3 ] || exit 127\nexec /usr/bin/python3 -I -c "a program of a simulated host"\n'
ENGINES = {"docker-ce": "5:28.5.1-1~debian.12~bookworm", "podman": "5.4.2+ds1-1"}
DOCKER = {
    "default-runtime": "ocigpu",
    "features": {"cdi": True},
    "runtimes": {"ocigpu": {"path": "/usr/bin/ocigpu-runtime"}},
}
CONTAINER = 4242
"""The process id of a container that uses the driver."""


def write_system(root: Path) -> None:
    """Write the files of a healthy system below ``root``, where a simulated host is complete and in its place."""
    files = {
        "proc/sys/kernel/osrelease": f"{KERNEL}\n",
        "proc/cmdline": "BOOT_IMAGE=/boot/vmlinuz root=/dev/sda1 ro quiet\n",
        f"lib/modules/{KERNEL}/modules.dep": "updates/dkms/nvidia.ko:\n",
        "etc/os-release": 'PRETTY_NAME="Debian GNU/Linux 12 (bookworm)"\nID=debian\n',
        "etc/passwd": f"root:x:0:0:root:/root:/bin/sh\ngpu:x:{USER}:{USER}::/home/gpu:/bin/sh\n",
        "etc/subuid": "gpu:100000:65536\n",
        "etc/subgid": "gpu:100000:65536\n",
        "home/gpu/.local/share/containers/storage/storage.lock": "",
        "sys/fs/cgroup/cgroup.controllers": "cpuset cpu io memory pids\n",
        CGROUP: "cpu memory pids\n",
        "sys/module/apparmor/parameters/enabled": "Y\n",
        "var/log/kern.log": f"kernel: Linux version {KERNEL}\nkernel: nvidia: module license taints kernel.\n",
        "proc/1/comm": "systemd\n",
        "proc/1/maps": "",
        "proc/1/mountinfo": "",
        f"proc/{CONTAINER}/comm": "train\n",
        f"proc/{CONTAINER}/maps": "7f0000000000-7f0000001000 r-xp 00000000 08:01 17 /usr/lib/libcuda.so.1\n",
        f"proc/{CONTAINER}/mountinfo": "36 35 8:1 /usr/bin/nvidia-smi /usr/bin/nvidia-smi ro - ext4 /dev/sda1 rw\n",
        "etc/docker/daemon.json": json.dumps(DOCKER, indent=4) + "\n",
    }
    for name, text in files.items():
        write_file(root / name, text)
    for name in PROGRAMS:
        write_file(root / name, "a program of a simulated host\n", 0o755)
    write_file(root / "sbin/ldconfig", b"\x7fELF of a simulated host\n", 0o755)
    for name in ("ocigpu-runtime", "ocigpu-hook", "ocigpu"):
        write_file(root / "usr/bin" / name, STUB, 0o755)
    (root / "usr/bin/nvidia-container-runtime-hook").symlink_to("ocigpu-hook")
    (root / "run/systemd/system").mkdir(parents=True)
    write_packages(root, ENGINES)
    (root / "usr/local/bin").mkdir(parents=True)
    write_links(root)
    try:
        write_spec_file(root)
    except CdiError:  # nothing to describe: all GPUs are in MIG mode and not cut
        return


def write_packages(root: Path, versions: dict[str, str]) -> None:
    """Write dpkg's list of installed packages."""
    entries = (
        f"Package: {name}\nStatus: install ok installed\nVersion: {version}\n" for name, version in versions.items()
    )
    write_file(root / "var/lib/dpkg/status", "\n".join(entries))


def write_links(root: Path) -> None:
    """Make the links in /dev/char of the driver's nodes."""
    from ocigpu.gpus.tree import find_roots

    roots = find_roots(Settings(simulation_root=str(root)))
    driver = read_driver(roots)
    apply_changes(find_link_changes(plan_nodes(driver)[0], driver, roots), simulated=True)


def write_spec_file(root: Path, path: str = SPEC, max_version: str = "") -> None:
    """Write the CDI specification of the host's GPUs, as ``ocigpu cdi generate`` does."""
    from ocigpu.cdi.draft import GenerateOptions
    from ocigpu.cdi.generate import generate
    from ocigpu.cdi.write import write_spec

    options = GenerateOptions(mode="nvml", hook_path="/usr/bin/ocigpu-hook", max_version=max_version)
    generated = generate(options, Settings(simulation_root=str(root)))
    write_spec(generated.spec, str(root / path), "yaml")
