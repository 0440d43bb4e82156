"""Units of systemd and the rule of udev: understood by those programs, and true to the commands."""

import configparser
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from support.product import PROGRAMS, REPOSITORY

from ocigpu.cdi.write import DEFAULT_OUTPUT
from ocigpu.cli.front.main import main
from ocigpu.kubernetes.mig.node import BOOT_FILE

UNITS = sorted((REPOSITORY / "packaging/systemd").iterdir())
MIG = REPOSITORY / "packaging/systemd/ocigpu-mig.service"
TENANTS = {
    "ocigpu-fabric-restore.service": ("fabric restore --follow", "--address vsock:42:6666"),
    "ocigpu-fabric-serve.service": ("fabric serve", "vsock:6667 --allow cid:2"),
    "ocigpu-lease-agent.service": ("lease agent", '--address vsock:42:6666 --check-program "/bin/check --quick"'),
}
"""Those for tenants: the command, and words of it in the file that an operator writes."""
SERVICES = [path for path in UNITS if path.suffix == ".service" and path != MIG and path.name not in TENANTS]
"""Those that write the CDI specification."""
RULES = REPOSITORY / "packaging/udev/70-ocigpu.rules"
NEWER_KEYS = ("RestartSteps", "RestartMaxDelaySec")
"""Known from systemd 254 on; older ones warn and go on."""
RULE_PART = re.compile(r'(ACTION|SUBSYSTEM|KERNEL|TAG|RUN|ENV\{[A-Z_]+\})(==|\+=)"([^"]*)"')


def read_unit(path: Path) -> dict[str, list[tuple[str, str]]]:
    """Return the (key, value) pairs of each section; a key may be there more than once."""
    sections: dict[str, list[tuple[str, str]]] = {}
    pairs: list[tuple[str, str]] = []
    for line in path.read_text().splitlines():
        if line.startswith("["):
            pairs = sections.setdefault(line.strip("[]"), [])
        elif line and not line.startswith("#"):
            key, equals, value = line.partition("=")
            assert equals, line
            pairs.append((key, value))
    return sections


def values(path: Path, section: str, key: str) -> list[str]:
    return [value for name, value in read_unit(path)[section] if name == key]


def test_systemd_understands_the_units(tmp_path: Path) -> None:
    if not shutil.which("systemd-analyze"):  # then at least: sections and keys
        parser = configparser.ConfigParser(strict=False, interpolation=None)
        assert sorted(parser.read(UNITS)) == sorted(map(str, UNITS))
        return
    for path in UNITS:
        (tmp_path / path.name).write_text(path.read_text().replace("/usr/local/bin/", f"{PROGRAMS}/"))
    copies = sorted(map(str, tmp_path.iterdir()))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", *copies], capture_output=True, text=True)
    said = [line for line in done.stderr.splitlines() if str(tmp_path) in line or "ocigpu" in line]
    assert [line for line in said if not any(key in line for key in NEWER_KEYS)] == []


