"""The hooks of CDI specifications in real containers: the vendor's six, one by one, and all in one process."""

import json
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support import machine, requirements
from support.bundle import LIBRARIES, give_to
from support.fixtures import MakeBundle
from support.machine import CACHED, MACHINE
from support.process import Completed, explain
from support.product import PROGRAMS, RUNTIME, PublicCopy, SimulatedHost
from support.runtimes import answers, container_id, parts, probe, run_container, script

from ocigpu.gpus.libraries.ldcache import parse_ldcache

pytestmark = [pytest.mark.root, pytest.mark.engine]

RUNTIMES = pytest.mark.parametrize("low_level", ["runc", "crun"])
FORMS = pytest.mark.parametrize("form", ["vendor", "merged"])
VERSION = "550.163.01"
DIRECTORY = f"/{LIBRARIES}"
GPUS = ("nvidia0", "nvidia5", "nvidiactl")
MOUNTED = ("libcuda.so", "libnvidia-ml.so", "libnvidia-ptxjitcompiler.so", "libnvidia-allocator.so")
LINKS = {
    f"{DIRECTORY}/gbm/nvidia-drm_gbm.so": "../libnvidia-allocator.so.1",
    f"{DIRECTORY}/libcuda.so": "libcuda.so.1",
    f"{DIRECTORY}/libcuda.so.1": f"libcuda.so.{VERSION}",
    f"{DIRECTORY}/libnvidia-ml.so.1": f"libnvidia-ml.so.{VERSION}",
    f"{DIRECTORY}/libnvidia-allocator.so.1": f"libnvidia-allocator.so.{VERSION}",
}
PROFILE = "/etc/nvidia/nvidia-application-profiles-rc.d/10-container.conf"
LOOK = script(
    ["sh", "-c", f"for link in {' '.join(LINKS)}; do readlink $link; done"],
    ["ldconfig", "-p"],
    ["cat", "/proc/driver/nvidia/params"],
    ["ls", "/proc/driver/nvidia/gpus"],
    ["cat", PROFILE],
    ["/dlopen", "libcuda.so.1", "libnvidia-ml.so.1"],
    ["sh", "-c", "cd /etc/ld.so.conf.d && head *"],
)


def commands(host: SimulatedHost) -> list[list[str]]:
    """The hooks of a specification as NVIDIA's generator writes them, but for where the driver's procfs is."""
    first, *others = [["--link", f"{target}::{path}"] for path, target in LINKS.items()]
    proc = str(host.directory / "proc/driver/nvidia")
    return [
        ["create-symlinks", *first],
        ["create-symlinks", *(word for link in others for word in link)],
        ["enable-cuda-compat", f"--host-driver-version={VERSION}"],
        ["update-ldcache", "--folder", DIRECTORY, "--folder", f"{DIRECTORY}/vdpau"],
        ["disable-device-node-modification", "--driver-proc", proc, "--simulated"],
        ["update-application-profile"],
    ]


def entries(form: str, words: list[list[str]], program: Path = PROGRAMS / "ocigpu-hook") -> list[dict[str, Any]]:
    """Hooks as an engine puts them into config.json: each for itself, or one for all."""
    if form == "vendor":
        environment = ["NVIDIA_CTK_DEBUG=false"]
        return [{"path": str(program), "args": ["nvidia-cdi-hook", *item], "env": environment} for item in words]
    merged = [word for item in words for word in ("+", *item)][1:]
    return [{"path": str(program), "args": ["ocigpu-hook", *merged], "env": ["LC_ALL=C.UTF-8"]}]


def add_devices(config: dict[str, Any], host: SimulatedHost) -> None:
    """Add what an engine adds for a CDI specification's nodes and mounts."""
    config["linux"]["devices"] = []
    for name in GPUS:
        major, minor = map(int, host.number(name))
        config["linux"]["devices"].append(
            {"path": f"/dev/{name}", "type": "c", "major": major, "minor": minor, "fileMode": 0o666}
        )
        rule = {"allow": True, "type": "c", "major": major, "minor": minor, "access": "rw"}
        config["linux"]["resources"]["devices"].append(rule)
    for name in MOUNTED:
        source = next(host.directory.glob(f"{LIBRARIES}/{name}.{VERSION}"))
        options = ["ro", "nosuid", "nodev", "rbind", "rprivate"]
        destination = f"{DIRECTORY}/{source.name}"
        config["mounts"].append({"destination": destination, "source": str(source), "type": "bind", "options": options})


