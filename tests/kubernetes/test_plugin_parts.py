"""Parts of the device plugin without processes: its command line, its judgement of devices, what it writes."""

import itertools
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from kubernetes_lab import configured, host, inventory, shared
from plugin_lab import GPU
from support.process import own_children
from support.product import SimulatedHost
from support.trees import pci_function, write_tree

from ocigpu.cdi.check import check_spec
from ocigpu.cdi.generate import Generated, Part
from ocigpu.cli.front.manual import read_page
from ocigpu.core.errors import SettingsError, UsageError
from ocigpu.core.facts import DeviceNode, FeatureNodes
from ocigpu.core.settings import Settings
from ocigpu.exporter.options import OPTIONS as EXPORTER_OPTIONS
from ocigpu.gpus.nvidia import nvml_verbs, on_node
from ocigpu.kubernetes.api import deviceplugin_pb2 as pb
from ocigpu.kubernetes.api.listener import MAX_STREAMS, Feed
from ocigpu.kubernetes.api.services import REGISTRATION, serve
from ocigpu.kubernetes.node import on_host
from ocigpu.kubernetes.node import program as node_program
from ocigpu.kubernetes.node.config import OPTIONS, CommandInput, Configuration, parse_flags, read_configuration
from ocigpu.kubernetes.node.devices import Inventory, PluginDevice, Resource
from ocigpu.kubernetes.node.health import NO_INSTANCE, NOTE_LASTS, Event, Monitor, Rules
from ocigpu.kubernetes.node.reading import KubernetesNode
from ocigpu.kubernetes.plugin import specifications
from ocigpu.kubernetes.plugin.allocate import CDI_VENDOR
from ocigpu.kubernetes.plugin.plugin import DevicePlugin, Timing
from ocigpu.kubernetes.plugin.reading import hardware_reader, read_again
from ocigpu.kubernetes.plugin.server import Registration, socket_name
from ocigpu.kubernetes.plugin.specifications import wanted, write_specifications
from ocigpu.system import module_process
from ocigpu.system.service import ServiceLog
from ocigpu.system.settings_file import read_settings

A100, MIG = host("a100-8"), host("h100-8-mig")


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        (["--mig-strategy=mixed"], {"mig_strategy": "mixed"}),
        (["--mig-strategy", "mixed", "-pass-device-specs"], {"mig_strategy": "mixed", "pass_device_specs": "true"}),
        (["--pass-device-specs=false"], {"pass_device_specs": "false"}),
        (["--nvidia-driver-root", "/d"], {"driver_root": "/d"}),
        (["--kubelet-socket="], {"kubelet_socket": ""}),
        (
            ["--device-list-strategy=envvar", "--device-list-strategy", "cdi-cri,volume-mounts"],
            {"device_list_strategy": "envvar,cdi-cri,volume-mounts"},
        ),
        (["--imex-channel-ids=0", "--imex-channel-ids=1"], {"imex_channel_ids": "0,1"}),
        (["--mig-strategy=single", "--mig-strategy=mixed"], {"mig_strategy": "mixed"}),
        ([], {}),
    ],
    ids=["equals", "separate", "false", "alias", "empty", "a list again", "numbers again", "text again", "nothing"],
)
def test_words_of_the_command_line(words: list[str], flags: dict[str, str]) -> None:
    assert parse_flags(words, {}) == CommandInput(flags, "")


@pytest.mark.parametrize("words", [["mixed"], ["--oneshot"], ["--mig-strategy"], ["--", "x"], ["--config-file"]])
def test_words_that_mean_nothing(words: list[str]) -> None:
    with pytest.raises(UsageError):
        parse_flags(words, {})


def test_the_flag_for_the_file_comes_before_its_variable() -> None:
    assert parse_flags([], {"CONFIG_FILE": "/a"}).file == "/a"
    assert parse_flags(["--config-file=/b"], {"CONFIG_FILE": "/a"}).file == "/b"


def named_in_help(program: str) -> set[str]:
    words = "\n".join(read_page(program).sections.values()).replace(",", " ").split()
    return {word.partition("=")[0] for word in words if word.startswith("--")}


