"""``ocigpu-container-cli`` prints what nvidia-container-cli prints."""

from pathlib import Path

import pytest

from ocigpu.core.errors import OcigpuError
from ocigpu.core.facts import DeviceNode, HostFacts, HostFile, Library
from ocigpu.entry.container_cli.list import render_csv, render_info, render_list
from ocigpu.entry.container_cli.main import main
from ocigpu.entry.container_cli.options import make_parser

DATA = Path(__file__).parent / "data"
CONTROL = ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"]
BINARIES = [
    f"/usr/bin/nvidia-{name}" for name in ("smi", "debugdump", "persistenced", "cuda-mps-control", "cuda-mps-server")
]
CAPABILITIES = "/proc/driver/nvidia/capabilities"


def list_lines(facts: HostFacts, *words: str, channels: list[int] | None = None) -> list[str]:
    return render_list(facts, make_parser().parse_args(["list", *words]), channels or [])


def test_info_is_the_vendors_output(facts: HostFacts) -> None:
    assert "\n".join(render_info(facts)) + "\n" == (DATA / "info-8gpu.txt").read_text()


def test_list_is_the_vendors_output_in_the_vendors_order(facts: HostFacts) -> None:
    assert list_lines(facts) == (DATA / "list-8gpu.txt").read_text().splitlines()


def test_info_as_csv_has_two_tables_and_quotes_nothing(facts: HostFacts) -> None:
    lines = render_csv(facts)
    assert lines[:4] == [
        "NVRM version,CUDA version",
        "550.163.01,12.4",
        "",
        "Device Index,Device Minor,Model,Brand,GPU UUID,Bus Location,Architecture",
    ]
    assert lines[4] == (
        "0,0,Mock NVIDIA A100-SXM4-40GB,Nvidia,GPU-4d4f434b-0000-0000-0000-000000000000,00000000:01:00.0,8.0"
    )
    assert len(lines) == 12


def test_info_without_gpus_still_has_the_second_header_as_csv(facts: HostFacts) -> None:
    bare = facts._replace(gpus=())
    assert len(render_csv(bare)) == 4
    assert render_info(bare) == ["NVRM version:   550.163.01", "CUDA version:   12.4"]


def test_a_driver_root_is_not_printed(facts: HostFacts) -> None:
    library = Library("/run/driver/usr/lib64/libcuda.so.1.2", "libcuda.so.1.2", "libcuda.so.1", ("compute",))
    host = facts._replace(driver_root="/run/driver", libraries=(library,))
    assert list_lines(host, "-l") == ["/usr/lib64/libcuda.so.1.2"]


def test_a_driver_root_that_is_named_is_no_simulated_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program, settings = tmp_path / "simulated/usr/bin/nvidia-smi", tmp_path / "config.toml"
    program.parent.mkdir(parents=True)
    program.touch(0o755)
    settings.write_text(f'[simulation]\nroot = "{tmp_path}/simulated"\n')
    settings.chmod(0o644)
    monkeypatch.setenv("OCIGPU_CONFIG", str(settings))
    main(["--root", str(tmp_path / "other"), "list", "-b"])
    said = capsys.readouterr()
    assert "nvidia-smi" not in said.out
    assert "simulated" not in said.err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["-d", "0"], [*CONTROL, "/dev/nvidia0"]),
        (["-d", "3", "--device=1"], [*CONTROL, "/dev/nvidia1", "/dev/nvidia3"]),
        (["-d", "2,2,,2"], [*CONTROL, "/dev/nvidia2"]),
        (["-d", "GPU-4D4F434B-0000-0000-0000-000000000005"], [*CONTROL, "/dev/nvidia5"]),
        (["-d", "0:3:0.0"], [*CONTROL, "/dev/nvidia2"]),
        (["-d", "00000000:03:00.7"], [*CONTROL, "/dev/nvidia2"]),
        (["-d", "0,ALL,nonsense"], [*CONTROL, *(f"/dev/nvidia{n}" for n in range(8))]),
        (["-b"], BINARIES),
        (["-i"], ["/run/nvidia-persistenced/socket"]),
        (["-i", "--no-persistenced"], []),
        (["--ipcs", "--no-fabricmanager"], ["/run/nvidia-persistenced/socket"]),
        (["-f"], [f"/lib/firmware/nvidia/550.163.01/gsp_{n}.bin" for n in ("ga10x", "tu10x")]),
        (["-f", "--no-gsp-firmware"], []),
        (["--no-persistenced"], []),
        (["--compat32"], []),
        (["--fi"], [f"/lib/firmware/nvidia/550.163.01/gsp_{n}.bin" for n in ("ga10x", "tu10x")]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and len(value) < 3 else None,
)  # fmt: skip
def test_list_prints_only_what_its_options_name(facts: HostFacts, words: list[str], expected: list[str]) -> None:
    assert list_lines(facts, *words) == expected


def test_list_prints_32_bit_libraries_after_the_others_when_asked(facts: HostFacts) -> None:
    old = Library(
        "/usr/lib/i386-linux-gnu/libcuda.so.550.163.01", "libcuda.so.550.163.01", "libcuda.so.1", ("compute",), 32
    )
    host = facts._replace(libraries=(old, facts.libraries[0]))
    assert list_lines(host, "-l") == [facts.libraries[0].host_path]
    assert list_lines(host, "-l", "--compat32") == [facts.libraries[0].host_path, old.host_path]
    assert list_lines(host)[-5:-3] == [facts.libraries[0].host_path, old.host_path]


def test_a_library_that_the_vendor_does_not_know_comes_last(facts: HostFacts) -> None:
    ours = Library("/usr/lib/libnvidia-new.so.1", "libnvidia-new.so.1", "libnvidia-new.so.1", ("compute",))
    assert list_lines(facts._replace(libraries=(ours, *facts.libraries)), "-l")[-1] == ours.host_path


