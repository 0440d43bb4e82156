"""Mode ``spec`` in a config.json: when it is enough, what is put there, and that all of it can be taken back."""

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.asking import request_from_variables, request_on
from support.jsondiff import render_exactly
from support.process import processor_seconds

from ocigpu.bundle.declared import Declared, edit_declared, why_hook
from ocigpu.bundle.edit import OWN_OPTIONS, SIMULATED_PROC, edit_config, entry_digest, rule_entries, take_back
from ocigpu.bundle.from_plan import declare
from ocigpu.core import rawjson
from ocigpu.core.config_json import DECLARED, get_object
from ocigpu.core.errors import SpecError
from ocigpu.core.facts import HostFacts, ImageFacts, facts_from_json
from ocigpu.core.settings import Settings
from ocigpu.gpus.vendors import make_plan

BUNDLES = Path(__file__).parent / "bundles"
HOSTS = sorted(path.stem for path in (BUNDLES / "hosts").glob("*.json"))
NOTHING_MOUNTED = ("no-nvml", "broken-gpu", "mi300x-4", "mi300x-partitioned")
DEBIAN = ImageFacts("/usr/lib/x86_64-linux-gnu", "/usr/lib/i386-linux-gnu", "glibc")
CUDA = "/usr/lib/x86_64-linux-gnu/libcuda.so.1"
DENY = {"allow": False, "access": "rwm"}
ALLOW = {"allow": True, "access": "rwm"}
GPU_1 = {"allow": True, "type": "c", "major": 195, "minor": 1, "access": "rwm"}

Config = dict[str, Any]
Edit = Callable[[Config], None]


def read_host(name: str) -> HostFacts:
    return facts_from_json(json.loads((BUNDLES / "hosts" / f"{name}.json").read_text()))


def declared_for(
    devices: str, capabilities: str = "compute,utility", host: str = "a100-8", image: ImageFacts = DEBIAN, **more: str
) -> Declared:
    facts = read_host(host)
    request = request_on(facts, devices, capabilities, Settings(), **more)
    return declare(make_plan(facts, request, Settings(), image, "spec"), facts)


def read_bundle(name: str) -> Config:
    config: Config = json.loads((BUNDLES / name / "config.json").read_text())
    return config


LINKS = {"/lib": "/usr/lib", "/var/run": "/run", "/loop": "/data/inside"}


def resolve(path: str) -> str:
    """Stand for an image in which everything is there, with some links."""
    for link, target in LINKS.items():
        if path == link or path.startswith(f"{link}/"):
            return target + path.removeprefix(link)
    return path


def reason(declared: Declared, config: Config, declare_rules: bool = True, bind_nodes: bool = False) -> str:
    return why_hook(declared, config, resolve, declare_rules, bind_nodes)


def mounting(*mounts: tuple[str, str, list[str]], base: str = "docker-0-2") -> Config:
    config = read_bundle(base)
    config["mounts"] += [
        {"destination": path, "type": kind, "source": "/data", "options": options} for path, kind, options in mounts
    ]
    return config


def volume(path: str, base: str = "docker-0-2") -> Config:
    return mounting((path, "bind", ["rbind", "rprivate"]), base=base)


# --- when config.json is enough


@pytest.mark.parametrize(
    "name",
    [
        "docker-0-2", "docker-gpus-all", "docker-read-only", "docker-volume-mounts", "cri-container", "containerd-ctr",
        "podman", "runc-spec", "crun-spec",
    ],
)  # fmt: skip
@pytest.mark.parametrize("devices", ["0", "all", "none"])
@pytest.mark.parametrize(("host", "capabilities"), [("a100-8", "compute,utility"), ("l4-2-drm", "all")])
def test_containers_of_engines_need_no_hook(name: str, devices: str, host: str, capabilities: str) -> None:
    assert reason(declared_for(devices, capabilities, host), read_bundle(name)) == ""