def make(
    make_bundle: MakeBundle, host: SimulatedHost, hooks: list[dict[str, Any]], arguments: list[str] = LOOK, **root: Any
) -> Path:
    def edit(config: dict[str, Any]) -> None:
        add_devices(config, host)
        config["hooks"] = {"createContainer": hooks}
        config["root"].update(root)

    return make_bundle(arguments, edit=edit)


def start(bundle: Path, low_level: str, env: dict[str, str], program: Path | None = None) -> Completed:
    cgroup = "v2" if low_level == "crun" else ""  # crun refuses machines that mount both versions
    variables = {name: value for name, value in env.items() if low_level == "crun" or name != "LD_PRELOAD"}
    return run_container([program or low_level], bundle, container_id(), env=variables, cgroup=cgroup)


def assert_in_place(result: Completed) -> None:
    assert result.returncode == 0, explain(result)
    links, cache, params, gpus, profile, opened, conf = parts(result.stdout)
    assert links.splitlines() == list(LINKS.values()), explain(result)
    assert f"libcuda.so.1 ({CACHED}) => {DIRECTORY}/libcuda.so.1" in cache
    assert f"libnvidia-ml.so.1 ({CACHED}) => {DIRECTORY}/libnvidia-ml.so.1" in cache
    assert "ModifyDeviceFiles: 0" in params.splitlines()
    assert gpus.splitlines() == ["0000:01:00.0", "0000:06:00.0"]
    assert '"EGLVisibleDGPUDevices", 0x21]' in profile
    assert opened.splitlines() == ["dlopen libcuda.so.1 ok", "dlopen libnvidia-ml.so.1 ok"]
    assert conf == f"{DIRECTORY}/vdpau\n"  # the other folder is one that Debian's loader searches by itself


@RUNTIMES
@FORMS
@pytest.mark.parametrize("readonly", [False, True], ids=["writable root", "read-only root"])
def test_the_hooks_of_an_existing_specification_work(
    make_bundle: MakeBundle,
    simulated_host: SimulatedHost,
    runtime_environment: dict[str, str],
    low_level: str,
    form: str,
    readonly: bool,
) -> None:
    hooks = entries(form, commands(simulated_host))
    bundle = make(make_bundle, simulated_host, hooks, readonly=readonly)
    assert_in_place(start(bundle, low_level, runtime_environment))
    found, problem = parse_ldcache((bundle / "rootfs/etc/ld.so.cache").read_bytes(), (b"libcuda.so",), (0x300,))
    assert problem == ""
    assert ("libcuda.so.1", f"{DIRECTORY}/libcuda.so.1") in found
    assert machine.mounts_below(str(bundle)) == []


TOOLKIT_LIBRARIES = (
    f"libcuda.so.{VERSION}", f"libnvidia-ml.so.{VERSION}", f"libnvidia-ptxjitcompiler.so.{VERSION}",
    "libnvidia-egl-gbm.so.1.1.1", "libnvidia-egl-wayland.so.1.1.13", f"libnvidia-glcore.so.{VERSION}",
)  # fmt: skip
SONAMES = (
    "libcuda.so.1", "libnvidia-ml.so.1", "libnvidia-ptxjitcompiler.so.1", "libnvidia-egl-gbm.so.1",
    "libnvidia-egl-wayland.so.1",
)  # fmt: skip
UNVERSIONED = [f"libcuda.so.1::{DIRECTORY}/libcuda.so"]
LINKED_ON_THE_HOST = [
    f"{file}::{DIRECTORY}/{soname}" for file, soname in zip(TOOLKIT_LIBRARIES[:3], SONAMES[:3], strict=True)
]


def toolkit_hooks(program: str, lead: list[str], links: list[str], *more: list[str]) -> list[dict[str, Any]]:
    """The hooks that are about libraries, as a release of NVIDIA's toolkit writes them."""
    words = [["create-symlinks", *(word for link in links for word in ("--link", link))], *more]
    words.append(["update-ldcache", "--folder", DIRECTORY])
    return [{"hookName": "createContainer", "path": program, "args": [*lead, *item]} for item in words]


