"""A container gets the same by a generated CDI specification as by hook mode: nodes, rules, mounts, the hook's work.

The way of a specification from facts to a container, all of it pure: generated, written, read, checked, resolved,
injected into a configuration, and the words of its hook planned for that container; beside it the plan that hook mode
makes for the same devices and capabilities on the same facts.
"""

import json
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from support.drafts import draft_of

from ocigpu.bundle.inject import inject
from ocigpu.cdi.check import check_spec
from ocigpu.cdi.document import parse_document
from ocigpu.cdi.edits import HookOptions
from ocigpu.cdi.generate import assemble
from ocigpu.cdi.hook_words import parse_hook
from ocigpu.cdi.write import dump_json, dump_yaml
from ocigpu.core.actions import Bind, Link, Node, Plan, RefreshLdCache, Tmpfs
from ocigpu.core.facts import DeviceNode, Gpu, HostFacts, ImageFacts, facts_from_json
from ocigpu.core.settings import CAPABILITIES, Settings
from ocigpu.entry.cdi_hook_plan import DriverProc, HookFacts, plan_hooks
from ocigpu.gpus.nvidia.offers import offer_gpus
from ocigpu.gpus.nvidia.plan import make_plan
from ocigpu.gpus.nvidia.procfs import ProcGpu
from ocigpu.gpus.offer import NAME_STRATEGIES, GenerateOptions
from ocigpu.gpus.request import Request
from ocigpu.provision.image import ContainerNode
from ocigpu.provision.loader import LoaderFacts

RECORDED = Path(__file__).parents[1] / "bundles/hosts"
HOSTS = {
    name: facts_from_json(json.loads((RECORDED / f"{name}.json").read_text()))
    for name in ("a100-8", "broken-gpu", "h100-4-imex", "h100-8-mig", "h200-64", "l4-2-drm", "t4-1")
}
HOOK = HookOptions("/usr/bin/ocigpu-hook")
LIBRARIES = ("compute", "utility")


class Container(NamedTuple):
    """What decides whether two ways give a container the same."""

    nodes: dict[str, tuple[int, int, int, int, int]]
    groups: set[int]
    rules: set[tuple[int, int, str]]
    mounts: dict[str, tuple[str, tuple[str, ...]]]
    made: set[Any]


# --- by hook mode


def by_plan(plan: Plan) -> Container:
    nodes = [action.node for action in plan.actions if isinstance(action, Node)]
    mounts = [action for action in plan.actions if isinstance(action, Bind) and not in_proc(action)]
    return Container(
        {node.container_path: (node.major, node.minor, node.mode, node.uid, node.gid) for node in nodes},
        {node.gid for node in nodes if node.gid and node.mode & 0o006 != 0o006},
        {(rule.major, rule.minor, rule.access) for rule in plan.device_rules()},
        {bind.container_path: (bind.host_path, (*bind.options, "rbind", "rprivate")) for bind in mounts},
        made_in_the_container(plan),
    )


def in_proc(bind: Bind) -> bool:
    return bind.container_path.startswith("/proc/")


def made_in_the_container(plan: Plan) -> set[Any]:
    """What a hook has to make, without reasons: links, loader cache, private file systems and what is shown in them.

    Hook mode may merge a cache that is current, where a hook of CDI runs ldconfig.
    """
    made: set[Any] = set()
    for action in plan.without_merge().actions:
        if isinstance(action, Tmpfs):
            made.add(action._replace(reason="", files=tuple(sorted(action.files))))
        elif isinstance(action, (Link, RefreshLdCache)) or (isinstance(action, Bind) and in_proc(action)):
            made.add(action._replace(reason=""))
        else:
            assert not isinstance(action, Bind) or action.container_path.startswith("/"), action
    return made


# --- by CDI


def by_specification(spec: dict[str, Any], names: list[str], facts: HostFacts, settings: Settings) -> Container:
    devices = {device["name"]: device["containerEdits"] for device in spec["devices"]}
    config: dict[str, Any] = {"linux": {"resources": {"devices": [{"allow": False, "access": "rwm"}]}}}
    inject(config, [spec["containerEdits"], *(devices[name] for name in names)], lstat=lstat_of(facts))
    nodes = config["linux"]["devices"]
    assert all(node["type"] == "c" for node in nodes)
    rules = config["linux"]["resources"]["devices"][1:]
    assert all((rule["allow"], rule["type"]) == (True, "c") for rule in rules)
    user = config.get("process", {}).get("user", {})
    return Container(
        {n["path"]: (n["major"], n["minor"], n["fileMode"], n.get("uid", 0), n.get("gid", 0)) for n in nodes},
        set(user.get("additionalGids", ())),
        {(rule["major"], rule["minor"], rule["access"]) for rule in rules},
        {m["destination"]: (m["source"], tuple(m["options"])) for m in config.get("mounts", ())},
        made_in_the_container(plan_of_hook(config, facts, settings)),
    )


