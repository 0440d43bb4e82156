"""Messages of other programs that people meet when a container does not get its GPUs, and what to do about each.

For ``ocigpu explain "MESSAGE"`` and for docs/TROUBLESHOOTING.md, which is generated from :data:`MESSAGES`.
"""

import textwrap
from typing import NamedTuple


class Message(NamedTuple):
    """What programs say, in literal parts, and what it means.

    ``findings``: names of the doctor's checks that look for the cause.  ``steps``: what to do, a sentence or a command
    each.
    """

    title: str
    texts: tuple[str, ...]
    meaning: str
    findings: tuple[str, ...]
    steps: tuple[str, ...]


MESSAGES = (
    Message(
        "Docker: no device driver",
        (
            'could not select device driver "" with capabilities: [[gpu]]',
            "could not select device driver",
        ),
        "dockerd looks for a program named nvidia-container-runtime-hook on its PATH when it starts, and "
        "found none: nothing was installed, dockerd was not restarted since, or another dockerd answers "
        "(snap, rootless, Docker Desktop).",
        (
            "docker-gpus-hook",
            "docker-snap",
            "docker-context",
        ),
        (
            "ocigpu engine configure docker --gpus-hook",
            "systemctl restart docker",
        ),
    ),
    Message(
        "Docker: no vendor by CDI",
        (
            "failed to discover GPU vendor from CDI",
            "no known GPU vendor found",
        ),
        "Docker 29 takes --gpus as CDI devices, and no specification describes a GPU of this host.",
        (
            "cdi-missing",
            "docker-cdi-off",
        ),
        ("ocigpu cdi generate --output /etc/cdi/nvidia.yaml",),
    ),
    Message(
        "Docker: unknown runtime",
        (
            "unknown or invalid runtime name",
            "Unknown runtime specified",
        ),
        "daemon.json has no entry of that name, or dockerd was not restarted after it got one.",
        (
            "engine-not-configured",
            "docker-not-restarted",
        ),
        (
            "ocigpu engine configure docker",
            "systemctl restart docker",
        ),
    ),
    Message(
        "runtime program missing",
        (
            "nvidia-container-runtime: executable file not found",
            'exec: "nvidia-container-runtime"',
            "nvidia-container-runtime did not terminate successfully",
            "nvidia-container-runtime-hook: no such file or directory",
            "ocigpu-runtime: no such file or directory",
        ),
        "The engine is configured for a program that has been removed.",
        ("engine-runtime-missing",),
        (
            "ocigpu engine status",
            "ocigpu engine configure docker, or ocigpu engine remove docker",
        ),
    ),
    Message(
        "containerd: no runtime handler",
        (
            'no runtime for "ocigpu" is configured',
            'RuntimeHandler "ocigpu" not supported',
            'no runtime for "nvidia"',
        ),
        "The pod's RuntimeClass names a handler that the node's containerd or CRI-O does not have.",
        (
            "engine-not-configured",
            "containerd-two-configs",
        ),
        (
            "ocigpu engine configure containerd",
            "systemctl restart containerd",
        ),
    ),
    Message(
        "CDI device unresolvable",
        (
            "unresolvable CDI devices",
            "CDI device injection failed",
            "failed to inject CDI devices",
        ),
        "No specification defines the device: none was written, it is stale, its version is too new for the "
        "engine, or two files of one directory define the same device.",
        (
            "cdi-missing",
            "cdi-stale",
            "cdi-too-new",
            "cdi-duplicate",
            "cdi-unreadable",
        ),
        (
            "ocigpu cdi list",
            "ocigpu cdi validate",
            "ocigpu cdi generate --output /etc/cdi/nvidia.yaml",
        ),
    ),
    Message(
        "Podman: device by name is no file",
        (
            "stat nvidia.com/gpu=",
            "stat nvidia.com/gpu=all: no such file or directory",
        ),
        "This Podman found no CDI specification with that device and took the name for a path.",
        (
            "cdi-missing",
            "cdi-too-new",
        ),
        ("ocigpu cdi generate --output /etc/cdi/nvidia.yaml    (Podman 4.3: --max-version 0.5.0)",),
    ),
    Message(
        "a running container has lost its GPUs",
        ("Failed to initialize NVML: Unknown Error",),
        "The device cgroup refuses the GPU. A hook had allowed it behind the runtime's back, and the runtime "
        "or systemd has written its own rules since (systemctl daemon-reload, docker update, the kubelet's "
        "CPU manager). ocigpu-runtime declares the rules, so that its containers keep their GPUs.",
        (
            "systemd-cgroup-loses-devices",
            "dev-char-links",
        ),
        (
            "ocigpu repair CONTAINER",
            "ocigpu watch --repair",
            "start the container with ocigpu-runtime from now on",
        ),
    ),
    Message(
        "driver and libraries differ",
        (
            "Driver/library version mismatch",
            "nvml error: driver/library version mismatch",
            "API mismatch: the client has the version",
        ),
        "The driver's libraries were updated and the old kernel module is still loaded. Containers that ran "
        "before the update hold the old libraries.",
        (
            "driver-library-mismatch",
            "deleted-driver-files",
        ),
        (
            "reboot, or end all that uses the GPUs and load the module again",
            "ocigpu doctor",
        ),
    ),
    Message(
        "driver not loaded",
        (
            "nvml error: driver not loaded",
            "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver",
            "Failed to initialize NVML: Driver Not Loaded",
        ),
        "No NVIDIA kernel module is loaded: not installed, not built for this kernel, refused by Secure Boot,"
        " or nouveau has the cards.",
        (
            "no-driver",
            "nouveau-loaded",
            "no-gpu",
        ),
        (
            "ocigpu doctor",
            "modprobe nvidia",
            "dmesg | grep -i nvrm",
        ),
    ),
    Message(
        "NVML library not found",
        (
            "libnvidia-ml.so.1: cannot open shared object file",
            "load library failed: libnvidia-ml.so.1",
            "NVML: libnvidia-ml.so.1 not found",
            "Failed to initialize NVML: could not load NVML library",
            "libcuda.so.1: cannot open shared object file",
            "ERROR_LIBRARY_NOT_FOUND",
        ),
        "On the host: the driver's libraries are not installed, or not where the loader's cache says. In a "
        "container: it was started without a GPU request, by another runtime, or without the capability that "
        "brings the library (utility for libnvidia-ml, compute for libcuda).",
        (
            "driver-libraries",
            "engine-not-configured",
        ),
        (
            "ocigpu explain CONTAINER",
            "NVIDIA_DRIVER_CAPABILITIES=compute,utility",
        ),
    ),
    Message(
        "no devices",
        (
            "No devices were found",
            "no CUDA-capable device is detected",
            "CUDA_ERROR_NO_DEVICE",
        ),
        "The libraries are there and no GPU can be opened: none was granted, its node is missing, its cgroup "
        "refuses it, or CUDA_VISIBLE_DEVICES names none.",
        (
            "device-nodes-missing",
            "gpu-lost",
            "cdi-partial",
        ),
        (
            "ocigpu verify CONTAINER",
            "ocigpu explain CONTAINER",
        ),
    ),
    Message(
        "CUDA unknown error",
        (
            "CUDA unknown error",
            "CUDA_ERROR_UNKNOWN",
            "cudaErrorUnknown",
            "forward compatibility was attempted on non supported HW",
        ),
        "nvidia-smi works and CUDA does not: usually /dev/nvidia-uvm is missing or has another number, or the"
        " image brings compatibility libraries of CUDA that this GPU cannot use.",
        (
            "uvm-missing",
            "device-nodes-wrong",
        ),
        (
            "ocigpu system create-device-nodes --load-kernel-modules",
            "ocigpu explain CONTAINER",
            'cuda-compat-mode = "disabled" in the settings',
        ),
    ),
    Message(
        "system not yet initialized",
        (
            "system not yet initialized",
            "CUDA_ERROR_SYSTEM_NOT_READY",
            "cudaErrorSystemNotReady",
        ),
        "On a machine with NVSwitches CUDA waits for the fabric manager, which does not run or is of another "
        "version than the driver.",
        ("fabric-manager",),
        ("systemctl enable --now nvidia-fabricmanager",),
    ),
    Message(
        "driver version insufficient",
        (
            "CUDA driver version is insufficient for CUDA runtime version",
            "unsatisfied condition: cuda",
            "nvidia-container-cli: requirement error",
            "cudaErrorInsufficientDriver",
        ),
        "The image wants a newer CUDA than the host's driver supports.",
        (),
        (
            "ocigpu explain BUNDLE    (shows the condition with this host's values)",
            "update the driver, or use an image for an older CUDA",
            "NVIDIA_DISABLE_REQUIRE=1 starts it anyway",
        ),
    ),
    Message(
        "GPU fallen off the bus",
        (
            "GPU has fallen off the bus",
            "Unable to determine the device handle for GPU",
            "GPU is lost",
            "NVRM: Xid",
        ),
        "A GPU does not answer any more. Containers get the others; one that asks for this GPU is refused.",
        ("gpu-lost",),
        (
            "dmesg | grep -i xid",
            "nvidia-smi --gpu-reset -i INDEX, or a reboot",
        ),
    ),
    Message(
        "nvidia-container-cli: timeout",
        ("driver rpc error: timed out",),
        "NVIDIA's tool waits ten seconds for all GPUs to wake up. Without persistence mode, or with a sick "
        "GPU, that is not enough. ocigpu takes what it needs from files and kept facts, and asks only when "
        "something has changed.",
        (
            "persistence-off",
            "gpu-lost",
            "nvml-failed",
        ),
        (
            "nvidia-smi -pm 1, or systemctl enable --now nvidia-persistenced",
            "ocigpu refresh    (at boot)",
        ),
    ),
    Message(
        "unknown device",
        (
            "nvidia-container-cli: device error",
            ": unknown device",
        ),
        "The request names a GPU that this host does not have: an index too high, the UUID of another "
        "machine, or a MIG device that was destroyed.",
        (),
        (
            "ocigpu list",
            "ocigpu explain OCIGPU-DEV-1",
        ),
    ),
    Message(
        "mount failed",
        (
            "nvidia-container-cli: mount error",
            "file creation failed",
            "file exists: unknown",
        ),
        "Something in the image is where a driver file belongs: often a copy of the driver that was installed"
        " into the image, or a directory in the place of a file.",
        (),
        (
            "remove the driver packages from the image",
            "ocigpu explain OCIGPU-MNT-2",
        ),
    ),
    Message(
        "no device cgroup",
        (
            "failed to get device cgroup mount path",
            "no cgroup filesystem mounted for the devices",
            "no devices or unified cgroup entries found",
            "bpf_prog_query(BPF_CGROUP_DEVICE) failed",
        ),
        "The tool changes device cgroups by itself and does not find them, or may not: cgroup v2 with an old "
        "release, or a rootless engine.",
        (
            "no-cgroups-mismatch",
            "rootless-no-delegation",
        ),
        ("ocigpu-runtime decides for each container; no setting is needed",),
    ),
    Message(
        "ldconfig failed",
        (
            "ldcache error",
            "ldconfig.real: no such file",
            "process /sbin/ldconfig.real failed",
            "/sbin/ldconfig failed",
        ),
        "The loader's cache of the container could not be written: no ldconfig on the host, or one that the "
        "image's libraries are too much for.",
        ("ldconfig-missing",),
        (
            "ocigpu explain OCIGPU-LD-1",
            'mode = "spec" in the settings needs no ldconfig',
        ),
    ),
    Message(
        "OCI runtime create failed",
        (
            "OCI runtime create failed",
            "error running hook #0",
            "error running prestart hook",
            "failed to create shim task",
            "Auto-detected mode as 'legacy'",
        ),
        "Only says that the runtime or one of its hooks failed. The cause stands further right in the same "
        "line; with ocigpu it begins with a code, OCIGPU-.",
        (),
        (
            "ocigpu explain CODE",
            "ocigpu doctor",
        ),
    ),
    Message(
        "permission denied on a device",
        (
            "Insufficient Permissions",
            "/dev/nvidiactl: permission denied",
            "/dev/nvidia0: permission denied",
            "Failed to initialize NVML: Insufficient Permissions",
        ),
        "The node's mode or group, SELinux or AppArmor keeps the user out. In a rootless container the nodes "
        "keep the owner that they have on the host.",
        (
            "device-nodes-wrong",
            "selinux-denies",
            "apparmor-denies",
        ),
        (
            "setsebool -P container_use_devices 1    (SELinux)",
            "podman run --group-add keep-groups    (rootless)",
            "ocigpu verify CONTAINER",
        ),
    ),
    Message(
        "rootless: cgroup",
        (
            "nvidia-container-cli: permission error",
            "failed to add device rules",
            "cgroup.procs: permission denied",
        ),
        "A rootless engine may not change device cgroups. There the nodes' modes on the host decide.",
        (
            "no-cgroups-mismatch",
            "rootless-no-ids",
            "rootless-no-delegation",
        ),
        ("ocigpu doctor",),
    ),
    Message(
        "pod not scheduled",
        ("Insufficient nvidia.com/gpu",),
        "The node offers no (free) nvidia.com/gpu: no device plugin runs there, or it found no GPU because "
        "its container was started without the GPU runtime.",
        (
            "engine-not-configured",
            "no-driver",
        ),
        (
            "kubectl describe node NODE",
            "ocigpu engine status    (on the node)",
        ),
    ),
    Message(
        "pod not admitted",
        (
            "UnexpectedAdmissionError",
            "Allocate failed due to",
        ),
        "The kubelet had a device that the plugin does not offer any more: the plugin was not registered yet "
        "after a reboot, or the device became unhealthy.",
        ("gpu-lost",),
        ("delete the pod: its controller makes a new one",),
    ),
    Message(
        "systemd: device link",
        (
            "Couldn't stat device /dev/char/",
            "Failed to stat device /dev/char",
        ),
        "systemd looks devices up by their link in /dev/char, and NVIDIA's driver makes none.",
        ("dev-char-links",),
        ("ocigpu system create-dev-char-symlinks",),
    ),
)