def test_every_option_is_in_the_help() -> None:
    flags = {f"--{flag}" for option in OPTIONS if "device-plugin" in option.programs for flag in option.flags}
    assert named_in_help("device-plugin") == flags | {"--config-file", "--log-format"}


@pytest.mark.parametrize("program", ["node-labels", "mps-control-daemon", "exporter"])
def test_every_option_of_the_other_programs_is_in_their_help(program: str) -> None:
    options = EXPORTER_OPTIONS if program == "exporter" else [each for each in OPTIONS if program in each.programs]
    assert options
    assert {f"--{option.flags[0]}" for option in options} <= named_in_help(program)


@pytest.mark.parametrize("option", ["cdi_disable_hooks", "cdi_feature_flags"])
def test_words_for_cdi_that_nobody_knows(option: str) -> None:
    with pytest.raises(SettingsError, match='"some" is not one of'):
        read_configuration(CommandInput({option: "some"}, ""))
    read_configuration(CommandInput({"cdi_disable_hooks": "all", "cdi_feature_flags": "disable-ipc-discoverer"}, ""))


def test_flag_variable_file_default(tmp_path: Path) -> None:
    file = tmp_path / "dp.yaml"
    file.write_text("flags: {migStrategy: single, plugin: {passDeviceSpecs: true}}\nextra: 1\n")
    variables = {"MIG_STRATEGY": "none", "DEVICE_ID_STRATEGY": "index"}
    found = read_configuration(CommandInput({"mig_strategy": "mixed"}, str(file), variables))
    options = found.options
    assert (options.mig_strategy, options.device_id_strategy, options.pass_device_specs) == ("mixed", "index", True)
    assert any('unknown key "extra"' in warning for warning in found.warnings)


@pytest.mark.parametrize(
    ("flags", "variables", "text", "ends"),
    [
        ({}, {}, "", False),
        ({"fail_on_init_error": "true"}, {}, "", True),
        ({}, {"FAIL_ON_INIT_ERROR": "true"}, "", True),
        ({}, {}, "flags: {failOnInitError: true}", True),
        ({"fail_on_init_error": "false"}, {}, "flags: {failOnInitError: true}", False),
    ],
    ids=["not told", "flag", "variable", "file", "flag first"],
)
def test_it_ends_without_a_driver_only_when_told(
    tmp_path: Path, flags: dict[str, str], variables: dict[str, str], text: str, ends: bool
) -> None:
    file = tmp_path / "dp.yaml"
    file.write_text(text)
    assert read_configuration(CommandInput(flags, str(file), variables)).options.fail_on_init_error is ends


@pytest.mark.parametrize("kind", ["missing", "directory", "bytes"])
def test_files_that_cannot_be_read(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "dp.yaml"
    if kind == "directory":
        path.mkdir()
    elif kind == "bytes":
        path.write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError) as raised:
        read_configuration(CommandInput({}, str(path)))
    assert raised.value.code == "OCIGPU-KUBE-1"


def test_names_of_sockets() -> None:
    assert socket_name(GPU) == "nvidia-gpu.sock"
    assert socket_name("nvidia.com/mig-1g.5gb") == "nvidia-mig-1g.5gb.sock"


def test_a_defect_does_not_end_what_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = CommandInput({"kubelet_socket": str(tmp_path / "kubelet.sock")}, "")
    plugin = DevicePlugin(told, Settings(), timing=Timing(poll=0.0))
    steps: list[float] = []

    def step(now: float) -> None:
        steps.append(now)
        if len(steps) == 4:
            plugin.signals.stopping = True
        raise ValueError("a defect")

    monkeypatch.setattr(plugin, "_step", step)
    plugin.run()
    assert len(steps) == 4
    assert capsys.readouterr().out == "error: OCIGPU-INT-1: ValueError: a defect\nending\n"


def test_a_log_that_nobody_takes_is_no_reason_to_end() -> None:
    code = "import os; from ocigpu.system.service import ServiceLog; ServiceLog(True, True)('info', 'x'); os._exit(7)"
    with Path("/dev/full").open("w") as full:
        assert subprocess.run([sys.executable, "-c", code], stdout=full, timeout=60).returncode == 7


# --- health