@pytest.mark.parametrize("path", SERVICES, ids=lambda path: path.name)
def test_a_service_starts_a_command_that_exists_and_may_write_its_file(path: Path) -> None:
    (command,) = values(path, "Service", "ExecStart")
    program, *arguments = command.split()
    assert program == "/usr/local/bin/ocigpu"
    done = subprocess.run([PROGRAMS / "ocigpu", *arguments, "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "NVIDIA_CTK_CDI_OUTPUT_FILE_PATH" in " ".join(done.stdout.split())
    assert values(path, "Service", "Environment") == [f"NVIDIA_CTK_CDI_OUTPUT_FILE_PATH={DEFAULT_OUTPUT}"]
    writable = " ".join(values(path, "Service", "ReadWritePaths")).replace("-/", "/").split()
    assert {"/etc/cdi", "/var/run/cdi"} <= set(writable) or not values(path, "Service", "ProtectSystem")


@pytest.mark.parametrize("path", SERVICES, ids=lambda path: path.name)
def test_a_service_makes_the_nodes_and_their_links_first(path: Path) -> None:
    """With all privileges, and whatever comes of it: "-+" (systemd.service(5))."""
    (before,) = values(path, "Service", "ExecStartPre")
    program, *arguments = before.removeprefix("-+").split()
    assert before.startswith("-+/usr/local/bin/ocigpu "), "install.sh puts the prefix in its place"
    done = subprocess.run([PROGRAMS / "ocigpu", *arguments, "--help"], capture_output=True, text=True)
    assert (program, done.returncode) == ("/usr/local/bin/ocigpu", 0)
    assert "links in /dev/char" in " ".join(done.stdout.split())


@pytest.mark.parametrize("path", SERVICES, ids=lambda path: path.name)
def test_a_service_never_gives_up_and_waits_longer_each_time(path: Path) -> None:
    assert values(path, "Unit", "StartLimitIntervalSec") == ["0"]
    assert values(path, "Service", "Restart") == ["on-failure"]
    assert values(path, "Service", "RestartSteps")
    assert values(path, "Service", "RestartMaxDelaySec")


def test_the_services_that_enter_no_container_are_confined_alike() -> None:
    own = ("Type", "ExecStart", "PrivateNetwork")
    alike = [path for path in SERVICES if path.name != "ocigpu-repair.service"]
    first, second = ([pair for pair in read_unit(path)["Service"] if pair[0] not in own] for path in alike)
    assert first == second


def test_what_cuts_gpus_at_boot_takes_what_the_manager_writes() -> None:
    assert values(MIG, "Service", "ExecStart") == ["/usr/local/bin/ocigpu mig apply"]
    assert values(MIG, "Service", "EnvironmentFile") == [BOOT_FILE]
    assert BOOT_FILE in values(MIG, "Unit", "ConditionPathExists")
    done = subprocess.run([PROGRAMS / "ocigpu", "mig", "apply", "--help"], capture_output=True, text=True, check=True)
    assert {"MIG_PARTED_SELECTED_CONFIG", "MIG_PARTED_CONFIG_FILE"} <= set(re.findall(r"MIG_PARTED_\w+", done.stdout))
    (before,) = values(MIG, "Unit", "Before")
    assert {path.name for path in SERVICES} | {"kubelet.service", "containerd.service"} <= set(before.split())


@pytest.mark.parametrize("path", [path for path in UNITS if path.suffix == ".service"], ids=lambda path: path.name)
def test_no_service_has_more_rights_than_it_says(path: Path) -> None:
    (rights,) = values(path, "Service", "CapabilityBoundingSet")
    assert rights.startswith("CAP_")
    confined = ["NoNewPrivileges", "RestrictRealtime", "LockPersonality"]
    if path.name != "ocigpu-repair.service":  # it enters containers, as the file says
        confined += [
            "ProtectControlGroups",
            "ProtectKernelLogs",
            "ProtectKernelModules",
            "RestrictNamespaces",
            "RestrictSUIDSGID",
        ]
        assert values(path, "Service", "ProtectSystem") == ["strict"]
    assert [values(path, "Service", key) for key in confined] == [["yes"]] * len(confined)
    assert values(path, "Service", "SystemCallArchitectures") == ["native"]
    assert values(path, "Service", "RestrictAddressFamilies")


@pytest.mark.parametrize("name", TENANTS)
def test_a_service_for_tenants_takes_its_words_from_a_file_and_is_confined(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    unit, (command, words) = REPOSITORY / "packaging/systemd" / name, TENANTS[name]
    (file,) = values(unit, "Service", "EnvironmentFile")
    assert values(unit, "Unit", "ConditionPathExists") == [file] == [f"/etc/ocigpu/{name[7:-8]}.env"]
    (started,) = values(unit, "Service", "ExecStart")
    variable = f"OCIGPU_{name[7:-8].replace('-', '_').upper()}"
    assert started == f"/usr/local/bin/ocigpu {command} ${variable}"
    # the words are split by systemd, quotes respected: systemd.service(5)
    assert main([*command.split(), *shlex.split(words), "--no-such-option"]) == 2
    assert "--no-such-option" in capsys.readouterr().err
    assert f"{variable}={words.split()[0]}" in unit.read_text(), "an example"
    assert values(unit, "Unit", "StartLimitIntervalSec") == ["0"]
    confined = ("NoNewPrivileges", "ProtectKernelModules", "RestrictNamespaces", "RestrictSUIDSGID", "LockPersonality")
    assert [values(unit, "Service", key) for key in confined] == [["yes"]] * len(confined)
    assert values(unit, "Service", "ProtectSystem") == ["strict"]
    assert values(unit, "Service", "RuntimeDirectory") == ["ocigpu"]
    assert values(unit, "Service", "Environment") == ["TMPDIR=/run/ocigpu"], "for sockets that lead to a vsock"


def rules() -> list[list[tuple[str, str, str]]]:
    lines = [line for line in RULES.read_text().splitlines() if line and not line.startswith("#")]
    found = []
    for line in lines:
        parts = [RULE_PART.fullmatch(part) for part in line.split(", ")]
        assert all(parts), line
        found.append([(part[1], part[2], part[3]) for part in parts if part])
    return found


def test_the_rules_are_well_formed_and_start_the_service() -> None:
    for parts in rules():
        keys = [key for key, _, _ in parts]
        assert keys[:2] == ["ACTION", "SUBSYSTEM"]
        assert ("RUN" in keys) or ("TAG", "+=", "systemd") in parts
        assert "ocigpu-cdi-refresh.service" in parts[-1][2]
        assert parts[-1][0] in ("RUN", "ENV{SYSTEMD_WANTS}")
        # a device that goes cannot want a unit
        assert (parts[-1][0] == "RUN") == ("remove" in parts[0][2])


def test_udev_understands_the_rules() -> None:
    udevadm = shutil.which("udevadm")
    knows = udevadm and subprocess.run([udevadm, "verify", "--help"], capture_output=True).returncode == 0
    if udevadm and knows:  # from systemd 254 on
        done = subprocess.run([udevadm, "verify", RULES], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    else:
        assert rules()


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        ({"ACTION": "add", "SUBSYSTEM": "module", "KERNEL": "nvidia"}, True),
        ({"ACTION": "add", "SUBSYSTEM": "module", "KERNEL": "nvidia_uvm"}, True),
        ({"ACTION": "remove", "SUBSYSTEM": "module", "KERNEL": "nvidia_uvm"}, True),
        ({"ACTION": "add", "SUBSYSTEM": "module", "KERNEL": "nvidiafb"}, False),
        ({"ACTION": "bind", "SUBSYSTEM": "pci", "PCI_ID": "10DE:2330", "PCI_CLASS": "30200"}, True),
        ({"ACTION": "unbind", "SUBSYSTEM": "pci", "PCI_ID": "10DE:1EB8", "PCI_CLASS": "30000"}, True),
        ({"ACTION": "bind", "SUBSYSTEM": "pci", "PCI_ID": "10DE:10F7", "PCI_CLASS": "40300"}, False),
        ({"ACTION": "bind", "SUBSYSTEM": "pci", "PCI_ID": "8086:1533", "PCI_CLASS": "30000"}, False),
    ],
    ids=["driver", "uvm", "uvm goes", "another module", "GPU", "GPU goes", "sound of a GPU", "another vendor"],
)
def test_the_rules_meet_the_events_of_gpus_and_their_driver(event: dict[str, str], expected: bool) -> None:
    def meets(parts: list[tuple[str, str, str]]) -> bool:
        wanted = [(key.removeprefix("ENV{").rstrip("}"), value) for key, operator, value in parts if operator == "=="]
        return all(_matches(event.get(key, ""), value) for key, value in wanted)

    assert any(map(meets, rules())) == expected


def _matches(text: str, patterns: str) -> bool:
    """udev(7): patterns as of the shell, alternatives with "|"."""
    translated = (re.escape(item).replace(r"\*", ".*").replace(r"\?", ".") for item in patterns.split("|"))
    return any(re.fullmatch(item, text) for item in translated)