NO_HOOK = {
    "volume elsewhere": volume("/data"),
    "volume beside the libraries": volume("/usr/lib/x86_64-linux-gnu2"),
    "volume below the libraries": volume("/usr/lib/x86_64-linux-gnu/mine"),
    "volume in /usr/local": volume("/usr/local"),
    "file in /etc": volume("/etc/hosts"),
    "directory whose name begins with a file's": volume("/etc/ld.so.cache.d"),
    "tmpfs on /run, where sockets go": mounting(("/run", "tmpfs", ["nosuid"])),
    "tmpfs on /var/run, a link to it": mounting(("/var/run", "tmpfs", ["nosuid"])),
    "tmpfs on /usr/bin, where programs go": mounting(("/usr/bin", "tmpfs", [])),
    "tmpfs on /tmp": mounting(("/tmp", "tmpfs", [])),
    "bind of a part of /dev": volume("/dev/shm"),
    "bind on /proc": volume("/proc"),
    "bind below /sys": volume("/sys/fs/cgroup"),
    "two slashes at the beginning": volume("//proc"),
    "a volume where a file of ours goes": volume("/usr/bin/nvidia-smi"),
    "no mounts": {**read_bundle("docker-0-2"), "mounts": None},
    "mounts that are none": {**read_bundle("docker-0-2"), "mounts": [7, {"destination": 7}, {}]},
}


@pytest.mark.parametrize("config", NO_HOOK.values(), ids=NO_HOOK)
def test_mounts_that_cover_nothing_of_ours_need_no_hook(config: Config) -> None:
    assert reason(declared_for("0"), config) == ""


NEEDS_HOOK = {
    "volume over the libraries": (volume("/usr/lib/x86_64-linux-gnu"), "/usr/lib/x86_64-linux-gnu"),
    "volume over /usr/lib": (volume("/usr/lib"), "/usr/lib"),
    "volume over /usr": (volume("/usr"), "/usr"),
    "volume over /lib, a link": (volume("/lib/x86_64-linux-gnu"), "/usr/lib/x86_64-linux-gnu"),
    "volume over everything": (volume("/"), "/"),
    "volume with slashes and dots": (volume("//usr/./lib/../lib//"), "/usr/lib"),
    "volume without a slash": (volume("usr/lib"), "/usr/lib"),
    "volume over /etc": (volume("/etc"), "/etc/ld.so.cache"),
    "the loader's cache is a volume": (volume("/etc/ld.so.cache"), "/etc/ld.so.cache"),
    "the name of a library is a volume": (volume(CUDA), CUDA),
    "volume over programs": (volume("/usr/bin"), "/usr/bin"),
    "volume over /run": (volume("/run"), "/run"),
    "volume over /var/run, a link": (volume("/var/run"), "/run"),
    "tmpfs over the libraries": (mounting(("/usr/lib/x86_64-linux-gnu", "tmpfs", [])), "/usr/lib"),
    "tmpfs over /etc": (mounting(("/etc", "tmpfs", [])), "/etc/ld.so.cache"),
    "an overlay over /usr": (mounting(("/usr", "overlay", ["lowerdir=/a"])), "/usr"),
    "the host's /dev": (volume("/dev"), "/dev/"),
    "the host's /dev, by options": (mounting(("/dev", "none", ["bind"])), "/dev/"),
    "the host's /dev, recursively": (mounting(("/dev", "", ["rbind"])), "/dev/"),
}  # fmt: skip


@pytest.mark.parametrize(("config", "named"), NEEDS_HOOK.values(), ids=NEEDS_HOOK)
def test_mounts_over_what_is_ours_need_the_hook(config: Config, named: str) -> None:
    found = reason(declared_for("0"), config)
    assert found.startswith("/")
    assert " is in or below what is mounted on " in found
    assert named in found


def test_a_directory_whose_name_begins_like_proc_is_a_volume_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    for path in ("/process", "/system", "/developer"):
        monkeypatch.setitem(LINKS, "/usr/lib", f"{path}/lib")
        assert path in reason(declared_for("0"), volume(path))


def with_rules(rules: Any, capability: bool = True) -> Config:
    config = read_bundle("docker-privileged")
    config["linux"]["resources"]["devices"] = rules
    if not capability:
        for names in config["process"]["capabilities"].values():
            names.remove("CAP_MKNOD")
    return config