def errors(monitor: Monitor, offered: Inventory) -> list[str]:
    return [device.error for resource in offered.resources for device in monitor.with_health(resource).devices]


def test_a_fault_lasts_until_the_device_has_answered_well_for_a_while() -> None:
    one = inventory(A100._replace(gpus=A100.gpus[:1]))
    (resource,) = one.resources
    broken = one._replace(resources=(resource._replace(devices=(resource.devices[0]._replace(error="lost"),)),))
    monitor = Monitor(Configuration(), Rules(probes=2, hold=10.0))
    monitor.record_reading(broken, 0.0)
    for now, error in ((1.0, "lost"), (5.0, "lost"), (11.0, "")):
        monitor.record_reading(one, now)
        assert errors(monitor, one) == [error], now


def test_events_are_about_all_replicas() -> None:
    offered = inventory(A100, shared({"name": "gpu", "replicas": 2}))
    monitor = Monitor(Configuration())
    assert monitor.record_event(Event(79, A100.gpus[3].uuid), offered, 0.0) == (A100.gpus[3].uuid,)
    assert errors(monitor, offered).count("XID 79") == 2
    assert monitor.record_event(Event(31, A100.gpus[2].uuid), offered, 0.0) == (), "a program's fault"


def test_a_programs_fault_is_noted_for_a_while_and_others_do_not_flap() -> None:
    offered = inventory(A100)
    uuid, monitor = A100.gpus[2].uuid, Monitor(Configuration())
    assert monitor.noted_xid(uuid, 0.0) is None
    for now, xid, noted in (
        (0.0, 31, 31),
        (1.0, 43, 31),
        (2.0, 31, 31),
        (59.0, 13, 31),
        (61.0, 13, 13),
        (62.0, 31, 13),
    ):
        assert monitor.record_event(Event(xid, uuid), offered, now) == ()
        assert monitor.noted_xid(uuid, now) == noted
    assert monitor.noted_xid(A100.gpus[1].uuid, 62.0) is None
    assert monitor.noted_xid(uuid, 62.0 + NOTE_LASTS - 1) == 13
    assert monitor.noted_xid(uuid, 62.0 + NOTE_LASTS) is None
    assert set(errors(monitor, offered)) == {""}