def plan_of_hook(config: dict[str, Any], facts: HostFacts, settings: Settings) -> Plan:
    (entry,) = config["hooks"]["createContainer"]
    call = parse_hook(entry["args"][1:])
    assert not call.unknown
    nodes = tuple(ContainerNode(n["path"], n["major"], n["minor"]) for n in config["linux"]["devices"])
    numbered = re.compile(r"/dev/nvidia[0-9]+|/dev/nvidia-caps/nvidia-cap[0-9]+")  # what the hook looks for
    majors = dict(facts.majors)
    found = HookFacts(
        tuple(node for node in nodes if numbered.fullmatch(node.path)),
        tuple(node.path for node in nodes),
        # a loader that searches everything anyway: the configuration for later runs is not what is compared here
        LoaderFacts(searched=tuple(f for command in call.commands for f in getattr(command, "folders", ()))),
        driver_proc=DriverProc(
            facts.proc_driver,
            facts.proc_files,
            tuple(ProcGpu(gpu.proc_name, gpu.bus_id, gpu.minor, gpu.uuid) for gpu in facts.gpus if gpu.proc_name),
            tuple((in_procfs(path), node.minor) for path, node in facts.cap_nodes),
            majors.get("nvidia", -1),
            majors.get("nvidia-caps", -1),
        ),
    )
    return plan_hooks(call.commands, found, settings)


def in_procfs(capability: str) -> str:
    """Where /proc/driver/nvidia/capabilities has a capability of mig-minors."""
    gpu, slash, rest = capability.partition("/")
    return f"{gpu}/mig/{rest}" if slash else f"mig/{capability}"


def lstat_of(facts: HostFacts) -> Callable[[str], os.stat_result]:
    listed = [*facts.control_nodes, *(node for _, node in facts.cap_nodes)]
    for gpu in facts.gpus:
        listed += [*([gpu.node] if gpu.node else []), *gpu.drm_nodes]
    nodes = {node.host_path: node for node in listed if node.host_path}
    files = {
        item.host_path
        for group in (facts.libraries, facts.binaries, facts.firmware, facts.sockets, facts.configs)
        for item in group
    }

    def lstat(path: str) -> os.stat_result:
        if path in nodes:
            node = nodes[path]
            rdev = {"st_rdev": os.makedev(node.major, node.minor)}
            return os.stat_result((stat.S_IFCHR | node.mode, 1, 1, 1, node.uid, node.gid, 0, 0, 0, 0), rdev)
        if path in files:
            return os.stat_result((stat.S_IFREG | 0o644, 1, 1, 1, 0, 0, 0, 0, 0, 0), {})
        raise FileNotFoundError(2, "No such file or directory", path)

    return lstat


# --- both


def spec_of(facts: HostFacts, options: GenerateOptions, settings: Settings) -> dict[str, Any]:
    return assemble(draft_of(offer_gpus(facts, options, settings), options, HOOK), options, "source=nvidia").spec


def token(name: str) -> str:
    """Return what hook mode calls a device of this name."""
    return name.removeprefix("gpu").removeprefix("mig") if name[-1].isdigit() and "-" not in name else name


def by_hook_mode(names: list[str], spec: dict[str, Any], facts: HostFacts, settings: Settings) -> Container:
    (directory,) = [
        item.partition("=")[2] for item in spec["containerEdits"]["env"] if item.startswith("NVIDIA_CTK_LIBCUDA_DIR=")
    ]
    directory32 = next((os.path.dirname(x.host_path) for x in facts.libraries if x.bits == 32), "/usr/lib32")
    root = facts.driver_root.rstrip("/")
    permitted = settings.supported_driver_capabilities.split(",")
    everything = "all" in names
    request = Request(
        selection="all" if everything else "list",
        devices=() if everything else tuple(map(token, names)),
        capabilities=tuple(name for name in CAPABILITIES if name in permitted),
    )
    return by_plan(make_plan(facts, request, settings, ImageFacts(directory, directory32.removeprefix(root))))


def change_nodes(facts: HostFacts, change: Callable[[DeviceNode], DeviceNode]) -> HostFacts:
    def of(gpu: Gpu) -> Gpu:
        return gpu._replace(node=change(gpu.node) if gpu.node else None, drm_nodes=tuple(map(change, gpu.drm_nodes)))

    return facts._replace(
        control_nodes=tuple(map(change, facts.control_nodes)),
        cap_nodes=tuple((path, change(node)) for path, node in facts.cap_nodes),
        gpus=tuple(map(of, facts.gpus)),
    )