RULES = {
    "all are denied": ([DENY], False),
    "all are allowed": ([ALLOW], True),
    "all are allowed, with a type": ([{**ALLOW, "type": "a"}], True),
    "all of an empty type": ([{**ALLOW, "type": ""}], True),
    "all with numbers: to runc the numbers of a rule for all mean nothing": ([DENY, {**ALLOW, "major": 1}], True),
    "all character devices": ([DENY, {**ALLOW, "type": "c"}], True),
    "all block devices": ([DENY, {**ALLOW, "type": "b"}], False),
    "the driver's major": ([DENY, {**ALLOW, "type": "c", "major": 195}], True),
    "the driver's major and any minor": ([DENY, {**ALLOW, "type": "c", "major": 195, "minor": -1}], True),
    "any major": ([DENY, {**ALLOW, "type": "c", "major": None, "minor": 1}], True),
    "one that is not granted": ([DENY, GPU_1], True),
    "the one that is granted": ([DENY, {**GPU_1, "minor": 0}], False),
    "another driver": ([DENY, {**GPU_1, "major": 226}], False),
    "a block device of that number": ([DENY, {**GPU_1, "type": "b"}], False),
    "making nodes only": ([DENY, {**GPU_1, "access": "m"}], False),
    "reading": ([DENY, {**GPU_1, "access": "r"}], True),
    "no letters: everything, to some": ([DENY, {**GPU_1, "access": ""}], True),
    "no access: everything, to some": ([DENY, {"allow": True, "type": "c", "major": 195}], True),
    "denied later": ([DENY, GPU_1, {**GPU_1, "allow": False}], False),
    "denied later to read only": ([DENY, GPU_1, {**GPU_1, "allow": False, "access": "r"}], True),
    "denied later in two rules": (
        [DENY, GPU_1, {**GPU_1, "allow": False, "access": "r"}, {**GPU_1, "allow": False, "access": "w"}],
        False,
    ),
    "denied before": ([DENY, {**GPU_1, "allow": False}, GPU_1], True),
    "all allowed, ours denied": ([ALLOW, {"allow": False, "type": "c", "major": 195, "access": "rwm"}], False),
    "a denial for all that has a number is not sure to mean it": ([DENY, GPU_1, {**DENY, "major": 1}], True),
    "no rule": ([], True),
    "not rules": ([7, None], False),
}  # fmt: skip


@pytest.mark.parametrize(("rules", "needed"), RULES.values(), ids=RULES)
def test_who_may_make_and_open_nodes_of_other_gpus_needs_the_hook(rules: list[Any], needed: bool) -> None:
    one = declared_for("0")
    assert bool(reason(one, with_rules(rules))) == needed
    if rules:
        assert reason(declared_for("all"), with_rules(rules)) == "", "nothing is denied"
        assert reason(one, with_rules(rules, capability=False)) == "", "no nodes can be made"
        assert reason(one, with_rules(rules), bind_nodes=True) == "", "in user namespaces nobody can make nodes"


@pytest.mark.parametrize("kind", ["bounding", "effective", "permitted"])
@pytest.mark.parametrize("name", ["CAP_MKNOD", "cap_mknod"])
def test_a_capability_counts_in_each_set_that_it_can_be_used_from(kind: str, name: str) -> None:
    config = with_rules([ALLOW], capability=False)
    assert reason(declared_for("0"), config) == ""
    config["process"]["capabilities"] = {kind: ["CAP_KILL", 7, name]}
    assert "nodes of GPUs that are not granted" in reason(declared_for("0"), config)


def test_a_config_without_device_rules_needs_the_hook_where_rules_would_be_declared() -> None:
    for config in (with_rules([]), with_rules(None), read_bundle("odd-no-linux"), read_bundle("podman-user-namespace")):
        assert "no device rules" in reason(declared_for("all"), config)
        assert reason(declared_for("all"), config, declare_rules=False, bind_nodes=True) == ""


