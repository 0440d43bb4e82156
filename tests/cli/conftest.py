"""A host as data for the tests of the commands: eight GPUs, as in data/README.md, or with MIG devices."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ocigpu.core.facts import DeviceNode, Gpu, HostFacts, HostFile, Library, MigDevice, ProcFile, facts_to_json

LIBRARY_DIRECTORY = "/usr/lib/x86_64-linux-gnu"
VERSION = "550.163.01"
LIBRARIES = {
    "utility": ["libnvidia-ml", "libnvidia-cfg"],
    "compute": [
        "libcuda", "libcudadebugger", "libnvidia-opencl", "libnvidia-gpucomp", "libnvidia-ptxjitcompiler",
        "libnvidia-allocator", "libnvidia-pkcs11", "libnvidia-pkcs11-openssl3", "libnvidia-nvvm",
    ],
    "ngx": ["libnvidia-ngx"],
    "video": ["libnvidia-encode", "libnvidia-opticalflow", "libnvcuvid"],
    "graphics": [
        "libnvidia-eglcore", "libnvidia-glcore", "libnvidia-tls", "libnvidia-glsi", "libnvidia-fbc", "libnvidia-rtcore",
        "libnvoptix", "libGLX_nvidia", "libEGL_nvidia", "libGLESv2_nvidia", "libGLESv1_CM_nvidia",
        "libnvidia-glvkspirv",
    ],
}  # fmt: skip
BINARIES = {
    "nvidia-smi": "utility",
    "nvidia-debugdump": "utility",
    "nvidia-persistenced": "utility",
    "nvidia-cuda-mps-control": "compute",
    "nvidia-cuda-mps-server": "compute",
}


def node(path: str, major: int, minor: int) -> DeviceNode:
    return DeviceNode(path, path, major, minor)


def make_gpu(number: int) -> Gpu:
    return Gpu(
        index=number,
        minor=number,
        uuid=f"GPU-4d4f434b-0000-0000-0000-{number:012}",
        bus_id=f"00000000:{number + 1:02x}:00.0",
        model="Mock NVIDIA A100-SXM4-40GB",
        brand="Nvidia",
        architecture="8.0",
        proc_name=f"0000:{number + 1:02x}:00.0",
        node=node(f"/dev/nvidia{number}", 195, number),
        mig_capable=True,
    )


@pytest.fixture
def facts() -> HostFacts:
    """Eight GPUs; everything is in alphabetical order, as no listing shows it."""
    libraries = [
        Library(f"{LIBRARY_DIRECTORY}/{name}.so.{VERSION}", f"{name}.so.{VERSION}", f"{name}.so.1", (capability,))
        for capability, names in LIBRARIES.items()
        for name in names
    ]
    return HostFacts(
        driver_version=VERSION,
        cuda_version="12.4",
        source="nvml",
        gpus=tuple(make_gpu(number) for number in range(8)),
        majors=(("nvidia", 195), ("nvidia-uvm", 510), ("nvidia-caps", 235)),
        control_nodes=(
            node("/dev/nvidiactl", 195, 255),
            node("/dev/nvidia-uvm", 510, 0),
            node("/dev/nvidia-uvm-tools", 510, 1),
            node("/dev/nvidia-modeset", 195, 254),
        ),
        cap_nodes=(
            ("config", node("/dev/nvidia-caps/nvidia-cap1", 235, 1)),
            ("monitor", node("/dev/nvidia-caps/nvidia-cap2", 235, 2)),
        ),
        libraries=tuple(sorted(libraries)),
        binaries=tuple(
            HostFile(f"/usr/bin/{name}", f"/usr/bin/{name}", (capability,))
            for name, capability in sorted(BINARIES.items())
        ),
        firmware=tuple(
            HostFile(f"/usr/lib/firmware/nvidia/{VERSION}/{name}", f"/lib/firmware/nvidia/{VERSION}/{name}")
            for name in ("gsp_ga10x.bin", "gsp_tu10x.bin")
        ),
        sockets=(
            HostFile("/run/nvidia-persistenced/socket", "/run/nvidia-persistenced/socket", ("utility",), "socket"),
        ),
        proc_driver="/proc/driver/nvidia",
        proc_files=(ProcFile("version", 0o444, "NVRM version\n"),),
    )


@pytest.fixture
def mig_facts(facts: HostFacts) -> HostFacts:
    """The same host, but GPU 1 is cut into two MIG devices."""
    migs = (
        MigDevice(0, "MIG-aaaaaaaa-0000-0000-0000-000000000000", "3g.20gb", 1, 0, 138, 139),
        MigDevice(1, "MIG-bbbbbbbb-0000-0000-0000-000000000000", "3g.20gb", 2, 0, 147, 148),
    )
    gpus = list(facts.gpus)
    gpus[1] = gpus[1]._replace(mig_enabled=True, mig_devices=migs)
    nodes = []
    for mig in migs:
        for path, minor in (
            (f"gi{mig.gpu_instance}/access", mig.gi_minor),
            (f"gi{mig.gpu_instance}/ci0/access", mig.ci_minor),
        ):
            nodes.append((f"gpu1/{path}", node(f"/dev/nvidia-caps/nvidia-cap{minor}", 235, minor)))
    return facts._replace(gpus=tuple(gpus), cap_nodes=(*facts.cap_nodes, *nodes))


@pytest.fixture
def record(tmp_path: Path) -> Callable[[HostFacts], str]:
    """Call with facts: returns the path of a file for --facts."""

    def write(facts: HostFacts) -> str:
        path = tmp_path / "facts.json"
        path.write_text(json.dumps(facts_to_json(facts)))
        return str(path)

    return write
