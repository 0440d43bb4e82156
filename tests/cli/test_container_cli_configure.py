"""What the options of ``configure`` ask for, and how its failures read: without a container."""

import os
from pathlib import Path

import pytest

from ocigpu.core.actions import AllowDevice, Node
from ocigpu.core.errors import OcigpuError
from ocigpu.core.facts import HostFacts, HostFile
from ocigpu.core.settings import CAPABILITIES, Settings
from ocigpu.entry.container_cli.configure import (
    adjust_settings,
    find_config,
    full_address,
    make_request,
    without_left_out,
    without_nodes,
)
from ocigpu.entry.container_cli.main import main
from ocigpu.entry.container_cli.options import parse_options
from ocigpu.gpus.nvidia.plan import make_plan
from ocigpu.gpus.request import Request
from ocigpu.gpus.vendors import parse_request

UUID = "GPU-4d4f434b-0000-0000-0000-000000000005"


def request_of(*words: str, settings: Settings | None = None, channels: list[int] | None = None) -> Request:
    options = parse_options(["configure", *words, "/rootfs"])
    return make_request(options, channels or [], settings or Settings())


@pytest.mark.parametrize(
    ("words", "selection", "devices"),
    [
        ([], "none", ()),
        (["--device="], "none", ()),
        (["--device=all"], "all", ()),
        (["--device=0,ALL,5"], "all", ()),
        (["-d", "0"], "list", ("0",)),
        (["-d0", "--device=2,, 1", "-d", "2"], "list", ("0", "2", "1")),
        (["--device", UUID], "list", (UUID,)),
        (["--device=1:0"], "list", ("1:0",)),
        (["--device=0:3:0.7"], "list", ("00000000:03:00.0",)),
    ],
    ids=lambda value: " ".join(value) or "nothing" if isinstance(value, list) else None,
)
def test_devices_are_what_the_vendors_options_name(words: list[str], selection: str, devices: tuple[str, ...]) -> None:
    request = request_of(*words)
    assert (request.selection, request.devices) == (selection, devices)


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        ("0:3:0", "00000000:03:00.0"),
        ("00000000:03:00.7", "00000000:03:00.0"),
        ("0000:3b:00.0", "00000000:3b:00.0"),
        ("1:0", "1:0"),
        ("3b:00.0", "3b:00.0"),
        ("a:b:c:d", "a:b:c:d"),
        ("::", "::"),
        ("111111111:3:0", "111111111:3:0"),
        ("x:y:z", "x:y:z"),
    ],
)
def test_a_pci_address_is_read_as_the_vendor_reads_it(token: str, expected: str) -> None:
    assert full_address(token) == expected


@pytest.mark.parametrize(
    ("letters", "expected"),
    [
        ("-cu", ("compute", "utility")),
        ("-vgDn", ("display", "graphics", "ngx", "video")),
        ("--compat32", ("compat32",)),
        ("--no-cgroups", ()),
    ],
)
def test_each_capability_has_its_flag_and_without_one_there_are_no_libraries(
    letters: str, expected: tuple[str, ...], facts: HostFacts
) -> None:
    request = request_of(letters, "-d0")
    assert request.capabilities == expected
    if not expected:
        actions = make_plan(facts, request, Settings()).actions
        assert [action.node.container_path for action in actions if isinstance(action, Node)] == [
            "/dev/nvidiactl",
            "/dev/nvidia0",
        ]


@pytest.mark.parametrize("names", ["compute,utility", ",".join(CAPABILITIES)])
@pytest.mark.parametrize("devices", ["all", "0,3", UUID, "none"])
def test_a_plan_by_options_is_that_of_the_hook(facts: HostFacts, devices: str, names: str) -> None:
    words = [f"--{name}" for name in names.split(",")] + ([f"--device={devices}"] if devices != "none" else [])
    variables = [f"NVIDIA_VISIBLE_DEVICES={devices}", f"NVIDIA_DRIVER_CAPABILITIES={names}"]
    ours = make_plan(facts, request_of(*words), Settings())
    hook = make_plan(facts, parse_request({"process": {"env": variables}}, Settings()), Settings())
    without_reasons = [[action.describe() for action in plan.actions] for plan in (ours, hook)]
    assert without_reasons[0] == without_reasons[1]
    assert (ours.gpus, ours.notes) == (hook.gpus, hook.notes)