def write_toolkit_spec(directory: Path, host: SimulatedHost, toolkit: str) -> dict[str, Any]:
    """Write the specification of a release, its hook programs being ours by their names; return what it says."""
    programs = {}
    for name in ("nvidia-ctk", "nvidia-cdi-hook"):
        programs[name] = str(directory / name)
        (directory / name).symlink_to(PROGRAMS / "ocigpu-hook")
    ctk, cdi = (programs["nvidia-ctk"], ["nvidia-ctk", "hook"]), (programs["nvidia-cdi-hook"], ["nvidia-cdi-hook"])
    compat = ["enable-cuda-compat", f"--host-driver-version={VERSION}"]
    hooks = {
        "1.16": toolkit_hooks(*ctk, UNVERSIONED),
        "1.17": toolkit_hooks(*cdi, UNVERSIONED, compat),
        "1.18": toolkit_hooks(*cdi, [*UNVERSIONED, *LINKED_ON_THE_HOST], compat),
        "DRA driver": toolkit_hooks(*cdi, [*UNVERSIONED, *LINKED_ON_THE_HOST]),
    }[toolkit]
    if toolkit != "1.16":
        for hook in hooks:
            hook["env"] = ["NVIDIA_CTK_DEBUG=false"]
    options = ["ro", "nosuid", "nodev", "rbind" if toolkit == "1.18" else "bind"]
    mounts = [
        {
            "hostPath": str(host.directory / LIBRARIES / name),
            "containerPath": f"{DIRECTORY}/{name}",
            "options": options,
        }
        for name in TOOLKIT_LIBRARIES
    ]
    kind, device = ("k8s.gpu.nvidia.com/claim", "a-gpu-0") if toolkit == "DRA driver" else ("nvidia.com/gpu", "0")
    spec = {
        "cdiVersion": "0.5.0",
        "kind": kind,
        "devices": [{"name": device, "containerEdits": {"env": ["A=1"]}}],
        "containerEdits": {"env": ["NVIDIA_VISIBLE_DEVICES=void"], "mounts": mounts, "hooks": hooks},
    }
    (directory / "spec.json").write_text(json.dumps(spec))
    return spec


@RUNTIMES
@pytest.mark.parametrize("way", ["engine", "shim"])
@pytest.mark.parametrize("toolkit", ["1.16", "1.17", "1.18", "DRA driver"])
def test_libraries_have_their_sonames_whatever_release_wrote_the_specification(
    make_bundle: MakeBundle,
    simulated_host: SimulatedHost,
    runtime_environment: dict[str, str],
    work_directory: Path,
    low_level: str,
    way: str,
    toolkit: str,
) -> None:
    """Releases up to 1.17 leave all SONAME links to update-ldcache, later ones those that the host has not."""
    specs = work_directory / "cdi"
    specs.mkdir()
    spec = write_toolkit_spec(specs, simulated_host, toolkit)
    name = f"{spec['kind']}={spec['devices'][0]['name']}"
    look = script(
        ["sh", "-c", f"cd {DIRECTORY}; for link in {' '.join(SONAMES)}; do readlink $link; done"],
        ["ldconfig", "-p"],
        ["/dlopen", *SONAMES],
    )

    def edit(config: dict[str, Any]) -> None:
        if way == "shim":
            config["process"]["env"].append(f"NVIDIA_VISIBLE_DEVICES={name}")
            return
        edits = spec["containerEdits"]
        config["hooks"] = {
            "createContainer": [{k: v for k, v in hook.items() if k != "hookName"} for hook in edits["hooks"]]
        }
        config["mounts"] += [
            {
                "destination": mount["containerPath"],
                "source": mount["hostPath"],
                "type": "bind",
                "options": mount["options"],
            }
            for mount in edits["mounts"]
        ]

    bundle = make_bundle(look, edit=edit)
    if way == "shim":
        settings = work_directory / "config.toml"
        program = requirements.find_program(low_level)
        settings.write_text(
            f'mode = "cdi"\nruntime.runtimes = ["{program}"]\ncdi.spec-dirs = ["{specs}"]\n'
            'cdi.environment-vendors = ["nvidia.com", "k8s.gpu.nvidia.com"]\n'
        )
        result = start(bundle, low_level, {**runtime_environment, "OCIGPU_CONFIG": str(settings)}, RUNTIME)
    else:
        result = start(bundle, low_level, runtime_environment)
    assert result.returncode == 0, explain(result)
    links, cache, opened = parts(result.stdout)
    assert links.splitlines() == list(TOOLKIT_LIBRARIES[:5]), explain(result)
    for soname in SONAMES:
        assert f"{soname} ({CACHED}) => {DIRECTORY}/{soname}\n" in cache
    assert opened.splitlines() == [f"dlopen {soname} ok" for soname in SONAMES]
    assert not list((bundle / f"rootfs{DIRECTORY}").glob(".ocigpu-*"))


