"""``ocigpu doctor --tenants``: checks over facts, and on a simulated host; what is packaged for Kata."""

import hashlib
import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from support.cluster import Cluster
from support.machine import MACHINE
from support.product import REPOSITORY

from ocigpu.cli.front.main import main
from ocigpu.doctor import tenants
from ocigpu.doctor.files import RootFiles
from ocigpu.doctor.findings import TENANTS, Finding
from ocigpu.doctor.tenant_facts import (
    KATA_CONFIGS,
    KUBELET,
    QEMU,
    TenantFacts,
    TenantFunction,
    Version,
    read_tenant_facts,
)
from ocigpu.engines.wanted import KATA_CONFIG, KATA_ENTRY
from ocigpu.engines.wanted import KATA_HANDLER as HANDLER
from ocigpu.gpus.firmware.baseline import FirmwareBaseline, approve, write_baseline
from ocigpu.kubernetes.cluster.kinds import KINDS
from ocigpu.sim.create import create_host
from ocigpu.sim.fabric import SimulatedManager

CHART = REPOSITORY / "packaging/kubernetes/chart"

GIB = 1 << 30
CONFIG: dict[str, Any] = {
    "hypervisor": {
        "qemu": {
            "cold_plug_vfio": "root-port", "hot_plug_vfio": "no-port", "pcie_root_port": 8, "enable_annotations": [],
        }
    },
    "runtime": {
        "create_container_timeout": 1200, "sandbox_cgroup_only": True, "static_sandbox_resource_mgmt": True,
        "pod_resource_api_sock": "/var/lib/kubelet/pod-resources/kubelet.sock",
    },
    "agent": {"kata": {"dial_timeout": 1200}},
}  # fmt: skip


def test_the_program_of_virtual_machines_is_the_machines() -> None:
    assert {path.rpartition("/qemu-system-")[2] for path in QEMU} == {MACHINE}


def gpu(number: int, **other: Any) -> TenantFunction:
    made = TenantFunction(
        f"0000:{number:02x}:00.0", 0x10DE, 0x2330, 0x0302, "vfio-pci", number, ("flr", "bus"), 128 * GIB
    )
    return made._replace(**other)


def switch(number: int, **other: Any) -> TenantFunction:
    return gpu(number, device=0x22A3, base_class=0x0680, resets=("bus",), bar=0)._replace(**other)


def member(number: int, vendor: int, base_class: int, driver: str, group: int) -> TenantFunction:
    return TenantFunction(f"0000:{number:02x}:00.1", vendor, 0x4128, base_class, driver, group)


GOOD = TenantFacts(
    Version((6, 15), "6.15.3", "/proc/sys/kernel/osrelease"),
    Version((9, 2), "9.2.0", "qemu"),
    Version((3, 25), "3.25.0", "/opt/kata/VERSION"),
    (*(gpu(number) for number in range(1, 9)), *(switch(number) for number in range(16, 20))),
    KUBELET,
    {"runtimeRequestTimeout": "20m"},
    KATA_CONFIGS[0],
    CONFIG,
    {HANDLER: "/etc/containerd/config.toml"},
    (("/etc/ocigpu/firmware.json", "Ada", ""),),
    (("vsock:42:6666", "1"),),
    dict(KINDS),
)
JUDGES: list[Callable[[TenantFacts], list[Finding]]] = [
    getattr(tenants, check.run.partition(".")[2]) for check in TENANTS
]


def bad(facts: TenantFacts) -> list[str]:
    return [f"{found.severity}: {found.text}" for judge in JUDGES for found in judge(facts) if found.is_bad]


def changed(path: str, value: Any) -> dict[str, Any]:
    """Kata's configuration with another value, None for none."""
    document: dict[str, Any] = json.loads(json.dumps(CONFIG))
    *tables, key = path.split(".")
    table = document
    for name in tables:
        table = table[name]
    table.pop(key)
    if value is not None:
        table[key] = value
    return document