def find_messages(text: str) -> list[Message]:
    """Return the entries of which ``text`` (part of a log, say) has a literal, or that have ``text`` in one.

    Letter case and runs of white space do not count; what is shorter than eight characters is found in nothing.
    """
    wanted = _plain(text)
    if len(wanted) < 8:
        return []
    return [
        entry
        for entry in MESSAGES
        if any(_plain(literal) in wanted or wanted in _plain(literal) for literal in entry.texts)
    ]


def _plain(text: str) -> str:
    return " ".join(text.replace('\\"', '"').lower().split())


def render_markdown() -> str:
    """Return docs/TROUBLESHOOTING.md."""
    lines = [
        "# Troubleshooting, by what the program says",
        "",
        "Search this page for the message, or let the program do it, with any part of a log:",
        "",
        '    ocigpu explain "Failed to initialize NVML: Unknown Error"',
        "",
        "`ocigpu doctor` looks for all of these causes at once, and prints the command that mends what it finds",
        "([its checks](DOCTOR.md)). Messages that begin with `OCIGPU-` are in [ERRORS.md](ERRORS.md). This page is",
        "generated: `ocigpu explain --messages --markdown > docs/TROUBLESHOOTING.md`.",
    ]
    for entry in MESSAGES:
        lines += ["", f"## {entry.title[:1].upper()}{entry.title[1:]}", ""]
        lines += [f"    {literal}" for literal in entry.texts]
        lines += ["", *textwrap.wrap(entry.meaning, 120), ""]
        lines += [f"- `{step}`" if _is_command(step) else f"- {step}" for step in entry.steps]
        if entry.findings:
            lines += ["", f"Findings of `ocigpu doctor`: {', '.join(f'`{name}`' for name in entry.findings)}."]
    return "\n".join(lines) + "\n"


def _is_command(step: str) -> bool:
    return step.partition(" ")[0] in (
        "ocigpu",
        "systemctl",
        "modprobe",
        "dmesg",
        "nvidia-smi",
        "setsebool",
        "podman",
        "kubectl",
    )