@RUNTIMES
def test_one_process_gives_what_six_give(
    make_bundle: MakeBundle, simulated_host: SimulatedHost, runtime_environment: dict[str, str], low_level: str
) -> None:
    seen = []
    for form in ("vendor", "merged"):
        bundle = make(make_bundle, simulated_host, entries(form, commands(simulated_host)))
        add_compat(bundle)
        result = start(bundle, low_level, runtime_environment)
        assert result.returncode == 0, explain(result)
        seen.append((result.stdout, contents(bundle / "rootfs")))
    assert seen[0] == seen[1]


def contents(rootfs: Path) -> dict[str, bytes | str]:
    """The files and links of a root file system."""
    return {
        str(path.relative_to(rootfs)): str(path.readlink()) if path.is_symlink() else path.read_bytes()
        for path in rootfs.rglob("*")
        if path.is_symlink() or path.is_file()
    }


@pytest.mark.rest
@RUNTIMES
def test_starting_again_leaves_the_same_files(
    make_bundle: MakeBundle, simulated_host: SimulatedHost, runtime_environment: dict[str, str], low_level: str
) -> None:
    """Also when the hook is there twice, as with two specifications of one host."""
    once, twice = entries("merged", commands(simulated_host)), entries("vendor", commands(simulated_host)) * 2
    bundle = make(make_bundle, simulated_host, once)
    assert_in_place(start(bundle, low_level, runtime_environment))
    first = contents(bundle / "rootfs")
    for hooks in (once, twice):
        config = json.loads((bundle / "config.json").read_text())
        config["hooks"]["createContainer"] = hooks
        (bundle / "config.json").write_text(json.dumps(config))
        assert_in_place(start(bundle, low_level, runtime_environment))
        assert contents(bundle / "rootfs") == first


def add_compat(bundle: Path) -> None:
    """Give the image a CUDA compatibility library that knows the simulated host's driver."""
    directory = bundle / "rootfs/usr/local/cuda-12.9/compat"
    directory.mkdir(parents=True)
    (directory.parents[1] / "cuda").symlink_to("cuda-12.9")
    content = b'{"format": 1, "CUDA version": "12.9", "driver": [535, 550, 570]}'
    note = struct.pack("<III", 19, len(content), 1) + b"NVIDIA Corporation".ljust(20, b"\0") + content
    source = '.section .note.cuda.fwd_compatibility,"a",@note\n.balign 4\n.byte ' + ",".join(map(str, note)) + "\n"
    library = directory / "libcuda.so.575.57.08"
    command = ["gcc", "-shared", "-nostdlib", "-Wl,-soname,libcuda.so.1", "-x", "assembler", "-", "-o", library]
    subprocess.run(command, input=source.encode(), check=True)
    (directory / "libcuda.so.1").symlink_to(library.name)


@RUNTIMES
@FORMS
@pytest.mark.parametrize(("driver", "used"), [(VERSION, True), ("560.1", False)], ids=["suits", "does not suit"])
def test_the_loader_prefers_the_images_cuda_library_where_it_suits_the_driver(
    make_bundle: MakeBundle,
    simulated_host: SimulatedHost,
    runtime_environment: dict[str, str],
    low_level: str,
    form: str,
    driver: str,
    used: bool,
) -> None:
    words = commands(simulated_host)
    words[2] = ["enable-cuda-compat", f"--host-driver-version={driver}"]
    bundle = make(make_bundle, simulated_host, entries(form, words), ["ldconfig", "-p"])
    add_compat(bundle)
    result = start(bundle, low_level, runtime_environment)
    assert result.returncode == 0, explain(result)
    found = [line.rpartition(" => ")[2] for line in result.stdout.splitlines() if line.startswith("\tlibcuda.so.1 ")]
    compat = "/usr/local/cuda-12.9/compat/libcuda.so.1"
    assert found == [*([compat] if used else []), f"{DIRECTORY}/libcuda.so.1"]
    conf = bundle / "rootfs/etc/ld.so.conf.d/00-compat-ocigpu.conf"
    assert (conf.read_text() if conf.exists() else "") == ("/usr/local/cuda-12.9/compat\n" if used else "")