def test_nothing_is_wrong_with_a_host_that_is_right() -> None:
    assert bad(GOOD) == []
    found = [one for judge in JUDGES for one in judge(GOOD)]
    assert {one.severity for one in found} == {"ok"}
    assert len(found) == len(TENANTS)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"kernel": Version((6, 8), "6.8.0-45-generic")},
            "warning: Linux 6.8.0-45-generic is older than 6.15: about 60 s more for each machine with one GPU, 8 min",
        ),
        ({"qemu": Version((9, 1), "9.1.2")}, "warning: QEMU 9.1.2 is older than 9.2"),
        ({"kata": Version((3, 24), "3.24.0")}, "warning: Kata Containers 3.24.0 is older than 3.25"),
        ({"kata": Version((3, 22), "3.22.0")}, "error: Kata Containers 3.22.0 is older than 3.23"),
        ({"kubelet": {}}, "warning: the kubelet (runtimeRequestTimeout) ends a start after 120 s; 8 GPUs need 600 s"),
        ({"kubelet": {"runtimeRequestTimeout": "5m0s"}}, "ends a start after 300 s; 8 GPUs need 600 s"),
        ({"kata_config": changed("runtime.create_container_timeout", 60)}, "Kata (create_container_timeout) ends a"),
        ({"kata_config": changed("agent.kata.dial_timeout", None)}, "Kata (dial_timeout) ends a start after 60 s"),
        ({"functions": (gpu(1, group=-1),)}, "error: 0000:01:00.0 is in no IOMMU group: the IOMMU is off"),
        (
            {"functions": (gpu(1), member(1, 0x15B3, 0x0200, "vfio-pci", 1))},
            "warning: IOMMU group 1 has 1 GPU and foreign devices: 0000:01:00.1 (15b3:4128)",
        ),
        (
            {"functions": (gpu(1), gpu(2, group=1), switch(3, group=1))},
            "warning: IOMMU group 1 has 2 GPUs and 1 NVSwitch: they can only go to one machine together",
        ),
        ({"functions": (gpu(1, driver="nvidia"),)}, "error: 0000:01:00.0 (GPU) has nvidia, not vfio-pci"),
        ({"functions": (gpu(1), switch(2, driver=""))}, "error: 0000:02:00.0 (NVSwitch) has no driver, not vfio-pci"),
        (
            {"functions": (gpu(1), member(1, 0x15B3, 0x0200, "mlx5_core", 1))},
            "error: 0000:01:00.1 (in the group 1 of one) has mlx5_core, not vfio-pci",
        ),
        ({"fabric_modes": (("vsock:42:6666", "0"),)}, "error: Fabric Manager (vsock:42:6666) has mode 0: tenants are"),
        ({"fabric_modes": ()}, "warning: 4 NVSwitches, and the mode of"),
        ({"fabric_modes": (("tcp:1", "no answer"),)}, "their Fabric Manager is unknown: tcp:1: no answer"),
        ({"functions": (gpu(1, resets=()),)}, "error: 0000:01:00.0: the kernel knows no way to reset it"),
        ({"functions": (gpu(1, resets=("pm",)),)}, "error: 0000:01:00.0: only pm, which is no reset between tenants"),
        ({"functions": (gpu(1, resets=("flr",)),)}, "note: 0000:01:00.0: flr only, no reset of the bus"),
        ({"baselines": ()}, "warning: there is no firmware baseline below /etc/ocigpu"),
        (
            {"baselines": (("/etc/ocigpu/firmware.json", "", "firmware baseline: it is a proposal"),)},
            "warning: no firmware baseline can be used: firmware baseline: it is a proposal",
        ),
        ({"handlers": {"kata": "x"}}, f"error: containerd's configuration has no runtime {HANDLER}"),
        ({"kata_config": None}, "error: Kata has no configuration for machines with GPUs"),
        ({"kata_config": changed("hypervisor.qemu.pcie_root_port", 4)}, "error: pcie_root_port is 4, not 8: each GPU"),
        (
            {"kata_config": changed("hypervisor.qemu.enable_annotations", ["kernel_params"])},
            'error: enable_annotations is ["kernel_params"], not []: a tenant\'s annotations would change the machine',
        ),
        ({"kata_config": changed("hypervisor.qemu.cold_plug_vfio", None)}, "error: cold_plug_vfio is not set, not"),
        ({"kata_config": changed("runtime.sandbox_cgroup_only", False)}, "warning: sandbox_cgroup_only is false, not"),
        ({"kata_config": changed("runtime.pod_resource_api_sock", "")}, 'error: pod_resource_api_sock is "", not'),
        ({"kinds": {"tenancies.ocigpu.io": 0}}, "error: kind tenancies.ocigpu.io is of revision 0, and this ocigpu"),
        ({"kinds": {**KINDS, "gpuleases.ocigpu.io": 99}}, "warning: kind gpuleases.ocigpu.io is of revision 99, newer"),
    ],
)
def test_what_is_wrong_is_said(change: dict[str, Any], said: str) -> None:
    found = bad(GOOD._replace(**change))
    assert len([line for line in found if said in line]) == 1, found
    assert len(found) == 1 + ("mlx5_core" in said), found  # a foreign device that VFIO has not got is both


