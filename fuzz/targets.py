"""What is fuzzed: functions that take any bytes, give them to a reader of ours, and look at the outcome.

A reader returns, or raises OcigpuError with a message of one short line; :func:`run` holds that for all of them.  The
targets themselves hold what must be true of a result.  Nothing is written but files in a directory of the target's.
"""

import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ocigpu.bundle import document as spec
from ocigpu.bundle import edit
from ocigpu.bundle.declared import Declared, edit_declared, why_hook
from ocigpu.bundle.edit import take_back
from ocigpu.bundle.inject import inject
from ocigpu.cdi import check, hook_words, yaml_child
from ocigpu.cdi.write import dump_json, dump_yaml
from ocigpu.core import rawjson, settings
from ocigpu.core.cdi_names import is_qualified
from ocigpu.core.config_json import parse_json, rootfs_path
from ocigpu.core.errors import UNUSABLE, OcigpuError
from ocigpu.core.facts import HostFacts, facts_from_json, facts_to_json, to_data
from ocigpu.entry import state
from ocigpu.entry.arguments import parse_arguments
from ocigpu.entry.pass_through import find_words
from ocigpu.gpus import cached, fingerprint, pci, tree
from ocigpu.gpus.amd import facts as amd
from ocigpu.gpus.libraries import elf
from ocigpu.gpus.libraries import loader_cache as ldcache
from ocigpu.gpus.libraries.ldcache import NEW_MAGIC, parse_ldcache
from ocigpu.gpus.nvidia import gpus, nvml, procfs, require
from ocigpu.gpus.nvidia.plan import make_plan
from ocigpu.gpus.tegra import facts as tegra
from ocigpu.gpus.vendors import parse_request
from ocigpu.hook import check_command, split_options
from ocigpu.provision import cgroups, compat, device_filter, image_cache, loader
from ocigpu.system import proc
from ocigpu.system import store as cache
from ocigpu.system.settings_file import read_settings

ROOT = Path(__file__).parent.parent
MAX_LINE = 4000
"""Characters that an error shown to a user may have."""

HOST: HostFacts = facts_from_json(json.loads((ROOT / "tests/bundles/hosts/h100-8-mig.json").read_text()))
SAMPLE = (ROOT / "tests/bundles/docker-all/config.json").read_bytes()
SETTINGS = (
    settings.Settings(),
    settings.Settings(
        mode="cdi",
        accept_nvidia_visible_devices_as_volume_mounts=True,
        accept_nvidia_visible_devices_envvar_when_unprivileged=False,
    ),
    settings.Settings(mode="spec", swarm_resource="DOCKER_RESOURCE_GPU", supported_driver_capabilities="all"),
)
RULES = [{"allow": True, "type": "c", "major": 195, "minor": minor, "access": "rw"} for minor in (0, 255)]
LIBRARIES = (
    ("libcuda.so.1", "/usr/lib64/libcuda.so.1", 64),
    ("libcuda.so.10", "/usr/lib64/libcuda.so.10", 64),
    ("libnvidia-ml.so.1", "/usr/lib64/libnvidia-ml.so.1", 64),
    ("libcuda.so.1", "/usr/lib/libcuda.so.1", 32),
)
DECLARED = Declared(
    nodes=[("/dev/nvidia0", "/dev/nvidia0", 195, 0, 0o666, 0, 0)],
    rules=RULES,
    mounts=[
        {
            "destination": "/usr/bin/nvidia-smi",
            "source": "/usr/bin/nvidia-smi",
            "type": "bind",
            "options": ["rbind", "rprivate", "ro", "nosuid", "nodev"],
        }
    ],
    optional=[],
    masked=["/proc/driver/nvidia/gpus/0000:3b:00.0"],
    read_only=[],
    simulated_proc="",
    links=[("/usr/lib64/libcuda.so", "libcuda.so.1")],
    libraries=LIBRARIES,
    views=[],
    denied=[(195, 1)],
    needs_hook="",
    granted=["GPU-0"],
    notes=[],
)