def drm(gpu: Gpu) -> tuple[DeviceNode, ...]:
    paths = (f"/dev/dri/card{gpu.minor}", f"/dev/dri/renderD{128 + gpu.minor}")
    return tuple(DeviceNode(path, path, 226, int(path.strip("/abcdefghijklmnopqrstuvwxyzD"))) for path in paths)


@st.composite
def hosts(draw: st.DrawFn) -> HostFacts:
    """A recorded host with some of its GPUs, other nodes, owners and capabilities."""
    facts = HOSTS[draw(st.sampled_from(sorted(name for name in HOSTS if name != "h200-64")))]
    usable = [gpu for gpu in facts.gpus if not gpu.error and (gpu.mig_devices or not gpu.mig_enabled)]
    kept = draw(st.sets(st.sampled_from(usable), min_size=1)) | (set(facts.gpus) - set(usable))
    graphics = draw(st.booleans())
    profile = draw(st.sampled_from(["", "+gfx"]))
    gpus = [
        gpu._replace(
            drm_nodes=drm(gpu) if graphics else (),
            mig_devices=tuple(mig._replace(profile=mig.profile + profile) for mig in gpu.mig_devices),
        )
        for gpu in facts.gpus
        if gpu in kept
    ]
    facts = facts._replace(gpus=tuple(gpus), simulated=draw(st.booleans()))
    missing = draw(st.sets(st.sampled_from(["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0", "/dev/dri/card1"])))
    gid, mode = draw(st.sampled_from([0, 44, 105])), draw(st.sampled_from([0o666, 0o660, 0o664]))

    def change(node: DeviceNode) -> DeviceNode:
        path = node.container_path
        if "/dri/" in path or path == "/dev/nvidiactl":
            node = node._replace(gid=gid, mode=mode)
        return node._replace(host_path="" if path in missing else node.host_path)

    return change_nodes(facts, change)


CAPABILITY_SETS = st.sets(st.sampled_from(CAPABILITIES)).map(lambda found: ",".join(sorted(found | set(LIBRARIES))))
STRATEGIES = st.sets(st.sampled_from(NAME_STRATEGIES), min_size=1).map(tuple)


@given(facts=hosts(), capabilities=CAPABILITY_SETS, strategies=STRATEGIES, data=st.data())
def test_a_container_gets_the_same_by_cdi_as_by_hook_mode(
    facts: HostFacts, capabilities: str, strategies: tuple[str, ...], data: st.DataObject
) -> None:
    settings = Settings(supported_driver_capabilities=capabilities)
    spec = spec_of(facts, GenerateOptions(name_strategies=strategies), settings)
    text = data.draw(st.sampled_from([dump_json, dump_yaml]))(spec)
    checked = check_spec(yaml.safe_load(text))
    assert checked.spec == spec
    assert not checked.problems
    names = sorted(data.draw(st.sets(st.sampled_from([device["name"] for device in spec["devices"]]), min_size=1)))
    assert by_specification(checked.spec, names, facts, settings) == by_hook_mode(names, spec, facts, settings)


@pytest.mark.parametrize("name", sorted(HOSTS))
def test_all_of_every_recorded_host_is_the_same_by_cdi_as_by_hook_mode(name: str) -> None:
    facts, settings = HOSTS[name], Settings()
    spec = spec_of(facts, GenerateOptions(), settings)
    for text in (dump_json(spec), dump_yaml(spec)):
        assert parse_document(text.encode(), "spec") == spec
    assert by_specification(spec, ["all"], facts, settings) == by_hook_mode(["all"], spec, facts, settings)


def test_a_driver_root_is_no_part_of_what_containers_see() -> None:
    """The driver's files and nodes below another root are at the same places in the container."""
    plain = HOSTS["t4-1"]
    root = "/run/nvidia/driver"

    def moved(items: Any) -> Any:
        return tuple(item._replace(host_path=root + item.host_path) for item in items)

    files = ("libraries", "binaries", "firmware", "sockets", "configs")
    facts = change_nodes(plain, lambda node: node._replace(host_path=root + node.host_path))._replace(
        driver_root=root, **{name: moved(getattr(plain, name)) for name in files}
    )
    settings = Settings()
    spec = spec_of(facts, GenerateOptions(), settings)
    without_root = re.sub(r'"hostPath": "(/dev/[^"]*)", ', "", json.dumps(spec).replace(root, ""))
    assert json.loads(without_root) == spec_of(plain, GenerateOptions(), settings)
    assert by_specification(spec, ["0"], facts, settings) == by_hook_mode(["0"], spec, facts, settings)