@RUNTIMES
def test_an_image_without_a_shell_or_etc_is_fine(
    make_bundle: MakeBundle, simulated_host: SimulatedHost, runtime_environment: dict[str, str], low_level: str
) -> None:
    look = probe(["read", "/proc/driver/nvidia/params"], ["stat", f"{DIRECTORY}/libcuda.so.1", PROFILE])

    for layout in ("distroless", "no-etc", "alpine-like"):

        def edit(config: dict[str, Any]) -> None:
            add_devices(config, simulated_host)
            config["hooks"] = {"createContainer": entries("merged", commands(simulated_host))}

        bundle = make_bundle(look, layout=layout, edit=edit)
        result = start(bundle, low_level, runtime_environment)
        assert result.returncode == 0, explain(result)
        seen = answers(result.stdout)
        assert "ModifyDeviceFiles: 0" in seen["read", "/proc/driver/nvidia/params"].splitlines()
        assert seen["stat", f"{DIRECTORY}/libcuda.so.1"].startswith("l ")
        assert seen["stat", PROFILE].split()[2] == "0444"
        path_file = bundle / f"rootfs/etc/ld-musl-{MACHINE}.path"
        assert path_file.exists() == (layout == "alpine-like")
        if path_file.exists():
            text = f"/lib:/usr/local/lib:/usr/lib\n{DIRECTORY}\n{DIRECTORY}/vdpau\n"
            assert path_file.read_text() == text


@RUNTIMES
@FORMS
def test_a_file_of_the_image_gives_way_to_the_link_without_being_lost(
    make_bundle: MakeBundle,
    simulated_host: SimulatedHost,
    runtime_environment: dict[str, str],
    low_level: str,
    form: str,
) -> None:
    """The vendor's program replaces it.

    The second link leads to one that a later process makes: one by one, there is nothing yet to show in its place.
    """
    paths = [f"{DIRECTORY}/libcuda.so.1", f"{DIRECTORY}/gbm/nvidia-drm_gbm.so"]
    bundle = make(make_bundle, simulated_host, entries(form, commands(simulated_host)), ["md5sum", *paths])
    files = [bundle / "rootfs" / path.lstrip("/") for path in paths]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_text("the image's own")
    result = start(bundle, low_level, runtime_environment)
    assert result.returncode == 0, explain(result)
    cuda, gbm = (simulated_host.directory / LIBRARIES / f"{name}.{VERSION}" for name in (MOUNTED[0], MOUNTED[3]))
    sources = [cuda, gbm if form == "merged" else files[1]]
    wanted = [subprocess.check_output(["md5sum", source], text=True).split()[0] for source in sources]
    assert [line.split()[0] for line in result.stdout.splitlines()] == wanted
    assert [file.read_text() for file in files] == ["the image's own"] * 2


@RUNTIMES
def test_mesa_of_the_image_finds_gbms_backend_whatever_the_hosts_directory_is(
    make_bundle: MakeBundle, simulated_host: SimulatedHost, runtime_environment: dict[str, str], low_level: str
) -> None:
    """A Debian image on a host with /usr/lib64 (unraid/unraid-nvidia-driver pull request 10)."""
    words = [["create-symlinks", "--link", "../libnvidia-allocator.so.1::/usr/lib64/gbm/nvidia-drm_gbm.so"]]
    paths = [f"{DIRECTORY}/gbm/nvidia-drm_gbm.so", "/usr/lib64/gbm/nvidia-drm_gbm.so"]
    look = ["sh", "-c", f"for link in {' '.join(paths)}; do readlink $link; done"]
    result = start(make(make_bundle, simulated_host, entries("merged", words), look), low_level, runtime_environment)
    assert result.stdout.split() == ["/usr/lib64/libnvidia-allocator.so.1", "../libnvidia-allocator.so.1"], explain(
        result
    )


@RUNTIMES
def test_a_sub_command_that_fails_undoes_the_others(
    make_bundle: MakeBundle,
    simulated_host: SimulatedHost,
    runtime_environment: dict[str, str],
    low_level: str,
    work_directory: Path,
) -> None:
    words = [*commands(simulated_host), ["chmod", "--mode", "700", "--path", "/tmp"]]
    words[1] += ["--link", "x::/usr/bin"]
    bundle = make(make_bundle, simulated_host, entries("merged", words), ["true"])
    for name in MOUNTED:  # the runtime's own doing
        (bundle / f"rootfs{DIRECTORY}/{name}.{VERSION}").touch()
    settings = work_directory / "config.toml"
    log = work_directory / "hook.log"
    settings.write_text(f'[hook]\nlog = "{log}"\n')
    config = json.loads((bundle / "config.json").read_text())
    config["hooks"]["createContainer"][0]["args"][1:1] = ["--config", str(settings)]
    (bundle / "config.json").write_text(json.dumps(config))
    before = machine.tree(bundle / "rootfs")
    result = start(bundle, low_level, runtime_environment)
    assert result.returncode != 0
    assert "OCIGPU-MNT-3: link /usr/bin -> x: the container has a directory at" in log.read_text()
    assert machine.tree(bundle / "rootfs") == before


