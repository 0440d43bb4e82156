"""A claim's containers find what their devices are in files (KEP-5304), as Kubernetes 1.37 documents them."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from dra_lab import DRIVER, NODE, Killed, Lab, claim, result
from kubernetes_lab import host

from ocigpu.cdi.check import check_spec
from ocigpu.core.errors import CdiError, HostError
from ocigpu.kubernetes.dra.claims import ClaimRef
from ocigpu.kubernetes.dra.configs import resolve_configs
from ocigpu.kubernetes.dra.metadata import POD_CLAIM, ROOT, VERSIONS
from ocigpu.kubernetes.dra.prepare import PreparedDevice
from ocigpu.kubernetes.dra.state import ClaimStep

A100 = host("a100-8")


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path, metadata=True)


def read_stream(text: str) -> list[dict[str, Any]]:
    """Return the documents of a JSON stream, as json.Decoder of Go reads one."""
    decoder, found, at = json.JSONDecoder(), [], 0
    while at < len(text.rstrip()):
        document, at = decoder.raw_decode(text, at)
        at += len(text[at:]) - len(text[at:].lstrip())
        found.append(document)
    return found


def mounts_of(lab: Lab, uid: str) -> dict[str, tuple[str, str]]:
    """Return by CDI name the mount of each request's file: its path in the container and on the host."""
    spec = json.loads((lab.directory / f"cdi/k8s.{DRIVER}-claim_{uid}_metadata.json").read_text())
    assert not check_spec(spec).errors
    assert spec["kind"] == f"{DRIVER}/metadata"
    found = {}
    for device in spec["devices"]:
        (mount,) = device["containerEdits"]["mounts"]
        assert "ro" in mount["options"]
        found[f"{spec['kind']}={device['name']}"] = (mount["containerPath"], mount["hostPath"])
    return found


def test_each_request_has_a_file_of_its_devices_in_every_version(lab: Lab) -> None:
    ref = lab.add("uid-1", result("gpu-1"), result("gpu-3"), result("gpu-2", "two/small"), name="training")
    devices = lab.preparer.prepare(ref)
    names = [f"{DRIVER}/metadata=uid-1_{name}" for name in ("gpu", "two")]
    assert devices == tuple(
        PreparedDevice(request, NODE, device, (f"k8s.{DRIVER}/claim=uid-1-{device}", name))
        for request, device, name in (
            ("gpu", "gpu-1", names[0]),
            ("gpu", "gpu-3", names[0]),
            ("two", "gpu-2", names[1]),
        )
    )
    mounts = mounts_of(lab, "uid-1")
    assert list(mounts) == names
    inside = f"{ROOT}/resourceclaims/training"
    assert [path for path, _ in mounts.values()] == [
        f"{inside}/{name}/{DRIVER}-metadata.json" for name in ("gpu", "two")
    ]
    first, second = (read_stream(Path(path).read_text()) for _, path in mounts.values())
    assert [each["apiVersion"] for each in first] == [f"metadata.resource.k8s.io/{version}" for version in VERSIONS]
    assert {each["kind"] for each in first} == {"DeviceMetadata"}
    head = {"name": "training", "namespace": "team", "uid": "uid-1", "generation": 1}
    assert (first[0]["metadata"], "podClaimName" in first[0]) == (head, False)
    (request,) = first[0]["requests"]
    assert [request["name"], second[0]["requests"][0]["name"]] == ["gpu", "two/small"]
    assert [(each["driver"], each["pool"], each["name"]) for each in request["devices"]] == [
        (DRIVER, NODE, "gpu-1"),
        (DRIVER, NODE, "gpu-3"),
    ]
    gpu = next(gpu for gpu in A100.gpus if gpu.minor == 1)
    attributes = request["devices"][0]["attributes"]
    assert attributes["uuid"] == {"string": gpu.uuid}
    assert len(attributes) <= 32
    view = lab.view()
    assert view is not None
    assert attributes == next(each.attributes for each in view.devices if each.name == "gpu-1")


@pytest.mark.parametrize(
    ("annotation", "directory"),
    [
        ("my-gpu", "resourceclaimtemplates/my-gpu"),
        ("../../../etc", "resourceclaims/uid"),
        ("a/b", "resourceclaims/uid"),
        ("", "resourceclaims/uid"),
        ("x" * 64, "resourceclaims/uid"),
    ],
)
def test_a_claim_of_a_template_is_called_as_the_pod_calls_it(lab: Lab, annotation: str, directory: str) -> None:
    document = claim("uid", result("gpu-1"))
    document["metadata"]["annotations"] = {POD_CLAIM: annotation}
    lab.claims["uid"] = document
    lab.preparer.prepare(ClaimRef("team", "uid", "uid"))
    ((inside, outside),) = mounts_of(lab, "uid").values()
    assert inside == f"{ROOT}/{directory}/gpu/{DRIVER}-metadata.json"
    named = read_stream(Path(outside).read_text())[0].get("podClaimName", "")
    assert named == (annotation if "templates" in directory else "")


@pytest.mark.parametrize(("name", "request_name"), [("..", "gpu"), ("a/../b", "gpu"), ("uid", ".."), ("uid", "a/../b")])
def test_names_that_lead_elsewhere_cost_the_files_not_the_claim(lab: Lab, name: str, request_name: str) -> None:
    lab.claims[name] = claim("uid", result("gpu-1", request_name), name=name)
    (device,) = lab.preparer.prepare(ClaimRef("team", "uid", name))
    assert device.cdi == (f"k8s.{DRIVER}/claim=uid-gpu-1",)
    assert not (lab.directory / "metadata").exists()
    assert any("without metadata" in line for line in lab.logged)