@pytest.mark.parametrize(("capabilities", "needed"), [("all", True), ("graphics", True), ("compute,utility", False)])
def test_files_for_graphics_need_the_hook_in_a_user_namespace_only(capabilities: str, needed: bool) -> None:
    declared = declared_for("all", capabilities, "l4-2-drm")
    config = with_rules([DENY])
    config["linux"]["namespaces"].append({"type": "user"})
    assert ("user namespace" in reason(declared, config, bind_nodes=True)) == needed
    assert reason(declared, with_rules([DENY])) == ""


def test_a_node_that_the_host_lacks_needs_the_hook_where_nodes_are_mounted() -> None:
    facts = read_host("a100-8")
    gpus = [gpu._replace(node=gpu.node and gpu.node._replace(host_path="")) for gpu in facts.gpus]
    facts = facts._replace(gpus=tuple(gpus))
    request = request_from_variables({"NVIDIA_VISIBLE_DEVICES": "0"}, Settings())
    declared = declare(make_plan(facts, request, Settings(), DEBIAN, "spec"), facts)
    assert [path for path, host_path, *_ in declared.nodes if not host_path] == ["/dev/nvidia0"]
    assert reason(declared, read_bundle("docker-0-2")) == ""
    assert "/dev/nvidia0" in reason(declared, read_bundle("docker-0-2"), bind_nodes=True)


@pytest.mark.parametrize(("compat", "needed"), [("/usr/local/cuda/compat", True), ("", False)])
def test_compatibility_libraries_need_the_hook(compat: str, needed: bool) -> None:
    image = DEBIAN._replace(compat_dir=compat, compat_major=999)
    assert ("compatibility" in reason(declared_for("0", image=image), read_bundle("docker-0-2"))) == needed


@pytest.mark.parametrize("host", [name for name in HOSTS if name not in NOTHING_MOUNTED])
def test_every_mount_of_ours_has_options_by_which_it_is_known(host: str) -> None:
    declared = declared_for("all", "all", host)
    assert [mount for mount in declared.mounts if mount["options"] not in OWN_OPTIONS] == []
    config = edited(read_bundle("docker-0-2"), declared, bind_nodes=True)
    ours = config["mounts"][len(read_bundle("docker-0-2")["mounts"]) :]
    assert ours
    assert [mount for mount in ours if mount["options"] not in OWN_OPTIONS] == []


# --- what is put there, and taken back


def edited(config: Config, declared: Declared, declare_rules: bool = True, bind_nodes: bool = False) -> Config:
    """Return a config.json after a start in mode spec: as the shim does it, on a copy."""
    result = copy.deepcopy(config)
    if DECLARED in get_object(result, "annotations"):
        take_back(result)
    views = [f"/run/ocigpu/view-{number}" for number, _ in enumerate(declared.views)]
    edit_declared(result, declared, "/bundle/rootfs", views, declare_rules, bind_nodes)
    return result


def without_annotation(config: Config) -> Config:
    result = copy.deepcopy(config)
    result["annotations"].pop(DECLARED)
    return result


GPUS = ("a100-8", "0"), ("a100-8", "all"), ("l4-2-drm", "1"), ("h100-8-mig", "all"), ("a100-8", "none")
NAMES = ["docker-0-2", "docker-privileged", "cri-container", "podman", "containerd-ctr", "odd-unknown-fields"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("host", "devices"), GPUS)
@pytest.mark.parametrize("options", [{}, {"bind_nodes": True}, {"declare_rules": False}], ids=str)
def test_declaring_twice_equals_declaring_once(name: str, host: str, devices: str, options: dict[str, bool]) -> None:
    declared = declared_for(devices, "all", host)
    once = edited(read_bundle(name), declared, **options)
    assert render_exactly(edited(once, declared, **options)) == render_exactly(once)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("host", "devices"), GPUS)
def test_what_is_kept_declares_the_same(name: str, host: str, devices: str) -> None:
    declared = declared_for(devices, "all", host)
    kept = Declared(**rawjson.parse(rawjson.dump(declared._asdict())))
    assert render_exactly(edited(read_bundle(name), kept)) == render_exactly(edited(read_bundle(name), declared))
    assert reason(kept, read_bundle(name)) == reason(declared, read_bundle(name))


