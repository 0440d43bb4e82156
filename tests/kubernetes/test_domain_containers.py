"""ComputeDomains in containers that runc starts: a channel in a pod, and a daemon with the rights of its DaemonSet."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_deployment_containers as deployment
from domain_lab import DAEMON_ACCOUNT, OPTIONS, RACK, SPACE, Rack
from support import nvidia_imex, requirements
from support.cluster import Cluster
from support.process import run, wait_for
from support.product import PROGRAMS
from support.runtimes import answers, container_id, probe, run_container, set_cgroup
from test_deployment_containers import as_oci, image

from ocigpu.bundle.inject import inject
from ocigpu.cdi.registry import read_registry
from ocigpu.cdi.write import write_spec
from ocigpu.core.settings import Settings
from ocigpu.gpus.nvidia.discover import read_host_facts
from ocigpu.kubernetes.cluster.owners import DOMAIN_DRIVER
from ocigpu.kubernetes.domains.driver import make_domain_devices
from ocigpu.kubernetes.domains.objects import daemon_set
from ocigpu.kubernetes.domains.specs import make_domain_spec
from ocigpu.kubernetes.dra.claims import Allotted, ClaimRef
from ocigpu.kubernetes.dra.configs import DeviceConfig
from ocigpu.kubernetes.dra.devices import DraNode
from ocigpu.kubernetes.dra.specs import NodeView, cdi_device
from ocigpu.kubernetes.node.config import PluginOptions
from ocigpu.sim.create import create_host
from ocigpu.system.settings_file import read_settings

__all__ = ["image"]
pytestmark = [pytest.mark.root, pytest.mark.engine]
CHANNELS = "/dev/nvidia-caps-imex-channels"


def runc() -> str:
    program = requirements.find_program("runc")
    requirements.require("" if program else "not installed: runc")
    return str(program)


@pytest.mark.parametrize("every", [False, True])
def test_a_container_opens_the_channels_of_its_claim_and_no_others(
    session_directory: Path, work_directory: Path, make_bundle: Callable[..., Path], every: bool
) -> None:
    directory = session_directory / "rack host"
    if not directory.exists():
        create_host(str(directory), 2, "gb200", clique=RACK)
    settings = read_settings(str(directory / "config.toml"))
    facts = read_host_facts(settings)
    view = NodeView(DraNode(facts), make_domain_devices(RACK), settings, PluginOptions())
    claim = ClaimRef("team", "uid-1", "c")
    allotted = Allotted("channel", view.devices[0], DeviceConfig(domain="u", every=every))
    write_spec(make_domain_spec(claim, [allotted], DOMAIN_DRIVER, view, RACK), str(work_directory / "c.json"), "json")
    registry = read_registry(Settings(cdi_spec_dirs=(str(work_directory),)))
    edits = registry.resolve([cdi_device(DOMAIN_DRIVER, claim, "channel-0")]).edits
    major = str(dict(facts.majors)["nvidia-caps-imex-channels"])
    looked = probe(
        ["open", f"{CHANNELS}/channel0", f"{CHANNELS}/channel1", "/dev/nvidia0"],
        ["mknod", "/dev/own", major, "1"],
        ["open", "/dev/own"],
    )
    bundle = make_bundle(looked, edit=lambda config: inject(config, edits))
    done = run_container([runc()], bundle, container_id())
    assert done.returncode == 0, done.stderr
    said = answers(done.stdout)
    # ENXIO: the device rules allow it, and no driver is behind the node
    assert said["open", f"{CHANNELS}/channel0"] == "ENXIO"
    assert said["open", f"{CHANNELS}/channel1"] == ("ENXIO" if every else "ENOENT")
    assert said["open", "/dev/own"] == ("ENXIO" if every else "EPERM"), "made by the container itself"
    assert said["open", "/dev/nvidia0"] == "ENOENT"


def test_a_daemon_works_with_the_rights_of_its_daemonset(
    image: Path, work_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root without capabilities, a root file system that is read only, and /etc/hosts from the kubelet."""
    address = f"127.{os.getpid() >> 8 & 255}.{os.getpid() & 255}.9"
    monkeypatch.setitem(deployment.FIELDS, "status.podIP", address)
    monkeypatch.setitem(deployment.FIELDS, "spec.nodeName", "a")
    monkeypatch.setitem(deployment.FIELDS, "metadata.namespace", SPACE)
    for name in ("nvidia-imex", "nvidia-imex-ctl"):
        script = image / "usr/local/bin" / name
        script.write_text(f"#!{sys.executable}\n{Path(nvidia_imex.__file__).read_text()}")
        script.chmod(0o755)
    own = work_directory / "config"
    own.mkdir()
    hosts = work_directory / "hosts"
    hosts.write_text("127.0.0.1\tlocalhost\n")
    with Cluster() as cluster:
        rack = Rack(cluster, "a")
        uid = rack.add_domain()
        rack.add_claim("a", uid)
        rack.controller.resync()
        rack.run_daemons(ready=False)
        rack.set_ready("a", uid, False, address)
        rack.controller.resync()
        (own / "kubeconfig").write_text(json.dumps(cluster.kubeconfig(DAEMON_ACCOUNT)))
        found: list[dict[str, Any]] = [daemon_set(rack.domain(), OPTIONS)]
        from_claim = {"COMPUTE_DOMAIN_UUID": uid, "CLIQUE_ID": RACK}
        config = as_oci(found, "compute-domain-daemon", image, from_claim, None)
        config["process"]["args"].append("--kubeconfig=/imexd/kubeconfig")
        hosts_mount = {"destination": "/etc/hosts", "type": "bind", "source": str(hosts), "options": ["rbind", "rw"]}
        config["mounts"].append(hosts_mount)
        bundle, name = work_directory / "bundle", container_id()
        bundle.mkdir()
        (bundle / "config.json").write_text(json.dumps(config))
        set_cgroup(bundle, name)
        state = ["--root", str(work_directory / "state")]
        log = work_directory / "log"
        with log.open("w") as output:
            child = subprocess.Popen(
                [runc(), *state, "run", "--bundle", bundle, name],
                stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip

        def check() -> int:
            command = [runc(), *state, "exec", name, str(PROGRAMS / "ocigpu"), "compute-domain", "check"]
            return subprocess.run(command, capture_output=True, check=False).returncode

        try:
            wait_for("nvidia-imex", lambda: "nvidia-imex started" in log.read_text(), on_failure=log.read_text)
            wait_for("the probe", lambda: check() == 0, on_failure=log.read_text)
            assert f"{address}\tcompute-domain-daemon-0000" in hosts.read_text()
            written = {path.name for path in own.iterdir()}
            assert {"imexd.cfg", "nodes.cfg"} <= written
        finally:
            run([runc(), *state, "kill", name, "TERM"])
            assert child.wait(60) == 0, log.read_text()