def test_silence_counts_after_a_while_and_not_without_probes() -> None:
    offered = inventory(A100)
    monitor = Monitor(Configuration(), Rules(patience=30.0))
    monitor.record_silence(offered, 0.0)
    assert set(errors(monitor, offered)) == {""}
    monitor.record_silence(offered, 30.0)
    assert set(errors(monitor, offered)) == {"no answer for 30 s"}
    unwatched = Monitor(configured(None, {"DP_DISABLE_HEALTHCHECKS": "all"}), Rules(patience=0.0))
    unwatched.record_silence(offered, 0.0)
    assert set(errors(unwatched, offered)) == {""}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (b'{"xid": 79, "gpu": "GPU-1", "gi": 4294967295, "ci": 4294967295}', (Event(79, "GPU-1"),)),
        (b'{"xid": 48, "gpu": "", "gi": -1, "ci": 2}', (Event(48, "", NO_INSTANCE, 2),)),
        (b"{}", ()),
        (b'{"xid": {}, "gpu": 1}', None),
        (b"[]", None),
        (b"\xff nonsense", None),
        (b'{"xid": 79}', None),
        (b'"xid"', None),
        (b'{"unwatched": []}', None),
    ],
    ids=["event", "signed", "life", "types", "list", "nonsense", "incomplete", "text", "unwatched"],
)
def test_lines_of_the_process_with_the_closed_library(
    line: bytes, found: tuple[Event, ...] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What makes no sense costs the process its place."""
    (tmp_path / "line").write_bytes(line + b"\n")
    words = ["/bin/sh", "-c", 'cat "$0"; exec sleep 60', str(tmp_path / "line")]
    monkeypatch.setattr(module_process, "command", lambda *_: words)
    monkeypatch.setattr(on_node, "watch_faults", lambda _: ["module"])
    watcher = node_program.EventWatcher()
    watcher.watch(A100, 0.0)
    watcher.step(0.0)
    try:
        select.select([watcher.fileno()], [], [])
        news = watcher.step(0.0)
    finally:
        watcher.close()
    assert news.events == (found or ())
    assert [warning.partition(":")[0] for warning in news.warnings] == (
        ["the process that waits for XIDs sent an unknown message"] if found is None else []
    )


def test_a_process_that_ends_at_once_is_started_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_process, "command", lambda *_: ["/bin/echo", "{}"])
    monkeypatch.setattr(on_node, "watch_faults", lambda _: ["module"])
    watcher = node_program.EventWatcher()
    now, warnings = 0.0, list[str]()
    watcher.watch(A100, now)
    while len(warnings) < 3:
        if watcher.fileno() >= 0:
            select.select([watcher.fileno()], [], [])
        found = watcher.step(now).warnings
        now += 10.0 if found else 0.0
        warnings += found
    assert [warning.rpartition(" restarting it in ")[2] for warning in warnings] == ["2 s", "4 s", "8 s"]
    watcher.close()


def test_gpus_that_report_no_xids_keep_the_process_waiting(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As virtual GPUs: starting the process again and again would tell nothing new."""
    calls = {
        "nvmlEventSetCreate": 0,
        "nvmlDeviceGetCount": 1,
        "nvmlDeviceGetHandleByIndex": 0,
        "nvmlDeviceGetUUID": "GPU-1",
        "nvmlDeviceGetSupportedEventTypes": 0,
    }
    for name, value in calls.items():
        monkeypatch.setattr(nvml_verbs.pynvml, name, lambda *_, value=value: value)
    waits = iter([None, None])
    monkeypatch.setattr(nvml_verbs.time, "sleep", lambda _: next(waits))
    with pytest.raises(StopIteration):
        nvml_verbs.watch_events()
    assert capsys.readouterr().out.splitlines() == [
        '{"watched": [], "unwatched": {"GPU-1": "it reports no XIDs"}}',
        *["{}"] * 2,
    ]


def test_a_reader_that_ends_while_nothing_is_asked_wakes_nobody_for_ever() -> None:
    reader = hardware_reader()
    reader.ask((Settings(driver_root="/nonexistent"), Configuration()), 0.0)
    select.select([reader.fileno()], [], [])
    assert reader.answer(0.0)
    (child,) = own_children("ocigpu.kubernetes.plugin.reading")
    os.kill(child, signal.SIGKILL)
    select.select([reader.fileno()], [], [])
    ended = reader.answer(0.0)
    assert ended is not None
    assert ended.silent.startswith("the process that reads the host ended")
    assert reader.fileno() == -1


# --- specifications


def test_specifications_that_strategies_need() -> None:
    facts = A100._replace(
        features=(FeatureNodes("gds", (DeviceNode("/dev/nvidia-fs0", "/dev/nvidia-fs0", 240, 0),)),), imex_nodes=()
    )

    def kinds(file: dict[str, object] | None = None, **flags: str) -> list[str]:
        configuration = configured(file, **flags)
        node = KubernetesNode("nvml", facts, inventory(facts))
        return [f"{options.vendor}/{options.device_class}" for options in wanted(node, configuration)]

    assert kinds() == []
    assert kinds(device_list_strategy="cdi-cri") == [f"{CDI_VENDOR}/gpu"]
    both = {"flags": {"gdsEnabled": True, "mofedEnabled": True}}
    assert kinds(both, device_list_strategy="envvar,cdi-annotations") == [f"{CDI_VENDOR}/gpu", f"{CDI_VENDOR}/gds"]


def test_the_vdpau_library_is_where_libvdpau_looks() -> None:
    """NVIDIA's specification has it in vdpau/, with a link there and the directory in the loader's cache."""
    place = "/usr/lib/x86_64-linux-gnu"
    words = ["create-symlinks", "--link", f"libvdpau_nvidia.so.550::{place}/libvdpau_nvidia.so.1", "--link", "a::/b"]
    folders = ["update-ldcache", "--folder", place, "--folder", "/usr/lib/i386-linux-gnu", "+", "last"]
    mounts = [{"hostPath": f"{place}/{name}", "containerPath": f"{place}/{name}"} for name in ("libcuda.so.550",)]
    mounts.append({"hostPath": "x", "containerPath": f"{place}/libvdpau_nvidia.so.550"})
    hook = {"hookName": "createContainer", "path": "/h", "args": ["h", *words, "+", *folders]}
    spec = {"kind": "a/b", "devices": [], "containerEdits": {"hooks": [hook], "mounts": mounts}}
    before = json.dumps(spec)
    found = on_host.vdpau_apart(spec)["containerEdits"]
    assert [each["containerPath"] for each in found["mounts"]] == [
        f"{place}/libcuda.so.550",
        f"{place}/vdpau/libvdpau_nvidia.so.550",
    ]
    (args,) = (each["args"] for each in found["hooks"])
    assert f"libvdpau_nvidia.so.550::{place}/vdpau/libvdpau_nvidia.so.1" in args
    assert args[-4:] == ["--folder", f"{place}/vdpau", "+", "last"]
    assert json.dumps(spec) == before
    assert on_host.vdpau_apart({"devices": []}) == {"devices": []}


def test_specifications_of_kata_are_those_of_its_resources() -> None:
    devices = (PluginDevice("9", "9", "0000:3b:00.0", "9"), PluginDevice("12", "12", "0000:5e:00.0", "12"))
    node = KubernetesNode("vfio", A100, Inventory((Resource(GPU, devices, "vfio"),)))
    (options,) = wanted(node, configured())
    assert (options.mode, options.device_class, options.device_ids) == ("vfio", "gpu", ("9", "12"))


def test_specifications_of_a_host_with_vfio_are_written(tmp_path: Path) -> None:
    tree = {
        "/sys/class/misc/vfio/dev": "10:196\n", "/dev/vfio/vfio": "",
        "/sys/class/vfio/9/dev": "242:9\n", "/dev/vfio/9": "",
        **pci_function("0000:3b:00.0", "10de:2330", "0302", "vfio-pci", "9"),
    }  # fmt: skip
    settings = write_tree(tmp_path / "host", tree)._replace(cdi_spec_dirs=(str(tmp_path / "cdi"),))
    configuration = configured(device_discovery_strategy="vfio")
    node = read_again(None, settings, configuration).node
    assert node is not None
    assert write_specifications(node, configuration, settings) == ()
    written = json.loads((tmp_path / "cdi/nvidia.com-gpu.json").read_text())
    (resource,) = node.inventory.resources
    assert written["kind"] == resource.name
    assert [device["name"] for device in written["devices"]] == [device.id for device in resource.devices] == ["9"]


def test_a_node_is_read_closely_only_when_it_has_changed(mig_host: SimulatedHost) -> None:
    settings, configuration = read_settings(str(mig_host.settings)), configured(mig_strategy="mixed")
    first = read_again(None, settings, configuration).node
    assert first is not None
    assert read_again(first, settings, configuration).node is first
    faults = mig_host.directory / "faults"
    faults.write_text("lost 1\n")
    try:
        second = read_again(first, settings, configuration).node
        faults.write_text("init 999\n")
        silent = read_again(second, settings, configuration)
    finally:
        faults.unlink()
    assert second is not None
    assert second is not first
    assert [device.error != "" for each in second.inventory.resources for device in each.devices].count(True) == 1
    assert silent.node is None
    assert silent.silent.startswith("NVML cannot be initialised")


def test_paths_in_the_plugins_container_become_the_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = {
        "cdiVersion": "0.5.0",
        "kind": f"{CDI_VENDOR}/gpu",
        "devices": [
            {"name": "0", "containerEdits": {"deviceNodes": [{"path": "/dev/x", "hostPath": "/driver-root/dev/x"}]}}
        ],
        "containerEdits": {"mounts": [{"containerPath": "/usr/lib/a", "hostPath": "/driver-root/usr/lib/a"}]},
    }
    monkeypatch.setattr(specifications, "generate_all", lambda *_: (Part("", Generated(inside)),))
    configuration = configured(device_list_strategy="cdi-cri", driver_root="/run/nvidia/driver", dev_root="/")
    settings = Settings(driver_root="/driver-root", cdi_spec_dirs=("/etc/cdi", str(tmp_path)))
    assert write_specifications(KubernetesNode("nvml", A100, inventory(A100)), configuration, settings) == ()
    path = tmp_path / f"{CDI_VENDOR}-gpu.json"
    written = json.loads(path.read_text())
    assert not check_spec(written).errors
    assert written["devices"][0]["containerEdits"]["deviceNodes"] == [{"path": "/dev/x", "hostPath": "/dev/x"}]
    assert written["containerEdits"]["mounts"][0]["hostPath"] == "/run/nvidia/driver/usr/lib/a"
    before = path.stat()
    assert write_specifications(KubernetesNode("nvml", A100, inventory(A100)), configuration, settings) == ()
    assert path.stat() == before, "an equal file is left alone"
    path.unlink()
    path.mkdir()
    (problem,) = write_specifications(KubernetesNode("nvml", A100, inventory(A100)), configuration, settings)
    assert "it is a directory" in problem


class Call:
    """A call of the kubelet, as gRPC shows it."""

    active = True

    def add_callback(self, _function: Callable[[], None]) -> bool:
        return True

    def is_active(self) -> bool:
        return self.active

    def abort(self, _code: Any, text: str) -> None:
        raise RuntimeError(text)


def test_two_plugins_of_one_resource_take_it_from_each_other_ever_more_rarely(tmp_path: Path) -> None:
    said: list[str] = []
    log = ServiceLog(False)
    log.once = lambda _topic, _level, text, **_: said.append(text)
    answered = threading.Event()
    kubelet = grpc.server(ThreadPoolExecutor(1))
    kubelet.add_generic_rpc_handlers((serve(REGISTRATION, {"Register": lambda _request, _context: pb.Empty()}),))
    kubelet.add_insecure_port(f"unix://{tmp_path}/kubelet.sock")
    kubelet.start()
    registration = Registration(str(tmp_path / "kubelet.sock"), "nvidia.com/gpu", answered.set, log, 10.0)

    def take(now: int) -> None:
        answered.clear()
        registration.step(now, (now,))  # another kubelet each time: it is asked at once
        assert answered.wait(60)
        registration.step(now, (now,))

    def wait_after(now: int) -> str:
        registration.renew(now, "the kubelet no longer listens")
        return said[-1].removeprefix("nvidia.com/gpu: the kubelet no longer listens: registering again in ")

    try:
        waits = []
        for now in (*range(0, 200, 20), 1000):
            take(now)
            assert not registration.holds(now + 9)
            assert registration.holds(now + 10)
            waits.append(wait_after(now + 10))
        assert waits == [f"{seconds} s" for seconds in (1, 2, 4, 8, 16, 30, 30, 30, 30, 30, 30)]
        take(2000)
        assert wait_after(2400) == "1 s", "it was a good one"
    finally:
        registration.cancel()
        kubelet.stop(None).wait()


def test_streams_tell_what_is_new_and_at_their_end_what_is_left() -> None:
    feed = Feed()
    assert feed.tell("first")
    assert not feed.tell("first")
    call = Call()
    stream = feed.follow(call)
    assert next(stream) == "first"
    assert feed.tell("second")
    assert next(stream) == "second"
    feed.tell("last")
    feed.end()
    assert list(stream) == ["last"]
    feed.end(False)
    again = feed.follow(call)
    assert next(again) == "last"
    call.active = False
    assert list(again) == []
    left = feed.follow(Call())
    assert next(left) == "last"
    assert feed.is_followed
    feed.break_off()
    assert list(left) == []
    assert not feed.is_followed
    new = feed.follow(Call())
    assert next(new) == "last", "others may begin"
    new.close()
    repeated = Feed(0.0)
    repeated.tell("well")
    assert list(itertools.islice(repeated.follow(Call()), 3)) == ["well"] * 3


def test_so_many_streams_are_told() -> None:
    feed = Feed()
    feed.tell("")
    streams = [feed.follow(Call()) for _ in range(MAX_STREAMS)]
    assert [next(stream) for stream in streams] == [""] * MAX_STREAMS
    with pytest.raises(RuntimeError, match="more than 8 streams"):
        next(feed.follow(Call()))
    streams.pop().close()
    assert next(feed.follow(Call())) == ""