@pytest.mark.parametrize("name", NAMES)
def test_a_narrower_request_takes_back_everything_wider(name: str) -> None:
    config = read_bundle(name)
    wide, narrow = declared_for("all", "all", "l4-2-drm"), declared_for("0", "utility", "l4-2-drm")
    after = edited(edited(config, wide), narrow)
    assert render_exactly(after) == render_exactly(edited(config, narrow))
    text = json.dumps(without_annotation(after))
    assert '"/dev/nvidia1"' not in text
    assert "libGLX_nvidia" not in text


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("options", [{}, {"bind_nodes": True}], ids=str)
def test_taking_back_leaves_what_the_engine_had_put_there(name: str, options: dict[str, bool]) -> None:
    config = read_bundle(name)
    after = edited(config, declared_for("all", "all", "l4-2-drm"), **options)
    assert after != config
    take_back(after)
    for section in ("mounts", "process", "root"):
        assert after[section] == config[section], section
    assert (after.get("hooks") or {}).get("prestart", []) == (config.get("hooks") or {}).get("prestart", [])
    linux = config.get("linux", {})
    for part in ("devices", "maskedPaths", "readonlyPaths", "namespaces", "seccomp"):
        assert (after["linux"].get(part) or []) == (linux.get(part) or []), part
    assert after["linux"]["resources"] == linux["resources"]
    assert (after.get("annotations") or {}) == (config.get("annotations") or {})


def test_entries_of_the_user_that_are_like_ours_stay() -> None:
    declared = declared_for("0,1")
    config = read_bundle("docker-0-2")
    smi = next(mount for mount in declared.mounts if mount["destination"] == "/usr/bin/nvidia-smi")
    own = [
        {**smi, "options": ["rbind", "ro", "rprivate"]},
        {**smi, "source": "/opt/nvidia-smi"},
        copy.deepcopy(smi),
    ]
    config["mounts"] += own
    config["linux"]["maskedPaths"].append("/proc/driver/nvidia/gpus/0000:02:00.0")
    config["linux"]["readonlyPaths"].insert(0, "/proc/driver/nvidia")
    config["linux"]["devices"] = [{"path": "/dev/fuse", "type": "c", "major": 10, "minor": 229}]
    once = edited(config, declared)
    assert render_exactly(edited(once, declared)) == render_exactly(once)
    after = copy.deepcopy(once)
    take_back(after)
    assert after["mounts"] == config["mounts"]
    for part in ("devices", "maskedPaths", "readonlyPaths"):
        assert after["linux"][part] == config["linux"][part], part


@pytest.mark.parametrize(("host", "devices", "most"), [("a100-8", "all", 1024), ("h200-64", "all", 2048)])
def test_the_annotation_is_short(host: str, devices: str, most: int) -> None:
    """Every hook of the container gets it on standard input, with the state."""
    config = edited(read_bundle("docker-0-2"), declared_for(devices, "all", host))
    assert len(json.dumps(config["annotations"][DECLARED])) < most


def annotation(listed: Any) -> str:
    """Return the annotation of an edit that put these there: lists of keys by kind."""
    keys = [(kind, key) for kind, keys in listed.items() if isinstance(keys, list) for key in keys]
    return " ".join(entry_digest(kind, key if isinstance(key, list) else [key]) for kind, key in keys)


def test_digests_of_what_the_engine_has_put_there_take_nothing_away() -> None:
    config = read_bundle("docker-0-2")
    before = copy.deepcopy(config)
    keys = [
        *(("mounts", (entry["destination"], entry["source"])) for entry in config["mounts"]),
        *(
            ("rules", (entry.get("major", 0), entry.get("minor", 0)))
            for entry in config["linux"]["resources"]["devices"]
        ),
        *((part, (path,)) for part in ("maskedPaths", "readonlyPaths") for path in config["linux"][part]),
    ]
    config["annotations"] = {DECLARED: " ".join(entry_digest(kind, key) for kind, key in keys)}
    take_back(config)
    assert config == {**before, "annotations": {}}