def test_one_word_that_names_a_channel_lists_everything_and_two_only_the_channel(facts: HostFacts) -> None:
    channel = "/dev/nvidia-caps-imex-channels/channel3"
    lines = list_lines(facts, "--imex-channel=3", channels=[3])
    assert lines[12] == channel
    assert len(lines) == len(list_lines(facts)) + 1
    assert list_lines(facts, "--imex-channel", "3", channels=[3]) == [channel]


def test_a_mig_device_brings_its_gpu_its_access_files_and_its_nodes(mig_facts: HostFacts) -> None:
    expected = [
        *CONTROL,
        "/dev/nvidia1",
        f"{CAPABILITIES}/gpu1/mig/gi2/access",
        f"{CAPABILITIES}/gpu1/mig/gi2/ci0/access",
        "/dev/nvidia-caps/nvidia-cap147",
        "/dev/nvidia-caps/nvidia-cap148",
    ]
    assert list_lines(mig_facts, "-d", "1:1") == expected
    assert list_lines(mig_facts, "-d", "mig-bbbbbbbb-0000-0000-0000-000000000000") == expected
    assert len(list_lines(mig_facts, "-d", "all")) == 4 + 8 + 8


def test_mig_config_lists_the_capability_and_every_node_of_the_selected_gpus(mig_facts: HostFacts) -> None:
    lines = list_lines(mig_facts, "-d", "1", "--mig-config", "all")
    assert lines[5:] == [
        f"{CAPABILITIES}/mig/config",
        "/dev/nvidia-caps/nvidia-cap1",
        f"{CAPABILITIES}/gpu1",
        "/dev/nvidia-caps",
        *(f"/dev/nvidia-caps/nvidia-cap{minor}" for minor in (138, 139, 147, 148)),
    ]
    assert list_lines(mig_facts, "--mig-monitor", "all") == [
        f"{CAPABILITIES}/mig/monitor",
        "/dev/nvidia-caps/nvidia-cap2",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-d", "8"], "device error: 8: unknown device"),
        (["-d", "0,none"], "device error: none: unknown device"),
        (["-d", "0:9"], "device error: 0:9: unknown device"),
        (["-d", "a:b:c"], "device error: a:b:c: unknown device"),
        (["-d", "²"], "device error: ²: unknown device"),
        (["-d", "\x1b[2J"], "device error: \\x1b[2J: unknown device"),
        (["--mig-config", "0"], "mig-config error: only 'all' devices are currently supported"),
        (["-d", "1:0", "--mig-monitor", "all"], "cannot enable mig-monitor with specific MIG devices selected"),
    ],
    ids=lambda value: None if isinstance(value, list) else value.encode("unicode_escape").decode(),
)
def test_list_refuses_what_it_cannot_find(mig_facts: HostFacts, words: list[str], message: str) -> None:
    with pytest.raises(OcigpuError) as caught:
        list_lines(mig_facts, *words)
    assert message in caught.value.message


def test_without_gpus_any_device_list_is_accepted(facts: HostFacts) -> None:
    assert list_lines(facts._replace(gpus=()), "-d", "whatever") == CONTROL


def test_a_gpu_without_node_lists_none(facts: HostFacts) -> None:
    host = facts._replace(
        gpus=(facts.gpus[0]._replace(node=None),), control_nodes=(DeviceNode("/dev/nvidiactl", "", 195, 255),)
    )
    assert list_lines(host, "-d", "all") == ["/dev/nvidiactl"]


def test_sockets_are_dropped_by_daemon(facts: HostFacts) -> None:
    fabric = HostFile(
        "/run/nvidia-fabricmanager/socket", "/var/run/nvidia-fabricmanager/socket", ("utility",), "socket"
    )
    host = facts._replace(sockets=(*facts.sockets, fabric))
    assert list_lines(host, "-i", "--no-persistenced") == ["/run/nvidia-fabricmanager/socket"]
    assert list_lines(host, "-i", "--no-fabricmanager") == ["/run/nvidia-persistenced/socket"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no command given"),
        (["frobnicate"], "invalid choice"),
        (["--frobnicate", "info"], "--frobnicate"),
        (["info", "--json"], "--json"),
        (["configure", "--pid=1"], "the following arguments are required: ROOTFS"),
        (["list", "--imex-channel", "x"], "error parsing IMEX info: unsupported IMEX channel value: x"),
        (["list", "--imex-channel=0,1048576"], "unsupported IMEX channel value: 1048576"),
    ],
    ids=lambda value: None if isinstance(value, str) else " ".join(value) or "nothing",
)
def test_every_failure_ends_with_status_1_and_one_message(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("ocigpu-container-cli: OCIGPU-")
    assert message in captured.err


@pytest.mark.parametrize("word", ["--help", "-?", "--usage", "-V", "--version"])
@pytest.mark.parametrize("command", [[], ["info"], ["list"], ["configure"]], ids=["global", "info", "list", "set"])
def test_help_and_version_exist_at_every_level(
    command: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, word]) == 0
    assert capsys.readouterr().out.startswith(("usage: ocigpu-container-cli", "cli-version: "))


@pytest.mark.parametrize("user", [["-u"], ["--user"], ["-u0:0"], ["--user=root:video"]], ids=" ".join)
def test_user_takes_its_value_attached_or_not_at_all(user: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*user, "-k", "configure", "-u"]) == 1  # which is --utility there
    assert "the following arguments are required: ROOTFS" in capsys.readouterr().err


def test_a_message_also_goes_to_the_debug_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    assert main(["-d", str(log), "list", "--imex-channel=x"]) == 1
    assert log.read_text() == capsys.readouterr().err