@pytest.mark.parametrize(
    "functions",
    [
        (gpu(1), member(1, 0x8086, 0x0604, "pcieport", 1)),
        (gpu(1), member(1, 0x10DE, 0x0403, "vfio-pci", 1)),
        (gpu(1, device=0x2342, resets=("flr",)),),
    ],
    ids=["bridge in the group", "sound of the board", "GH200 has no reset of the bus"],
)
def test_what_is_as_it_must_be_is_not_said(functions: tuple[TenantFunction, ...]) -> None:
    assert bad(GOOD._replace(functions=functions)) == []


def test_what_is_not_known_is_not_checked() -> None:
    found = [one for judge in JUDGES for one in judge(TenantFacts()) if one.severity == "not-checked"]
    assert len(found) == 7
    (none,) = tenants.check_binding(TenantFacts())
    assert (none.severity, "no NVIDIA GPU is on the PCI bus" in none.text) == ("error", True)
    assert "ok" not in {one.severity for judge in JUDGES for one in judge(TenantFacts())}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("20m0s", 1200), ("1h", 3600), ("90s", 90), ("500ms", 0.5), ("5", None), (5, None), ("", None)],
)
def test_durations_of_the_kubelet(text: Any, seconds: float | None) -> None:
    assert tenants.parse_seconds(text) == seconds


# on a simulated host


@pytest.fixture
def host(work_directory: Path) -> Path:
    create_host(str(work_directory / "host"), 8, "h100", driver="none", nodes=False)
    return work_directory / "host"