FORGED = {
    "paths that the engine hides": {"maskedPaths": ["/proc/kcore", "/proc/keys", "/sys/firmware"]},
    "paths that the engine protects": {"readonlyPaths": ["/proc/sys", "/proc/bus", "/proc/sysrq-trigger"]},
    "mounts of the engine": {"mounts": [["/etc/hosts", "SOURCE"], ["/proc", "proc"], ["/sys", "sysfs"]]},
    "rules that deny": {"rules": [[None, None], [10, 229], [195, 1]]},
    "rules of the engine": {"rules": [[1, 3], [1, 5], [5, 0]]},
    "not what it should be": {"maskedPaths": 7, "mounts": {"a": 1}, "rules": ["x", [], None], "devices": [[], None, 7]},
}


@pytest.mark.parametrize("forged", [*FORGED.values(), "", "[]", "0 " * 5000, "\0"], ids=range(10))
def test_an_annotation_that_is_not_ours_takes_nothing_away(forged: Any) -> None:
    """Users may ask an engine for annotations."""
    config = read_bundle("docker-0-2")
    source = next(mount["source"] for mount in config["mounts"] if mount["destination"] == "/etc/hosts")
    text = forged if isinstance(forged, str) else annotation(json.loads(json.dumps(forged).replace("SOURCE", source)))
    denial = {**GPU_1, "allow": False, "access": "rw"}
    config["linux"]["resources"]["devices"].append(denial)
    before = copy.deepcopy(config)
    config["annotations"] = {"mine": "1", DECLARED: text}
    take_back(config)
    assert config == {**before, "annotations": {"mine": "1"}}


def test_a_long_annotation_and_a_long_list_do_not_multiply() -> None:
    """Who writes the annotation need not be who writes the mounts."""
    entries = [
        {"destination": f"/{n}", "type": "bind", "source": f"/{n}", "options": OWN_OPTIONS[0]} for n in range(20_000)
    ]
    listed = [[f"/{n}", f"/{n}"] for n in range(10_000, 30_000)]
    config: Config = {"mounts": entries, "annotations": {DECLARED: annotation({"mounts": listed})}}
    with processor_seconds(30):
        take_back(config)
    assert [entry["destination"] for entry in config["mounts"]] == [f"/{n}" for n in range(10_000)]


def test_an_annotation_of_another_type_is_dropped() -> None:
    config = {**read_bundle("docker-0-2"), "annotations": {DECLARED: 7}}
    take_back(config)
    assert config["annotations"] == {}


def test_unknown_fields_and_the_order_stay() -> None:
    config = read_bundle("odd-unknown-fields")
    after = edited(config, declared_for("0")._replace(simulated_proc=""))
    assert [key for key in after if key in config] == list(config)
    assert [key for key in after["linux"] if key in config["linux"]] == list(config["linux"])
    known = ("mounts", "linux", "annotations")
    assert render_exactly({key: after[key] for key in config if key not in known}) == render_exactly(
        {key: config[key] for key in config if key not in known}
    )
    parts = ("devices", "maskedPaths", "readonlyPaths", "resources")
    assert all(after["linux"][key] == value for key, value in config["linux"].items() if key not in parts)
    assert after["mounts"][: len(config["mounts"])] == config["mounts"]


@pytest.mark.parametrize(
    "path",
    [
        ("linux",), ("mounts",), ("annotations",), ("hooks",), ("linux", "devices"), ("linux", "maskedPaths"),
        ("linux", "readonlyPaths"), ("linux", "resources"), ("linux", "resources", "devices"),
    ],
    ids=".".join,
)  # fmt: skip
@pytest.mark.parametrize("value", [7, "x", True])
def test_a_part_of_another_type_is_an_error(path: tuple[str, ...], value: Any) -> None:
    config = read_bundle("docker-0-2")
    parent = config
    for name in path[:-1]:
        parent = parent[name]
    parent[path[-1]] = value
    with pytest.raises(SpecError) as caught:
        edited(config, declared_for("0"))
    assert caught.value.code == "OCIGPU-SPEC-3"
    assert path[-1] in caught.value.message


