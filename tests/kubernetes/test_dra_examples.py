"""Pods of the published examples, from their claims to containers that runc starts: each has exactly its devices.

The scheduler's part is done by the search of ``ocigpu explain``, the kubelet's by its double, the engine's by our CDI.
"""

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from dra_lab import API, DRIVER, RunningDriver, dra_driver, dra_kubelet
from mps_lab import make_mps_host
from support import requirements
from support.cluster import Cluster
from support.product import SimulatedHost, gpu_names, listed_uuids
from support.products import one_in
from support.programs import AskedProgram
from support.runtimes import container_id, run_container, script

from ocigpu.bundle.inject import inject
from ocigpu.cdi.registry import read_registry
from ocigpu.core.settings import Settings
from ocigpu.kubernetes.dra.fit import fit_claim, held_devices, published_devices
from ocigpu.kubernetes.dra.metadata import ROOT as METADATA
from ocigpu.sim.create import create_host

pytestmark = [pytest.mark.root, pytest.mark.engine]
EXAMPLES = yaml.safe_load(Path(__file__).with_name("dra-examples.yaml").read_text())
CLASSES = {
    name: {
        "spec": {
            "selectors": [
                {
                    "cel": {
                        "expression": f"device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].type == '{kind}'"
                    }
                }
            ]
        }
    }
    for name, kind in (("gpu.nvidia.com", "gpu"), ("mig.nvidia.com", "mig"), ("vfio.gpu.nvidia.com", "vfio"))
}
LOOK = (["nvidia-smi", "-L"], ["ls", "/dev"], ["env"])


class DraHost(NamedTuple):
    """A node with its driver, its kubelet and the cluster's API server."""

    directory: Path
    cluster: Cluster
    kubelet: AskedProgram
    driver: RunningDriver
    place: Path

    @property
    def is_driverless(self) -> bool:
        return not (self.directory / "proc/driver/nvidia").exists()

    def devices(self) -> dict[str, dict[str, Any]]:
        """Return the published devices by name."""
        slices = [each["spec"] for each in self.cluster.objects("ResourceSlice")]
        return {each.name: each.spec for each in published_devices(slices)[0]}

    def schedule(self, spec: dict[str, Any], name: str) -> tuple[list[str], dict[str, Any]]:
        """Make a claim and allocate it; returns it as the kubelet names it, and its allocation."""
        slices = [each["spec"] for each in self.cluster.objects("ResourceSlice")]
        devices, notes = published_devices(slices)
        assert notes == ()
        fits = fit_claim(spec, CLASSES, devices, held_devices(self.cluster.objects("ResourceClaim")))
        assert not any(fit.problem for fit in fits), fits
        results = [
            {"request": fit.request, "driver": each.driver, "pool": each.pool, "device": each.name}
            for fit in fits
            for each in fit.chosen
        ]
        config = [{"source": "FromClaim", **each} for each in spec["devices"].get("config", ())]
        document = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "spec": spec}
        made = self.cluster.create({**document, "metadata": {"name": name, "namespace": "team"}})
        allocation = {"devices": {"results": results, "config": config}}
        self.cluster.update({**made, "status": {"allocation": allocation}}, sub="status")
        return ["team", made["metadata"]["uid"], name], allocation


def claim_spec(short: dict[str, Any]) -> dict[str, Any]:
    """Return the spec of a claim from the few words of an example."""
    requests = [
        {
            "name": name,
            "exactly": {
                "deviceClassName": device_class,
                "selectors": [
                    {"cel": {"expression": text}} for key, text in short.get("selectors", {}).items() if key == name
                ],
            },
        }
        for name, device_class in short["requests"].items()
    ]
    config = []
    for each in short.get("config", ()):
        parameters = {"apiVersion": API, **{key: value for key, value in each.items() if key != "requests"}}
        config.append({"requests": each["requests"], "opaque": {"driver": DRIVER, "parameters": parameters}})
    return {"devices": {"requests": requests, "constraints": short.get("constraints", []), "config": config}}


@pytest.fixture(scope="module")
def nodes(session_directory: Path) -> Iterator[Callable[..., DraHost]]:
    """Call with the kind of a host; the settings of a simulated host, or where to make one."""
    running: dict[str, DraHost] = {}
    with ExitStack() as stack:

        def get(kind: str, simulated: SimulatedHost | None) -> DraHost:
            if kind not in running:
                place = Path(tempfile.mkdtemp(prefix="n", dir=session_directory))
                stack.callback(shutil.rmtree, place)
                settings = simulated.settings if simulated else place / "host/config.toml"
                if kind == "mps":
                    settings = make_mps_host(place / "host").settings
                elif kind == "mig":
                    cut = "1g.5gb,1g.5gb,2g.10gb,3g.20gb"
                    create_host(str(place / "host"), 2, "a100", (f"0:{cut}", f"1:{cut}"))
                elif kind == "driverless":
                    create_host(str(place / "host"), 2, "h100", driver="none")
                cluster = stack.enter_context(Cluster())
                cluster.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "team"}})
                config = cluster.write_kubeconfig(place / "kubeconfig")
                kubelet = stack.enter_context(dra_kubelet(place / "k"))
                words = (f"--kubeconfig={config}", f"--mps-root={place}/mps")
                driver = stack.enter_context(dra_driver(settings, place / "k", *words, PROBE="10"))
                kubelet.find()
                driver.wait_for_log("published")
                running[kind] = DraHost(settings.parent, cluster, kubelet, driver, place)
            return running[kind]

        yield get