def doctor(host: Path, capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    status = main(["doctor", "--tenants", "--root", str(host), *words])
    return status, capfd.readouterr().out


def test_a_simulated_host_is_examined(host: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status, out = doctor(host, capfd, "--json")
    found = {one["name"]: one for one in json.loads(out)["findings"]}
    assert status == 4
    assert found["tenants-kata"]["severity"] == found["tenants-runtime"]["severity"] == "error"
    assert "11f8:4128" in found["tenants-iommu"]["text"]
    assert found["tenants-binding"]["severity"] == found["tenants-reset"]["severity"] == "ok"
    for path, text in {
        "proc/sys/kernel/osrelease": "6.8.0-45-generic\n",
        "opt/kata/VERSION": "3.22.0\n",
        "opt/kata/versions.yaml": "assets: {hypervisor: {qemu: {version: v9.1.2}}}\n",
        KUBELET[1:]: "runtimeRequestTimeout: 2m0s\n",
        KATA_CONFIGS[0][1:]: '[hypervisor.qemu]\ncold_plug_vfio = "root-port"\n',
        "etc/containerd/conf.d/kata.toml": f"[plugins.x.containerd.runtimes.{HANDLER}]\nruntime_type = 'a'\n",
        "etc/ocigpu/firmware.json": "{}",
        "usr/share/nvidia/nvswitch/fabricmanager.cfg": "# mode\nFABRIC_MODE=0\n",
    }.items():
        (host / path).parent.mkdir(parents=True, exist_ok=True)
        (host / path).write_text(text)
    status, out = doctor(host, capfd)
    assert status == 4
    for words in (
        "Linux 6.8.0-45-generic is older than 6.15: about 60 s more for each machine with one GPU, 8 min with all 8",
        "QEMU v9.1.2 is older", "3.22.0 is older than 3.23", "ends a start after 120 s", "has mode 0",
        "pcie_root_port is not set",
    ):  # fmt: skip
        assert words in out, words
    assert "tenants-runtime" not in out
    assert "not a baseline" in out
    baseline = FirmwareBaseline({}, {})
    write_baseline(str(host / "etc/ocigpu/firmware.json"), baseline)
    assert "is a proposal: it is not signed off" in doctor(host, capfd)[1]
    write_baseline(str(host / "etc/ocigpu/firmware-2.json"), approve(baseline, "Ada"))
    assert "tenants-baseline" not in doctor(host, capfd)[1]
    (host / KUBELET[1:]).write_text("[")
    status, out = doctor(host, capfd, "--all")
    assert "not checked" in out


def test_the_manager_is_asked_where_it_is(
    fabric_host: Path, manager: SimulatedManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the library of a simulated host, and by the address of its service, as every other command."""
    sys, files = str(fabric_host / "sys"), RootFiles()

    def modes(address: str) -> tuple[tuple[str, str], ...]:
        monkeypatch.setenv("OCIGPU_FABRIC", address)
        return read_tenant_facts(files, sys, str(fabric_host)).fabric_modes

    assert modes("127.0.0.1:6666")[-1] == ("127.0.0.1:6666", "1")
    manager.say("mode 0")
    assert modes("127.0.0.1:6666")[-1] == ("127.0.0.1:6666", "0")
    service = f"grpc:unix:{fabric_host}/none.sock"
    ((where, why),) = modes(service)[-1:]
    assert (where, "list partitions: " + service in why) == (service, True)


def test_the_cluster_is_asked_for_the_revision_of_its_kinds(
    host: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kind that came from crds/ of an earlier chart has none."""

    def found() -> tuple[str, str]:
        _, out = doctor(host, capfd, "--json")
        (one,) = [one for one in json.loads(out)["findings"] if one["name"] == "tenants-kinds"]
        return one["severity"], one["text"]

    monkeypatch.delenv("KUBECONFIG", raising=False)
    assert found()[0] == "not-checked"
    with Cluster() as cluster:
        monkeypatch.setenv("KUBECONFIG", str(cluster.write_kubeconfig(tmp_path / "kubeconfig")))
        assert found() == ("not-checked", "the cluster has none of ocigpu's resource types")
        cluster.apply_manifests(CHART / "kinds")
        assert found()[0] == "ok"
        document = cluster.get("CustomResourceDefinition", "tenancies.ocigpu.io")
        del document["metadata"]["annotations"]["ocigpu.io/kind-revision"]
        cluster.update(document)
        assert found()[0] == "error"
    assert found()[0] == "not-checked", "no process answers"


def test_a_kind_that_changes_has_another_revision() -> None:
    """The contents of each revision, by hash: who changes a kind counts up here, in kinds.py and in the annotation."""
    contents = {
        "gpuleases.ocigpu.io": (1, "b611b1e3165a51e4"),
        "tenancies.ocigpu.io": (1, "b617ecc28ecb8c73"),
    }
    for path in (CHART / "kinds").iterdir():
        document = yaml.safe_load(path.read_text())
        name, annotations = document["metadata"]["name"], document["metadata"]["annotations"]
        digest = hashlib.sha256(json.dumps(document["spec"], sort_keys=True).encode()).hexdigest()[:16]
        assert contents.pop(name) == (KINDS[name], digest), f"{name}: {digest}"
        assert annotations == {"helm.sh/resource-policy": "keep", "ocigpu.io/kind-revision": str(KINDS[name])}
    assert not contents


def test_a_host_without_a_driver_by_design_has_no_error_for_it(host: Path, capfd: pytest.CaptureFixture[str]) -> None:
    main(["doctor", "--root", str(host), "--json"])
    found = {one["name"]: one for one in json.loads(capfd.readouterr().out)["findings"]}
    assert [name for name, one in found.items() if one["severity"] in ("error", "warning")] == ["simulated-host"]
    assert "virtual machines" in found["no-driver"]["text"]
    assert "virtual machine's" in found["fabric-manager"]["text"]


def test_the_command_lists_its_checks_and_refuses_what_it_has_not(
    host: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    status, out = doctor(host, capfd, "--list")
    assert (status, [line.split()[0] for line in out.splitlines()[1:]]) == (0, [check.name for check in TENANTS])
    for words in (["--fix", "--yes"], ["--format", "junit"], ["--html", str(host / "a")], ["--markdown"]):
        assert doctor(host, capfd, *words)[0] == 2


def test_the_page_names_every_check() -> None:
    page = (REPOSITORY / "docs/tenants/KATA.md").read_text()
    assert re.findall(r"^\| `(tenants-[a-z]+)`", page, re.M) == [check.name for check in TENANTS]


# packaging


def test_the_runtime_class_is_valid_and_of_containerds_entry() -> None:
    document = yaml.safe_load((REPOSITORY / "packaging/kubernetes/kata-runtimeclass.yaml").read_text())
    kubernetes_validate.validate(document, "1.34", strict=True)
    assert document["handler"] == HANDLER
    assert document["overhead"]["podFixed"]["memory"] == "10Gi"
    assert HANDLER in KATA_ENTRY["runtime_type"]
    assert KATA_CONFIG in KATA_CONFIGS


def test_containerd_gets_katas_entry_beside_ours(work_directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    config = work_directory / "etc/containerd/config.toml"
    config.parent.mkdir(parents=True)
    before = 'version = 2\n[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]\n'
    before += 'runtime_type = "io.containerd.runc.v2"\n'
    config.write_text(before)
    words = ["engine", "configure", "containerd", "--root", str(work_directory), "--yes", "--runtime", "/bin/true"]
    assert main([*words, "--kata"]) == 0
    text = config.read_text()
    assert f"runtimes.{HANDLER}]" in text
    assert 'runtime_path = "/opt/kata/bin/containerd-shim-kata-v2"' in text
    assert f'ConfigPath = "{KATA_CONFIG}"' in text
    assert "pod_annotations" not in text
    for again in ([*words, "--kata"], words):  # it stays until everything is removed
        assert main(again) == 0
        assert config.read_text() == text
    assert main(["engine", "remove", "containerd", "--root", str(work_directory), "--yes"]) == 0
    assert config.read_text() == before
    assert main(["engine", "configure", "docker", "--kata", "--root", str(work_directory)]) == 2
    capfd.readouterr()


def test_the_service_machine_has_the_switches_and_nothing_else(host: Path) -> None:
    domain = ET.parse(REPOSITORY / "packaging/libvirt/fabric-service-vm.xml").getroot()
    devices = domain.findall("devices/hostdev")
    assert all(device.get("managed") == "no" for device in devices)
    addresses = set()
    for device in devices:
        found = device.find("source/address")
        assert found is not None
        parts = [int(str(found.get(key)), 16) for key in ("domain", "bus", "slot", "function")]
        addresses.add("{:04x}:{:02x}:{:02x}.{:x}".format(*parts))
    sysfs = host / "sys/bus/pci/devices"
    switches = {path.name for path in sysfs.iterdir() if (path / "device").read_text().strip() == "0x22a3"}
    assert addresses == switches
    assert [domain.findtext(name) for name in ("on_poweroff", "on_reboot")] == ["destroy", "destroy"]