@pytest.mark.parametrize("path", [("mounts",), ("annotations",), ("linux", "devices"), ("linux", "maskedPaths")])
def test_a_part_that_is_null_is_an_empty_one(path: tuple[str, ...]) -> None:
    config = read_bundle("docker-0-2")
    parent = config
    for name in path[:-1]:
        parent = parent[name]
    parent.pop(path[-1], None)
    missing = edited(config, declared_for("0"))
    parent[path[-1]] = None
    assert edited(config, declared_for("0")) == missing


def test_only_simulated_hosts_get_a_hook() -> None:
    declared = declared_for("0")._replace(simulated_proc="")
    assert "hooks" not in edited(read_bundle("cri-container"), declared)
    config = edited(read_bundle("cri-container"), declared._replace(simulated_proc="/sim/proc/driver"))
    (hook,) = config["hooks"]["prestart"]
    assert SIMULATED_PROC in hook["args"]
    assert os.path.isabs(hook["path"])
    take_back(config)
    assert config["hooks"]["prestart"] == []


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["/proc/kcore", "/dev/null", "/proc/driver/nvidia"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)


@pytest.mark.rest
@given(st.dictionaries(st.sampled_from(["devices", "rules", "mounts", "maskedPaths", "readonlyPaths"]), JSON), JSON)
def test_no_annotation_and_no_config_makes_taking_back_fail(listed: dict[str, Any], odd: Any) -> None:
    config = read_bundle("docker-0-2")
    config["annotations"] = {DECLARED: annotation(listed)}
    config["mounts"].append(odd)
    config["linux"]["resources"]["devices"].append(odd)
    config["linux"]["maskedPaths"].append(odd)
    config["hooks"] = {"prestart": [odd]}
    before = copy.deepcopy(config)
    take_back(config)
    assert config["linux"]["maskedPaths"][:-1] == before["linux"]["maskedPaths"][:-1]
    assert config["linux"]["readonlyPaths"] == before["linux"]["readonlyPaths"]
    assert config["mounts"] == before["mounts"]
    assert config["linux"]["resources"] == before["linux"]["resources"]


@pytest.mark.parametrize("name", sorted(path.parent.name for path in BUNDLES.glob("*/config.json")))
def test_any_bundle_is_declared_for_or_refused(name: str) -> None:
    config, declared = read_bundle(name), declared_for("0")
    assert isinstance(reason(declared, config), str)
    try:
        once = edited(config, declared)
    except SpecError:
        assert "wrong-type" in name
    else:
        assert render_exactly(edited(once, declared)) == render_exactly(once)


# --- hook mode and mode spec on one bundle


def hooked(config: Config, devices: str) -> Config:
    """Return a config.json after a start in mode hook: as the shim does it, on a copy."""
    result = copy.deepcopy(config)
    if DECLARED in get_object(result, "annotations"):
        take_back(result)
    request = request_from_variables({"NVIDIA_VISIBLE_DEVICES": devices}, Settings())
    plan = make_plan(read_host("a100-8"), request, Settings())
    edit_config(result, rule_entries(plan), "/usr/local/bin/ocigpu-hook", [])
    return result


def own_rules(config: Config) -> set[int]:
    rules = config["linux"]["resources"]["devices"]
    return {rule["minor"] for rule in rules if rule.get("major") == 195 and rule["allow"] and rule["minor"] < 255}


def test_hook_mode_after_mode_spec_leaves_nothing_of_it() -> None:
    config = read_bundle("cri-container")
    after = hooked(edited(config, declared_for("all")), "0")
    expected = hooked(config, "0")
    assert own_rules(after) == {0}
    assert after["mounts"] == expected["mounts"]
    assert after["hooks"] == expected["hooks"]
    assert after["linux"]["resources"] == expected["linux"]["resources"]
    assert not [name for name in ("devices", "maskedPaths", "readonlyPaths") if after["linux"].get(name)]
    assert DECLARED not in after["annotations"]