@pytest.mark.parametrize(
    ("words", "variables"),
    [
        (["--device=1:1"], ["NVIDIA_VISIBLE_DEVICES=1:1"]),
        (["--device=MIG-bbbbbbbb-0000-0000-0000-000000000000"], ["NVIDIA_VISIBLE_DEVICES=1:1"]),
        (["--device=all"], ["NVIDIA_VISIBLE_DEVICES=all"]),
        (["-dall", "--mig-config=all"], ["NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_MIG_CONFIG_DEVICES=all"]),
        (["-dall", "--mig-monitor=all"], ["NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_MIG_MONITOR_DEVICES=all"]),
    ],
    ids=lambda value: value[-1] if value[0].startswith("-") else None,
)
def test_mig_devices_by_options_are_those_of_the_hook(
    mig_facts: HostFacts, words: list[str], variables: list[str]
) -> None:
    process = {
        "env": [*variables, "NVIDIA_DRIVER_CAPABILITIES=utility"],
        "capabilities": {"bounding": ["CAP_SYS_ADMIN"]},
    }
    ours = make_plan(mig_facts, request_of("-u", *words), Settings())
    hook = make_plan(mig_facts, parse_request({"process": process}, Settings()), Settings())
    assert [action.describe() for action in ours.actions] == [action.describe() for action in hook.actions]
    assert ours.mig_devices == hook.mig_devices


def test_conditions_channels_and_mig_are_taken_over() -> None:
    request = request_of(
        "--require=cuda>=12.0 driver>=1", "-r", "arch>=7", "--require=", "--mig-config=all", channels=[3, 1]
    )
    assert request.requirements == (("--require", "arch>=7"), ("--require", "cuda>=12.0 driver>=1"))
    assert request.imex_channels == (1, 3)
    assert (request.mig_config, request.mig_monitor) == ("all", "")


def test_what_the_settings_forbid_options_do_not_give() -> None:
    settings = Settings(disable_require=True, features_ignore_imex_channel_requests=True)
    request = request_of("--require=cuda>=99", settings=settings, channels=[1])
    assert request.requirements == ()
    assert request.imex_channels == ()
    with pytest.raises(OcigpuError, match="graphics: not permitted"):
        request_of("-cg", settings=Settings(supported_driver_capabilities="compute,utility"))


@pytest.mark.parametrize(
    ("words", "ldconfig"),
    [
        (["--ldconfig=@/sbin/ldconfig.real"], "/sbin/ldconfig.real"),
        (["-l", "@/opt/../sbin/ldconfig"], "/sbin/ldconfig"),
        (["--ldconfig=/sbin/ldconfig"], "/host/ldconfig"),
        (["--ldconfig=/rootfs/evil"], "/host/ldconfig"),
        ([], "/host/ldconfig"),
    ],
    ids=lambda value: " ".join(value) or "nothing" if isinstance(value, list) else None,
)
def test_an_ldconfig_of_the_image_is_never_taken(words: list[str], ldconfig: str) -> None:
    options = parse_options(["configure", *words, "/rootfs"])
    assert adjust_settings(options, Settings(ldconfig="/host/ldconfig")).ldconfig == ldconfig


@pytest.mark.parametrize(
    ("words", "mode"),
    [
        ([], "ldconfig"),
        (["--cuda-compat-mode=mount"], "ldconfig"),
        (["--cuda-compat-mode=ldconfig"], "ldconfig"),
        (["--cuda-compat-mode=disabled"], "disabled"),
        (["--no-cntlibs"], "disabled"),
        (["--cuda-compat-mode=mount", "--cuda-compat-mode=ldconfig", "--no-cntlibs"], "disabled"),
    ],
    ids=lambda value: " ".join(value) or "nothing" if isinstance(value, list) else None,
)
def test_compatibility_libraries_are_found_by_the_loader_or_not_used(words: list[str], mode: str) -> None:
    options = parse_options(["configure", *words, "/rootfs"])
    assert adjust_settings(options, Settings()).cuda_compat_mode == mode
    assert adjust_settings(options, Settings(cuda_compat_mode="disabled")).cuda_compat_mode == "disabled"
    assert adjust_settings(options, Settings(no_cgroups=True)).no_cgroups