@pytest.mark.parametrize("name", one_in(5, EXAMPLES))
def test_a_pod_of_the_examples_has_exactly_its_devices(
    name: str,
    nodes: Callable[..., DraHost],
    request: pytest.FixtureRequest,
    make_bundle: Callable[..., Path],
    runtime_environment: dict[str, str],
) -> None:
    example = EXAMPLES[name]
    kind = example.get("host", "gpu")
    node = nodes(kind, request.getfixturevalue("simulated_host") if kind == "gpu" else None)
    before = set(os.listdir(node.place / "cdi"))
    claims: dict[str, tuple[list[str], dict[str, Any]]] = {}
    devices = node.devices()
    seen: dict[str, list[str]] = {}
    for pod, words in example["pods"].items():
        for own, source in words["claims"].items():
            shared = source in example.get("claims", {})
            key = f"{name}-{source}" if shared else f"{name}-{pod}-{own}"
            if key not in claims:
                short = (example["claims"] if shared else example["templates"])[source]
                claims[key] = node.schedule(claim_spec(short), key)
            ref, _ = claims[key]
            answer = node.kubelet.prepare(DRIVER, [ref])[ref[1]]
            assert "error" not in answer, answer
            for container, used in words["containers"].items():
                for each in used:
                    if each[0] == own:
                        wanted = [one for one in answer["devices"] if len(each) == 1 or each[1] in one["request_names"]]
                        ids = [id_ for one in wanted for id_ in one["cdi_device_ids"]]
                        chosen = [devices[one["device_name"]] for one in wanted]
                        check_container(node, name, container, ids, chosen, make_bundle, runtime_environment)
                        seen[f"{pod}/{container}"] = [one["device_name"] for one in wanted]
    letters: dict[str, str] = {}
    assert list(seen) == list(example["sees"])
    for container, expected in example["sees"].items():
        for device, letter in zip(sorted(seen[container]), expected, strict=True):
            assert letters.setdefault(letter, device) == device
    assert len(set(letters.values())) == len(letters), "different letters are different devices"
    if name == "gpu-test5":
        check_sharing(node)
    if name == "gpu-test6":
        assert [(node.directory / f"timeslice{number}").read_text() for number in (0, 2, 4, 6)] == ["3\n"] * 4
    for ref, _ in claims.values():
        assert node.kubelet.unprepare(DRIVER, [ref]) == {ref[1]: {}}
        node.cluster.delete("ResourceClaim", ref[2], "team")
    assert set(os.listdir(node.place / "cdi")) == before
    if name == "gpu-test5":
        assert "0" in (node.directory / "timeslice0").read_text()
        assert not os.listdir(node.place / "mps/claims")


def check_container(
    node: DraHost,
    name: str,
    container: str,
    ids: list[str],
    chosen: list[dict[str, Any]],
    make_bundle: Callable[..., Path],
    environment: dict[str, str],
) -> None:
    """Start a container with these CDI devices by runc, and look at what it has."""
    edits = read_registry(Settings(cdi_spec_dirs=(f"{node.place}/cdi",))).resolve(ids).edits
    given: list[dict[str, Any]] = []

    def edit(config: dict[str, Any]) -> None:
        inject(config, edits)
        given.append(config)

    files = f"$(find {METADATA} -name '*-metadata.json')"
    look = (["true"], ["ls", "/dev/vfio"]) if node.is_driverless else LOOK
    bundle = make_bundle(
        script(*look, ["sh", "-c", f"cat {files}"], ["sh", "-c", f"for file in {files}; do : >$file; done"]), edit=edit
    )
    done = run_container([str(requirements.find_program("runc"))], bundle, container_id(), env=environment)
    assert (done.returncode, "ead-only file system" in done.stderr + done.stdout) == (0, True), done.stderr
    told = [json.loads(each) for each in re.split(r"\n(?={)", done.stdout.split("@@0\n")[len(look)])]
    described = {one["name"]: one for each in told for one in each["requests"][0]["devices"]}
    assert set(described) == {each["name"] for each in chosen}
    for each in chosen:
        assert described[each["name"]]["attributes"] == each["attributes"]
    if node.is_driverless:
        groups = [each for each in done.stdout.split("@@0\n")[1].split() if each.isdigit()]
        assert len(groups) == 1
        assert [each for each in given[0]["linux"]["devices"] if "nvidia" in each["path"]] == []
        api = {"/dev/vfio/vfio"} if name == "vfio" else set()
        here = {each["path"] for each in given[0]["linux"]["devices"] if each["path"].startswith("/dev/vfio")}
        assert here == {f"/dev/vfio/{groups[0]}", *api}
        return
    listed, dev, variables = done.stdout.split("@@0\n")[:3]
    uuids = {each["attributes"]["uuid"]["string"] for each in chosen}
    if kinds := {each["attributes"]["type"]["string"] for each in chosen} - {"gpu"}:
        assert kinds == {"mig"}
        assert {word.rstrip(")") for word in listed.split() if word.startswith("MIG-")} == uuids
    else:
        assert set(listed_uuids(listed)) == uuids
        assert len([each for each in gpu_names(dev) if each.removeprefix("nvidia").isdigit()]) == len(uuids)
    assert ("CUDA_MPS_PIPE_DIRECTORY=" in variables) == container.startswith("mps")


def check_sharing(node: DraHost) -> None:
    """The first GPU has long time slices; the second a control daemon of MPS with the claim's limits."""
    assert (node.directory / "timeslice0").read_text() == "3\n"
    told = (node.directory / "usr/bin/mps-told").read_text()
    assert "set_default_device_pinned_mem_limit 1 10240M" in told
    assert "set_default_active_thread_percentage 50" in told