HOSTILE = (
    "etc",
    "usr/lib",
    LIBRARIES,
    f"{LIBRARIES}/gbm",
    "etc/ld.so.conf.d",
    "etc/ld.so.conf",
    "usr/local",
    "etc/nvidia",
)


@pytest.mark.product
@RUNTIMES
@FORMS
@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("target", ["absolute", "relative", "root", "up"])
def test_links_of_an_image_do_not_lead_to_the_host(
    make_bundle: MakeBundle,
    simulated_host: SimulatedHost,
    runtime_environment: dict[str, str],
    work_directory: Path,
    low_level: str,
    form: str,
    name: str,
    target: str,
) -> None:
    marker = work_directory / "marker"
    for directory in ("etc/ld.so.conf.d", f"{LIBRARIES}/gbm", "compat"):
        (marker / directory).mkdir(parents=True)
    for file in ("file", "ld.so.cache", "libcuda.so.1", "etc/ld.so.cache", "etc/ld.so.conf"):
        (marker / file).write_text("the host's")

    def edit(config: dict[str, Any]) -> None:
        add_devices(config, simulated_host)
        config["mounts"] = [mount for mount in config["mounts"] if mount.get("type") != "bind"]
        config["hooks"] = {"createContainer": entries(form, commands(simulated_host))}

    bundle = make_bundle(["/probe", "list", "/"], edit=edit)
    path = bundle / "rootfs" / name
    depth = len(path.relative_to(bundle).parts) - 1
    up = "../" * (depth + 1)
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to({"absolute": str(marker), "relative": f"{up}marker", "root": "/", "up": f"{up}{up}"}[target])
    before, own = machine.tree(marker), machine.tree(simulated_host.directory / "proc")
    result = start(bundle, low_level, runtime_environment)
    assert machine.tree(marker) == before
    assert machine.tree(simulated_host.directory / "proc") == own
    assert machine.mounts_below(str(bundle)) == []
    assert "Traceback" not in result.stderr
    assert "INT-1" not in result.stderr


@pytest.mark.rest
@pytest.mark.parametrize(("low_level", "closed"), [("runc", False), ("crun", False), ("runc", True)])
@FORMS
def test_the_hooks_work_in_a_user_namespace(
    make_bundle: MakeBundle,
    simulated_host: SimulatedHost,
    runtime_environment: dict[str, str],
    public_copy: PublicCopy,
    low_level: str,
    closed: bool,
    form: str,
) -> None:
    """``closed``: the bundle is where the container's user has no way to, as Podman's with --userns=auto.

    crun before 1.27 goes there itself (its pull request 2035), and then starts nobody's hooks.
    """
    program = public_copy.runtime.with_name("ocigpu-hook")

    def edit(config: dict[str, Any]) -> None:
        add_devices(config, simulated_host)
        config["hooks"] = {"createContainer": entries(form, commands(simulated_host), program)}
        config["linux"]["namespaces"].append({"type": "user"})
        for name in ("uidMappings", "gidMappings"):
            config["linux"][name] = [{"containerID": 0, "hostID": 100000, "size": 65536}]
        for device in config["linux"]["devices"]:
            name = device["path"].rpartition("/")[2]
            source = str(simulated_host.directory / "dev" / name)
            config["mounts"].append({"destination": device["path"], "source": source, "options": ["bind"]})
        if closed:
            config["root"]["path"] = "../rootfs"
        config["linux"]["devices"] = [{"path": "/dev/kmsg", "type": "c", "major": 1, "minor": 11}]  # crun: bundle "/"

    bundle = make_bundle(LOOK, edit=edit)
    give_to(bundle / "rootfs", 100000, 100000)
    if closed:
        private = bundle / "private"
        private.mkdir(mode=0o700)
        (bundle / "config.json").rename(private / "config.json")
        bundle = private
    assert_in_place(start(bundle, low_level, runtime_environment))