def test_given_back_nothing_is_left_and_what_is_lost_is_written_again(lab: Lab) -> None:
    ref = lab.add("uid-1", result("gpu-1"))
    first = lab.preparer.prepare(ref)
    ((_, path),) = mounts_of(lab, "uid-1").values()
    before = Path(path).read_bytes()
    lab.restart()
    spec = lab.directory / f"cdi/k8s.{DRIVER}-claim_uid-1_metadata.json"
    for lost, empty in ((Path(path), False), (Path(path), True), (spec, False), (spec, True)):
        lost.unlink()
        if empty:
            lost.write_text("")
        assert lab.preparer.prepare(ref) == first
        assert Path(path).read_bytes() == before
    lab.preparer.unprepare(ref)
    assert lab.specs == []
    assert list((lab.directory / "metadata").iterdir()) == []


@pytest.mark.parametrize("moment", ["the file", "the specification"])
def test_a_driver_that_is_killed_leaves_nothing(lab: Lab, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(*_arguments: object) -> None:
        raise Killed

    name = {"the file": "replace_path", "the specification": "write_spec"}[moment]
    ref = lab.add("uid-1", result("gpu-1"))
    monkeypatch.setattr(lab.preparer, "undo_if_possible", lambda *_: None)  # it is gone
    with monkeypatch.context() as patched:
        patched.setattr(f"ocigpu.kubernetes.dra.metadata.{name}", kill)
        with pytest.raises(Killed):
            lab.preparer.prepare(ref)
    assert (lab.directory / "metadata/uid-1").exists()
    lab.restart()
    assert (lab.specs, list((lab.directory / "metadata").iterdir())) == ([], [])
    (lab.directory / "metadata/unknown").mkdir()
    (lab.directory / "metadata/file").touch()
    lab.restart("boot-2")
    assert [path.name for path in (lab.directory / "metadata").iterdir()] == ["file"]
    assert sum("removed" in line for line in lab.logged) == 1


def test_a_step_of_a_later_version_is_named_and_waits_for_it(lab: Lab) -> None:
    ref = lab.add("uid-1", result("gpu-1"))
    lab.preparer.prepare(ref)
    store = lab.preparer.store
    records, _ = store.read()
    record = records["uid-1"]
    newer = [*record.steps[:-1], record.steps[-1]._replace(arguments={**record.steps[-1].arguments, "more": "x"})]
    store.write({"uid-1": record._replace(steps=(ClaimStep("later", {}), *newer))})
    with pytest.raises(HostError, match='its step "later" is of a later version'):
        lab.preparer.unprepare(ref)
    assert lab.preparer.held()
    lab.preparer.effects["later"] = lab.preparer.effects["cdi"]._replace(undo=lambda *_: None)
    lab.preparer.unprepare(ref)
    assert (lab.specs, lab.preparer.held()) == ([], ())


def test_subrequests_of_one_request_share_its_file(lab: Lab) -> None:
    lab.preparer.prepare(lab.add("uid-1", result("gpu-1", "a/x"), result("gpu-2", "a/y")))
    ((_, path),) = mounts_of(lab, "uid-1").values()
    (request,) = read_stream(Path(path).read_text())[0]["requests"]
    assert [each["name"] for each in request["devices"]] == ["gpu-1", "gpu-2"]


def test_a_claim_of_a_driver_without_metadata_stays_as_it_was_prepared(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    ref = lab.add("uid-1", result("gpu-1"))
    first = lab.preparer.prepare(ref)
    lab.metadata = str(tmp_path / "metadata")
    lab.restart()
    assert lab.preparer.prepare(ref) == first
    (other,) = lab.preparer.prepare(lab.add("uid-2", result("gpu-2")))
    assert other.cdi[1:] == (f"{DRIVER}/metadata=uid-2_gpu",)


def test_a_directory_that_cannot_be_written_to_is_an_error_and_leaves_nothing(lab: Lab) -> None:
    (lab.directory / "metadata").write_text("")
    with pytest.raises(CdiError) as caught:
        lab.preparer.prepare(lab.add("uid-1", result("gpu-1")))
    assert caught.value.code == "OCIGPU-CDI-8"
    assert lab.specs == []


def test_the_claim_that_the_page_gives_kubevirt_gets_the_groups_device_and_vfios_own() -> None:
    text = (Path(__file__).parents[2] / "docs/DRA.md").read_text().split("### KubeVirt")[1].split("\n## ")[0]
    template, machine = yaml.safe_load_all(
        "\n".join(line[4:] for line in text.splitlines() if not line or line.startswith("    "))
    )
    devices = template["spec"]["spec"]["devices"]
    config = [{"source": "FromClaim", **each} for each in devices["config"]]
    (own,) = resolve_configs({"devices": {"config": config}}, DRIVER, [("gpu", "vfio")]).values()
    assert (own.api_device, own.policy) == (True, "LegacyOnly")
    (gpu,), (used,) = machine["spec"]["domain"]["devices"]["gpus"], machine["spec"]["resourceClaims"]
    assert (gpu["claimName"], gpu["requestName"]) == (used["name"], devices["requests"][0]["name"])
    assert used["resourceClaimTemplateName"] == template["metadata"]["name"]
