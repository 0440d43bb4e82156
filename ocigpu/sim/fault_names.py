"""Names of the faults that a simulated host can have; :mod:`ocigpu.sim.faults` makes them."""

from typing import NamedTuple


class FaultName(NamedTuple):
    """``text``: what is wrong.  ``findings``: names of what ``ocigpu doctor`` finds, worse than what it just notes."""

    text: str
    findings: tuple[str, ...]


FAULT_NAMES = {
    "none": FaultName("nothing: a healthy system around the driver", ()),
    "no-gpu": FaultName("no GPU and no driver", ("no-gpu",)),
    "no-driver": FaultName("no driver is installed", ("no-driver",)),
    "driver-not-built": FaultName("the driver is not built for the running kernel", ("no-driver",)),
    "driver-not-loaded": FaultName("the driver is installed and not loaded", ("no-driver",)),
    "nouveau": FaultName("nouveau has the GPUs", ("nouveau-loaded",)),
    "no-libraries": FaultName("the driver's libraries are gone", ("driver-libraries",)),
    "old-module": FaultName("the kernel module of before an update still runs", ("driver-library-mismatch",)),
    "other-driver": FaultName("vfio-pci has the last GPU", ("gpu-other-driver",)),
    "nvml-broken": FaultName("NVML cannot be initialised", ("nvml-failed",)),
    "nvml-hangs": FaultName("NVML does not answer", ("nvml-failed",)),
    "gpu-lost": FaultName("GPU 0 has fallen off the bus", ("gpu-lost",)),
    "xid-79": FaultName("the kernel's log says that a GPU was lost; it answers again", ("gpu-lost",)),
    "no-persistence": FaultName("persistence mode is off", ("persistence-off",)),
    "no-fabric-manager": FaultName("NVSwitches and no fabric manager", ("fabric-manager",)),
    "missing-nodes": FaultName("no /dev/nvidia0", ("device-nodes-missing",)),
    "missing-control": FaultName("no /dev/nvidiactl", ("device-nodes-missing",)),
    "missing-uvm": FaultName("no nodes of nvidia-uvm", ("uvm-missing",)),
    "no-uvm-module": FaultName("nvidia-uvm is not loaded", ("uvm-missing",)),
    "wrong-nodes": FaultName("/dev/nvidia0 has another number", ("device-nodes-wrong",)),
    "node-modes": FaultName("/dev/nvidiactl is for root alone", ("device-nodes-wrong",)),
    "no-dev-char": FaultName("no links in /dev/char", ("dev-char-links",)),
    "mig-pending": FaultName("MIG mode of GPU 0 waits for a reset", ("mig-pending",)),
    "mig-empty": FaultName("a GPU in MIG mode without instances (--mig 0:)", ("mig-half-configured",)),
    "mig-no-compute": FaultName("GPU instances without compute instances", ("mig-half-configured",)),
    "mig-nodes": FaultName("a MIG device without its node", ("mig-nodes",)),
    "no-cdi": FaultName("mode cdi and no CDI specification", ("cdi-missing",)),
    "stale-cdi": FaultName("a CDI specification of the driver before", ("cdi-stale",)),
    "vendor-cdi": FaultName("an old specification of the vendor's beside ocigpu's", ("cdi-duplicate", "cdi-stale")),
    "partial-cdi": FaultName("a CDI specification without device nodes", ("cdi-partial",)),
    "too-new-cdi": FaultName("Podman 4.3 and a newer CDI specification", ("cdi-too-new",)),
    "two-cdi": FaultName("the same devices twice in one directory", ("cdi-duplicate",)),
    "broken-cdi": FaultName("a CDI specification with a mistake", ("cdi-unreadable",)),
    "cdi-hook": FaultName("a CDI hook whose program is gone", ("cdi-hook-missing",)),
    "docker-unconfigured": FaultName("Docker as it was installed", ("engine-not-configured",)),
    "docker-runtime": FaultName("Docker's default runtime is gone", ("engine-runtime-missing",)),
    "docker-gpus": FaultName("no hook for Docker's --gpus", ("docker-gpus-hook",)),
    "docker-cdi-off": FaultName("Docker's CDI switched off", ("docker-cdi-off",)),
    "docker-json": FaultName("a mistake in Docker's daemon.json", ("engine-config-broken",)),
    "docker-snap": FaultName("Docker from a snap", ("docker-snap",)),
    "two-containerd": FaultName("containerd of the system and of k3s", ("containerd-two-configs",)),
    "systemd-cgroups": FaultName("cgroups are systemd's, devices a hook's", ("systemd-cgroup-loses-devices",)),
    "vendor-services": FaultName("two services that write the same CDI specification", ("vendor-toolkit",)),
    "vendor-no-cgroups": FaultName(
        "the vendor's runtime with no-cgroups, for engines of root", ("no-cgroups-mismatch", "vendor-toolkit")
    ),
    "no-cgroups": FaultName("no-cgroups for engines of root", ("no-cgroups-mismatch",)),
    "bad-settings": FaultName("an unknown key in ocigpu's settings", ("settings-unusable",)),
    "no-python": FaultName("the Python of ocigpu is gone", ("programs-broken",)),
    "no-runc": FaultName("no runc and no crun", ("runtime-missing",)),
    "no-subids": FaultName("a rootless user without ids", ("rootless-no-ids",)),
    "no-delegation": FaultName("a rootless user without controllers", ("rootless-no-delegation",)),
    "selinux": FaultName("SELinux enforces, devices are not for containers", ("selinux-denies",)),
    "apparmor": FaultName("AppArmor has refused a file of the driver", ("apparmor-denies",)),
    "no-ldconfig": FaultName("no ldconfig", ("ldconfig-missing",)),
    "old-kernel": FaultName("Linux 5.4 with cgroup v2", ("kernel-too-old",)),
    "deleted-files": FaultName("a container holds a replaced library", ("deleted-driver-files",)),
}
"""Every fault by the name that ``ocigpu sim create --fault`` takes."""