def attempt(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return what the function does, None where it refuses as it should."""
    try:
        return function(*arguments)
    except OcigpuError as error:
        shown = error.render("fuzz")
        assert len(shown) <= MAX_LINE, f"{len(shown)} characters: {shown[:200]}"
        lines = shown.split("\n")
        assert len(lines) <= 2, shown
        assert all(line.isprintable() for line in lines), ascii(shown)
        return None


@contextmanager
def as_file(data: bytes) -> Iterator[str]:
    """Give the path of a regular file of our own with this content."""
    fd = os.memfd_create("fuzz")
    try:
        os.fchmod(fd, 0o600)
        os.write(fd, data)
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


_directory = ""


def directory() -> str:
    """Return an empty directory: always the same one, until :func:`clean`."""
    global _directory  # noqa: PLW0603 - one for each process
    if _directory:
        shutil.rmtree(_directory, ignore_errors=True)
        os.mkdir(_directory)
    else:
        _directory = tempfile.mkdtemp(prefix="ocigpu-fuzz-")
    return _directory


def clean() -> None:
    """Remove the directory."""
    global _directory  # noqa: PLW0603 - as above
    if _directory:
        shutil.rmtree(_directory, ignore_errors=True)
        _directory = ""


def _words(data: bytes) -> list[str]:
    """Return the words of a command line: a line each, at most 200, without NUL, which none can have."""
    return data.replace(b"\0", b"").decode("utf-8", "surrogateescape").split("\n")[:200]


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


# -- what engines and images write -------------------------------------------------------------------------------


def fuzz_config(data: bytes) -> None:
    """config.json: read, asked what it wants, edited for hook and for spec mode, and the edits taken back."""
    config = attempt(spec.parse_config, data, "config.json")
    if config is None:
        return
    try:
        again = rawjson.parse(rawjson.dump(config))
    except ValueError:  # 1e999, an infinity here: write_config refuses it
        return
    for one in SETTINGS:
        _request(config, one)
    attempt(spec.check_can_have_gpus, config, "config.json")
    root = attempt(rootfs_path, config, "/bundle")
    assert root is None or os.fsencode(root).startswith(b"/")
    reason = why_hook(DECLARED, config, lambda path: path, True, False)
    assert len(reason) <= MAX_LINE
    attempt(_edit, config)
    take_back(again)
    attempt(_declare, again)


def _edit(config: dict[str, Any]) -> None:
    options = ["--config", "/etc/ocigpu/config.toml"]
    edit.edit_config(config, RULES, "/usr/bin/ocigpu-hook", options)
    once = rawjson.dump(config)
    edit.edit_config(config, RULES, "/usr/bin/ocigpu-hook", options)
    assert rawjson.dump(config) == once, "editing twice is not editing once"
    assert rawjson.parse(once) == config


def _declare(config: dict[str, Any]) -> None:
    edit_declared(config, DECLARED, "/root", [], True, False)
    rawjson.parse(rawjson.dump(config))
    take_back(config)


def _request(config: dict[str, Any], one: settings.Settings) -> None:
    request = attempt(parse_request, config, one)
    if request is None or request.selection == "nothing":
        return
    text = rawjson.dump(config)
    assert any(word in text for word in find_words(one)), "the stub would have passed this request on"
    assert all(len(text) <= MAX_LINE and text.isprintable() for text in (*request.notes, request.source))
    if request.selection == "cdi":
        assert all(map(is_qualified, request.cdi_devices))
        return
    plan = attempt(make_plan, HOST, request, one) if one is not SETTINGS[2] else None
    if plan is not None:
        assert all(len(note) <= MAX_LINE and note.isprintable() for note in plan.notes)
        rawjson.dump(to_data(plan.actions))


def fuzz_request(data: bytes) -> None:
    """The environment of a container, a variable a line, beside annotations and mounts of the same text."""
    lines = data.decode("utf-8", "surrogateescape").split("\n")[:200]
    pairs = [line.partition("=")[::2] for line in lines]
    config = {
        "process": {"env": lines, "capabilities": {"bounding": lines[:2]}},
        "annotations": dict(pairs),
        "mounts": [{"source": "/dev/null", "destination": line} for line in lines[:20]],
    }
    for one in SETTINGS:
        _request(config, one)
        _request({"process": config["process"]}, one)


def fuzz_requirement(data: bytes) -> None:
    """A NVIDIA_REQUIRE_* expression, against a host with GPUs, without, and without NVML."""
    text = data.decode("utf-8", "surrogateescape")
    for facts in (HOST, HOST._replace(cuda_version="", driver_version="")):
        for some in (HOST.gpus, ()):
            attempt(require.check_requirements, (("NVIDIA_REQUIRE_CUDA", text),), facts, some)


def fuzz_state(data: bytes) -> None:
    """The OCI state on a hook's standard input."""
    for wants_pid in (True, False):
        found = attempt(state.parse_state, data, wants_pid)
        if found is not None:
            assert os.fsencode(found.bundle).startswith(b"/")
            os.fsencode(found.root)


def fuzz_arguments(data: bytes) -> None:
    """Command lines of the shim and of the hook."""
    words = _words(data)
    found = attempt(parse_arguments, words)
    assert found is None or found.subcommand in ("", *words)
    split = attempt(split_options, words)
    if split is not None:
        attempt(check_command, split[1])


def fuzz_hook_words(data: bytes) -> None:
    """Words of a CDI hook; what can be written again means the same."""
    call = attempt(hook_words.parse_hook, _words(data))
    if call is not None:
        words = attempt(hook_words.render_hook, call.commands)
        if words is not None:
            assert hook_words.parse_hook(words).commands == call.commands


# -- what operators write ----------------------------------------------------------------------------------------


def fuzz_settings(data: bytes) -> None:
    """The settings file; with what it says, a request is read."""
    with as_file(data) as path:
        found = attempt(read_settings, path)
    if found is not None:
        repr(found).encode("utf-8")
        find_words(found)
        _request(rawjson.parse(SAMPLE.decode()), found)


def fuzz_cdi_json(data: bytes) -> None:
    """A CDI specification in JSON."""
    value = attempt(parse_json, data, "read x.json", "OCIGPU-CDI-2")
    if value is not None:
        _check_cdi(value)


def fuzz_cdi_yaml(data: bytes) -> None:
    """A CDI specification in YAML, as the child reads it."""
    answer = json.loads(yaml_child._dump(yaml_child._answer(yaml, data)))
    assert answer.keys() in ({"data"}, {"data", "more"}, {"error"})
    if "error" in answer:
        assert "\n" not in answer["error"]
        assert len(answer["error"]) <= MAX_LINE
    else:
        _check_cdi(answer["data"])


def _check_cdi(value: Any) -> None:
    checked = check.check_spec(value)
    assert len(checked.problems) <= 100
    assert all(len(problem.text) <= MAX_LINE and problem.text.isprintable() for problem in checked.problems)
    if checked.errors:
        return
    again = check.check_spec(checked.spec)
    assert (again.spec, again.errors) == (checked.spec, ())
    assert rawjson.parse(dump_json(checked.spec)) == checked.spec
    if len(str(checked.spec)) < 2000:
        assert yaml_child.build(yaml, dump_yaml(checked.spec).encode()) == checked.spec
    edits = [checked.spec.get("containerEdits", {})]
    edits += [device.get("containerEdits", {}) for device in checked.spec["devices"][:4]]
    config: dict[str, Any]
    for config in ({}, rawjson.parse(SAMPLE.decode())):
        if attempt(inject, config, edits, True, _device) is not None:
            once = rawjson.dump(config)
            inject(config, edits, True, _device)
            assert rawjson.dump(config) == once, "injecting twice is not injecting once"
    for item in edits:
        for hook in item.get("hooks", ()):
            attempt(hook_words.parse_hook, hook.get("args", [])[1:])


def _device(path: str) -> os.stat_result:
    """Answer for lstat: every path is a character device."""
    os.fsencode(path)
    return os.stat_result((stat.S_IFCHR | 0o666, 0, 0, 1, 0, 0, 0, 0, 0, 0), {"st_rdev": os.makedev(195, 0)})


# -- what images hold --------------------------------------------------------------------------------------------


def fuzz_ld_cache(data: bytes) -> None:
    """An image's ld.so.cache: entries added, found again by our reader, and the same after a second time."""
    for machine in ("x86_64", "aarch64"):
        entries = LIBRARIES if machine == "x86_64" else LIBRARIES[:3]
        merged = ldcache.merge_ld_cache(data, entries, machine)
        if merged is None:
            continue
        assert len(merged) <= ldcache.MAX_CACHE
        found, problem = parse_ldcache(merged, (b"lib",), (0x0300, 0x0A00, 0))
        assert not problem
        assert {entry[:2] for entry in entries} <= set(found)
        other = ldcache.merge_ld_cache(data, entries[1:3], machine)
        if other is not None:
            assert ldcache.merge_ld_cache(other, entries, machine) == merged


def fuzz_loader(data: bytes) -> None:
    """An image's loader configuration: files of /etc/ld.so.conf and our two, or musl's, parted by NUL lines."""
    root = directory()
    os.makedirs(f"{root}/etc/ld.so.conf.d")
    os.mkdir(f"{root}/lib")
    first, _, rest = data.partition(b"\0\n")
    second, _, third = rest.partition(b"\0\n")
    names = (image_cache.LD_SO_CONF, loader.OWN_CONF, "/etc/ld.so.conf.d/a.conf")
    if data[:1] == b"/":
        names = ("/etc/ld-musl-x86_64.path", loader.COMPAT_CONF, image_cache.LD_SO_CONF)
        Path(f"{root}/lib/ld-musl-x86_64.so.1").touch()
    for name, content in zip(names, (first, second, third), strict=True):
        Path(root + name).write_bytes(content)
    cache = f"{root}/etc/ld.so.cache"
    Path(cache).write_bytes(NEW_MAGIC + bytes(28))
    os.utime(cache, (1 << 32, 1 << 32))  # newer than all else, so that all else is read
    root_fd = os.open(root, os.O_PATH | os.O_DIRECTORY)
    try:
        facts = loader.read_loader_facts(root_fd)
        stale = image_cache.why_not_current(root_fd, "x86_64-linux-gnu", ("/data", "/opt/x"))
    finally:
        os.close(root_fd)
    assert len(facts.searched) <= loader.MAX_DIRECTORIES + 6
    assert len(stale) < 600
    assert stale.isprintable()
    for path in (*facts.searched, *facts.own_directories, *facts.compat_directories):
        assert path.startswith("/")
        assert b"\0" not in os.fsencode(path)


def fuzz_elf(data: bytes) -> None:
    """An ELF file: header, SONAME, sections, and the note of CUDA's compatibility libraries."""
    with as_file(data) as path:
        found = elf.read_elf(path)
        fd = os.open(path, os.O_RDONLY)
        try:
            section = elf.read_section(fd, compat.NOTE, compat.MAX_NOTE)
        except OSError:  # an offset that no file has
            section = None
        finally:
            os.close(fd)
    if found is not None:
        assert found.bits in (64, 32)
        assert len(found.soname) <= elf.MAX_SONAME
    if section is not None:
        assert len(section) <= compat.MAX_NOTE
        fuzz_note(section)


def fuzz_note(data: bytes) -> None:
    """The content of such a note."""
    note = compat.parse_note(data[: compat.MAX_NOTE])
    if note is not None:
        assert len(note.drivers) <= 1024
        library = compat.CompatLibrary("/usr/local/cuda/compat", (575, 57, 8), note)
        compat.suits_driver(library, "550.163.01", "12.4")
        compat.suits_driver(library, "", "12.4")


# -- what the host says ------------------------------------------------------------------------------------------


def fuzz_host_ld_cache(data: bytes) -> None:
    """The host's or a driver container's ld.so.cache."""
    found, problem = parse_ldcache(data, (b"libcuda", b"libnvidia"), (0x0300, 0))
    assert len(problem) <= MAX_LINE
    assert all(path.startswith("/") and "\0" not in name + path for name, path in found)
    assert sum(len(path) for _, path in found) <= 64 << 20


def fuzz_proc(data: bytes) -> None:
    """Texts of /proc/driver/nvidia, /proc/devices, KFD's topology, Tegra's lists, and fingerprints."""
    text = _text(data)
    assert all(0 < major < 1 << 20 for _, major in procfs.parse_devices(text))
    version = procfs.parse_driver_version(text)
    assert not version or procfs.is_version(version)
    procfs.parse_fields(text)
    assert procfs.parse_permissions(text).mode <= 0o777
    assert all(0 <= minor < 1 << 20 for minor in procfs.parse_mig_minors(text).values())
    assert procfs.parse_capability(text)[1] <= 0o777
    gpu = procfs.parse_information(text, text[:40])
    if gpu is not None:
        assert tree.normal_bus_id(gpu.bus_id) == gpu.bus_id
        rawjson.dump(facts_to_json(HOST._replace(gpus=gpus.gpus_from_procfs((gpu,)))))
    amd.find_node(amd.parse_numbers(text))
    entries, _ = tegra.parse_csv(text)
    for entry in entries[:50]:
        tegra.matches_path(entry.path[:100], text[:100])
    pairs = fingerprint.parse_fingerprint(text)
    assert not pairs or fingerprint.parse_fingerprint(fingerprint.fingerprint_text(pairs)) == pairs


def fuzz_sys(data: bytes) -> None:
    """Files of a PCI function and its DRM nodes in sysfs, a line each."""
    lines = [*data.split(b"\n"), b"", b"", b"", b"", b""]
    root = directory()
    function = f"{root}/bus/pci/devices/0000:3b:00.0"
    os.makedirs(f"{function}/drm/card0")
    os.makedirs(f"{function}/drm/renderD128")
    names = ("vendor", "class", "device", "drm/card0/dev", "drm/renderD128/dev")
    for name, content in zip(names, lines, strict=False):
        Path(f"{function}/{name}").write_bytes(content)
    assert len(pci.read_gpus(root)) in (0, 1)
    assert all(major > 0 and minor >= 0 for _, major, minor in pci.read_drm_numbers(root, "00000000:3b:00.0"))
    for found in pci.read_functions(root, pci.NVIDIA_VENDOR):
        assert len(found.text) < 60


def fuzz_mounts(data: bytes) -> None:
    """Texts of /proc/<pid>/mountinfo and cgroup, and of a device cgroup's devices.list."""
    text = data.decode("utf-8", "surrogateescape")
    try:
        proc.parse_mounts(text)
    except OSError:
        proc.parse_mounts(text, strict=False)
    with suppress(OSError):
        proc.parse_stat(text)
    for mount in cgroups.parse_cgroup_mounts(text):
        assert mount.version in (1, 2)
        os.fsencode(mount.mountpoint)
    proc.parse_cgroup(text)
    device_filter.Policy(cgroups.parse_devices_list(text)).allowed("c", 195, 0)


def fuzz_nvml(data: bytes) -> None:
    """The answer of the child that asks NVML; with it, facts are made and kept."""
    try:
        answer = nvml.parse_answer(rawjson.parse(data.decode()))
    except UNUSABLE:
        return
    in_procfs = (procfs.ProcGpu("0000:3b:00.0", "00000000:3b:00.0", 0, "GPU-1", "H100"),)
    merged = gpus.merge_gpus(answer.gpus, in_procfs)
    facts = HOST._replace(gpus=merged, cuda_version=answer.cuda_version, notes=answer.notes)
    assert facts_from_json(rawjson.parse(rawjson.dump(facts_to_json(facts)))) == facts
    assert all(len(text) <= MAX_LINE and text.isprintable() for text in (*answer.notes, answer.problem))
    attempt(
        make_plan, facts, parse_request({"process": {"env": ["NVIDIA_VISIBLE_DEVICES=all"]}}, SETTINGS[0]), SETTINGS[0]
    )


def fuzz_kept(data: bytes) -> None:
    """Files of the cache that are whole, but of other content than this version writes; and any other files."""
    cache.unseal(data)
    path = directory()
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        name = cached._name(SETTINGS[0])
        cache.write_cached(fd, name, cache.seal(data))
        prove, cached._prove = cached._prove, lambda *words: words[2]
        try:
            facts = cached._load(cached._find(fd, SETTINGS[0]))
        finally:
            cached._prove = prove
        assert facts is None or isinstance(facts.gpus, tuple)
        answer = cached._read_answer(fd, name, "question", "stamp")
        assert answer is None or isinstance(answer, dict)
    finally:
        os.close(fd)


class Target(NamedTuple):
    """A function, the length in bytes of what it is given, and words that its input is made of."""

    function: Callable[[bytes], None]
    max_len: int
    words: tuple[str, ...] = ()


_JSON = ("{", "}", "[", "]", '":', '","', "null", "true", "1e999", "\\ud800", "\\u0000")
_CONFIG = (
    '"process"', '"env"', '"capabilities"', '"bounding"', '"linux"', '"resources"', '"devices"', '"hooks"',
    '"prestart"', '"root"', '"path"', '"mounts"', '"destination"', '"source"', '"namespaces"', '"type"', '"mount"',
    '"annotations"', "ocigpu/declared", "maskedPaths", "readonlyPaths", "/proc/driver/nvidia", "cdi.k8s.io/p_",
)  # fmt: skip
_VARIABLES = (
    "NVIDIA_VISIBLE_DEVICES=", "NVIDIA_DRIVER_CAPABILITIES=", "NVIDIA_REQUIRE_CUDA=", "NVIDIA_DISABLE_REQUIRE=",
    "NVIDIA_MIG_CONFIG_DEVICES=all", "NVIDIA_MIG_MONITOR_DEVICES=all", "NVIDIA_IMEX_CHANNELS=", "CUDA_VERSION=",
    "NVIDIA_GDS=enabled", "DOCKER_RESOURCE_GPU=", "CAP_SYS_ADMIN", "all", "none", "void", "GPU-", "MIG-GPU-",
    "nvidia.com/gpu=", "runtime.nvidia.com/gpu=", "/var/run/nvidia-container-devices/", "cdi/", "imex/",
    "cdi.k8s.io/p_", "compute,utility", "0:1",
)  # fmt: skip
_CDI = (
    "cdiVersion", "kind", "devices", "name", "containerEdits", "env", "deviceNodes", "path", "hostPath", "mounts",
    "containerPath", "options", "hooks", "hookName", "createContainer", "args", "annotations", "intelRdt",
    "additionalGids", "netDevices", "permissions", "fileMode", "nvidia.com/gpu", "1.1.0",
)  # fmt: skip
_CACHE = ("glibc-ld.so.cache1.1", "ld.so-1.7.0", "ocigpu-ld.so.cache", "libcuda.so.1", "libnvidia-ml.so.1")

_OPTIONS = (
    "--bundle", "-b", "--log-format", "json", "create", "run", "--root", "--config=", "prestart", "--early", "-db",
)  # fmt: skip
_HOOKS = (*hook_words.OPTIONS, *(f"--{name}" for names in hook_words.OPTIONS.values() for name in names), "+", "::")
_YAML = (*_CDI, "- ", ": ", "&a", "*a", "<<", "!!int", "0o666", ".inf", "---")
_PROC = (
    "Character devices:", "nvidia-caps", "NVRM version:", "Kernel Module", "DeviceFileMode: ", "Model: ",
    "Bus Location: ", "Device Minor: ", "GPU UUID: ", "GPU Excluded: ", "gpu0/gi1/access ", "simd_count ",
    "drm_render_minor ", "lib,/usr/", "source=nvidia ",
)  # fmt: skip
_MOUNTS = (" - cgroup2 cgroup2 rw", " - cgroup cgroup rw,devices", "shared:", "\\040", "0::/", "c 195:* rwm")
_NVML = (
    *_JSON, '"init"', '"load"', '"text"', '"driver"', '"cuda"', '"gpus"', '"index"', '"minor"', '"uuid"', '"bus_id"',
    '"name"', '"brand"', '"mig"', '"migs"', '"arch"', '"gi"', '"ci"', '"profile"', '"notes"', '"error"', '"addressing"',
)  # fmt: skip

TARGETS: dict[str, Target] = {
    "config": Target(fuzz_config, 16384, (*_JSON, *_CONFIG, *_VARIABLES)),
    "state": Target(fuzz_state, 4096, (*_JSON, '"pid"', '"bundle"', '"bundlePath"', '"root"')),
    "request": Target(fuzz_request, 4096, _VARIABLES),
    "requirement": Target(fuzz_requirement, 4096, ("cuda", "driver", "arch", "brand", ">=", "!=", "tesla", "535.1")),
    "arguments": Target(fuzz_arguments, 1024, _OPTIONS),
    "hook-words": Target(fuzz_hook_words, 2048, _HOOKS),
    "settings": Target(fuzz_settings, 4096, (*(key.name for key in settings.KEYS), "= true", '= "', "= [", "0x", "[")),
    "cdi-json": Target(fuzz_cdi_json, 16384, (*_JSON, *(f'"{word}"' for word in _CDI))),
    "cdi-yaml": Target(fuzz_cdi_yaml, 8192, _YAML),
    "ld-cache": Target(fuzz_ld_cache, 65536, _CACHE),
    "host-ld-cache": Target(fuzz_host_ld_cache, 65536, _CACHE),
    "loader": Target(fuzz_loader, 8192, ("include", "/etc/ld.so.conf.d/*.conf", "#", "/usr/lib")),
    "elf": Target(fuzz_elf, 65536, ("\x7fELF", ".shstrtab", compat.NOTE, "NVIDIA Corporation")),
    "note": Target(fuzz_note, 4096, ("NVIDIA Corporation", '"CUDA version"', '"driver"', *_JSON)),
    "proc": Target(fuzz_proc, 4096, _PROC),
    "sys": Target(fuzz_sys, 512, ("0x10de", "0x030200", "226:128")),
    "mounts": Target(fuzz_mounts, 8192, _MOUNTS),
    "nvml": Target(fuzz_nvml, 8192, _NVML),
    "kept": Target(fuzz_kept, 65536, (*_JSON, "question", "stamp", "gpus", "notes")),
}


def run(name: str, data: bytes) -> None:
    """Give these bytes to a target; raises what is a finding."""
    attempt(TARGETS[name].function, data)