def test_parts_can_be_left_out(facts: HostFacts) -> None:
    fabric = HostFile("/run/nvidia-fabricmanager/socket", "/run/nvidia-fabricmanager/socket", ("utility",), "socket")
    facts = facts._replace(sockets=(*facts.sockets, fabric))
    options = parse_options(["configure", "--no-fabricmanager", "--no-gsp-firmware", "/rootfs"])
    assert without_left_out(options, facts).sockets == facts.sockets[:1]
    assert without_left_out(options, facts).firmware == ()
    options = parse_options(["configure", "--no-persistenced", "/rootfs"])
    assert without_left_out(options, facts).sockets == (fabric,)
    assert without_left_out(options, facts).firmware == facts.firmware
    plan = make_plan(facts, request_of("-d0"), Settings())
    kinds = {type(action) for action in without_nodes(plan).actions}
    assert Node not in kinds
    assert AllowDevice in kinds


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--pid=x", "/r"], 'OCIGPU-ARG-1: input error: parse pid failed: "x"'),
        (["--pid=1e9", "/r"], "input error: parse pid failed"),
        (["rootfs"], 'input error: invalid rootfs directory: "rootfs"'),
        (["/"], "input error: invalid rootfs directory"),
        (["/.."], "input error: invalid rootfs directory"),
        (["//"], "input error: invalid rootfs directory"),
        (["--cuda-compat-mode=x", "/r"], "invalid option: cuda-compat-mode=x"),
        (["--cuda-compat-mode=mount", "--cuda-compat-mode=ldconfig", "/r"], "only one cuda-compat-mode"),
        ([*["--require=cuda>=1"] * 33, "/r"], "input error: too many requirements"),
        (["--require=cuda!!1", "/r"], "OCIGPU-REQ-4: requirement error: --require: "),
        ([f"--require={'cuda>=1 ' * 15000}"] * 3 + ["/r"], "requirement error: --require: more than 262144 characters"),
        (["--device=none", "/r"], "OCIGPU-DEV-1: device error: none: unknown device"),
        (["--device=0,void", "/r"], "OCIGPU-DEV-1: device error: void: unknown device"),
        (["--device=\x1b[2J", "/r"], 'OCIGPU-REQ-1: device error: --device: "\\x1b[2J" is not'),
        (["--device=" + "1," * 5000 + ",".join(map(str, range(5000))), "/r"], "device error: --device: more than 4096"),
        (["--mig-config=0", "/r"], "OCIGPU-REQ-1: mig-config error: only 'all' devices are currently supported"),
        (["--mig-monitor=0", "/r"], "mig-monitor error: only 'all' devices are currently supported"),
        (["--imex-channel=1048576", "/r"], "OCIGPU-REQ-6: error parsing IMEX info: unsupported IMEX channel value: 1"),
        (["--imex-channel=-1", "/r"], "unsupported IMEX channel value: -1"),
        ([f"--imex-channel={','.join(map(str, range(5000)))}", "/r"], "more than 4096 IMEX channels"),
        (["/r", "/s"], "unrecognized arguments: /s"),
        (["--frobnicate", "/r"], "unrecognized arguments: --frobnicate"),
    ],
    ids=lambda value: None if isinstance(value, list) else value.encode("unicode_escape").decode()[:50],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_before_anything_is_read(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no driver is: nothing of the host is looked at first."""
    monkeypatch.delenv("OCIGPU_CONFIG", raising=False)
    assert main(["configure", *words]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    first, *rest = captured.err.splitlines()
    assert first.startswith("ocigpu-container-cli: OCIGPU-")
    assert message in first
    assert len(rest) <= 1


class TestConfigurations:
    """find_config: the container's configuration, which rules on cgroup v2 are computed from."""

    @pytest.fixture
    def bundle(self, tmp_path: Path) -> Path:
        (tmp_path / "bundle/rootfs").mkdir(parents=True)
        (tmp_path / "bundle/config.json").write_text('{"root": {"path": "rootfs"}}')
        (tmp_path / "bundle/config.json").chmod(0o644)
        return tmp_path / "bundle"

    def test_is_found_beside_the_root_directory(self, bundle: Path) -> None:
        assert find_config(str(bundle / "rootfs")) == {"root": {"path": "rootfs"}}

    def test_is_found_in_the_working_directory(self, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        other = bundle.parent / "merged"
        other.mkdir()
        (bundle / "config.json").write_text(f'{{"root": {{"path": "{other}"}}}}')
        monkeypatch.chdir(bundle)
        assert find_config(str(other)) == {"root": {"path": str(other)}}

    def test_is_not_that_of_another_container(self, bundle: Path) -> None:
        (bundle / "config.json").write_text('{"root": {"path": "other"}}')
        assert find_config(str(bundle / "rootfs")) is None

    @pytest.mark.parametrize("where", [".", "sub"])
    def test_is_not_one_of_the_image(self, bundle: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """A working directory inside of the image, as createContainer hooks have it: it would allow every device."""
        (bundle / "config.json").unlink()
        inside = bundle / "rootfs" / where
        inside.mkdir(exist_ok=True)
        (inside / "config.json").write_text(f'{{"root": {{"path": "{bundle}/rootfs"}}}}')
        monkeypatch.chdir(inside)
        assert find_config(str(bundle / "rootfs")) is None

    def test_is_not_one_that_others_could_have_written(self, bundle: Path) -> None:
        (bundle / "config.json").chmod(0o666)
        assert find_config(str(bundle / "rootfs")) is None
        if os.geteuid() == 0:
            (bundle / "config.json").chmod(0o644)
            os.chown(bundle / "config.json", 12345, 12345)
            assert find_config(str(bundle / "rootfs")) is None

    def test_is_not_needed(self, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (bundle / "config.json").write_text("[")
        gone = bundle.parent / "gone"
        gone.mkdir()
        monkeypatch.chdir(gone)
        gone.rmdir()
        assert find_config(str(bundle / "rootfs")) is None
