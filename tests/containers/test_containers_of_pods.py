"""Containers of pods: names with slashes, GPUs that the kubelet counts, and starts by another runtime."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from containers_lab import WAITING, Made, container, write_state
from live_lab import ocigpu, opened, verify
from support.fixtures import MakeBundle
from support.product import CONTROL_NODES, SimulatedHost
from test_find_containers import runc_state

from ocigpu.containers.attach import attach, detach
from ocigpu.containers.find import Places, find_target
from ocigpu.core.errors import SpecError
from ocigpu.doctor.containers import check_lost_gpus
from ocigpu.doctor.host import Host

NAME = "default/p2/main"
POD = {
    "io.kubernetes.cri.sandbox-id": "1f",
    "io.kubernetes.cri.sandbox-namespace": "default",
    "io.kubernetes.cri.sandbox-name": "p2",
    "io.kubernetes.cri.container-name": "main",
}


def of_pod(config: dict[str, Any]) -> None:
    config["annotations"] = dict(POD)


@pytest.fixture
def plain(
    make_bundle: MakeBundle, runtime_environment: dict[str, str], simulated_host: SimulatedHost
) -> Iterator[Made]:
    """A pod's container that the device plugin gave GPU 2, started by runc itself: it has none."""
    bundle = make_bundle(WAITING, {"NVIDIA_VISIBLE_DEVICES": simulated_host.gpus[2]}, edit=of_pod)
    with container(bundle, runtime_environment) as made:
        yield made._replace(environment=simulated_host.environment(made.environment))


@pytest.mark.root
@pytest.mark.engine
def test_the_name_that_ps_prints_is_understood_everywhere(
    make_bundle: MakeBundle, runtime_environment: dict[str, str], simulated_host: SimulatedHost
) -> None:
    bundle = make_bundle(WAITING, {"NVIDIA_VISIBLE_DEVICES": "2"}, edit=of_pod)
    with container(bundle, runtime_environment, host=simulated_host) as made:
        assert NAME in ocigpu(made, "ps").stdout
        assert str(bundle) in ocigpu(made, "explain", NAME).stdout
        assert f"--- {bundle}/config.json (original)" in ocigpu(made, "diff", NAME).stdout
        for words in (["verify"], ["repair"]):
            ocigpu(made, *words, NAME)


def test_a_path_is_a_bundle_and_a_name_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("bundle", NAME):
        (tmp_path / "here" / name).mkdir(parents=True)
    config = {"annotations": POD, "root": {"path": "/nowhere/rootfs"}}
    (tmp_path / "here/bundle/config.json").write_text(json.dumps(config))
    write_state(tmp_path / "states", "x", runc_state(bundle=str(tmp_path / "here/bundle"), annotations=POD))
    places = Places((str(tmp_path / "states"),))
    monkeypatch.chdir(tmp_path / "here")
    for text in (NAME, "x", "bundle", "./bundle", str(tmp_path / "here/bundle")):
        target = find_target(text, places)
        assert (target.bundle, target.container.name if target.container else "") == (f"{tmp_path}/here/bundle", NAME)
    for text in (f"./{NAME}", f"{tmp_path}/here/{NAME}", "default/p2/other"):
        with pytest.raises(SpecError, match="No such file"):
            find_target(text, places)
    (tmp_path / "here" / NAME / "config.json").write_text("{}")  # what lies here goes before a name
    assert find_target(NAME, places).bundle == f"{tmp_path}/here/{NAME}"


@pytest.mark.root
@pytest.mark.engine
def test_what_was_asked_for_and_not_given_is_said(plain: Made, simulated_host: SimulatedHost) -> None:
    asked = f"NVIDIA_VISIBLE_DEVICES={simulated_host.gpus[2]}"
    text = ocigpu(plain, "ps").stdout
    assert NAME in text
    assert f"requested, not granted: {asked}" in text
    (row,) = json.loads(ocigpu(plain, "ps", "--json").stdout)["containers"]
    assert (row["gpus"], row["unanswered"]) == ([], asked)
    data = verify(plain, status=3)
    assert (data["devices"], data["unanswered"], data["verdict"]) == ([], asked, "less")
    said = ocigpu(plain, "verify", NAME, status=3).stdout
    assert f"not as granted: requested, not granted: {asked}" in said
    assert said.rstrip().endswith("verdict: less")
    host = Host(config=plain.environment["OCIGPU_CONFIG"], states=(str(plain.state),))
    (found,) = check_lost_gpus(host)
    assert (found.severity, found.evidence[0].found) == ("warning", asked)
    with opened(plain) as live:
        attach(live, ["2"])
    assert "not given" not in ocigpu(plain, "ps").stdout
    again = Host(config=host.config, states=host.states)
    assert [item.severity for item in check_lost_gpus(again)] == ["ok"]


@pytest.mark.rest
@pytest.mark.root
@pytest.mark.engine
def test_what_the_settings_refuse_is_said(plain: Made, simulated_host: SimulatedHost, tmp_path: Path) -> None:
    settings = tmp_path / "config.toml"
    key = "accept-nvidia-visible-devices-envvar-when-unprivileged"
    settings.write_text(f"{key} = false\n{Path(plain.environment['OCIGPU_CONFIG']).read_text()}")
    settings.chmod(0o644)
    made = plain._replace(environment={**plain.environment, "OCIGPU_CONFIG": str(settings)})
    asked = f"NVIDIA_VISIBLE_DEVICES={simulated_host.gpus[2]}"
    text = ocigpu(made, "ps").stdout
    assert f"requested, refused by settings: {asked}: {key} is false" in text
    assert "requested, not granted" not in text
    (row,) = json.loads(ocigpu(made, "ps", "--json").stdout)["containers"]
    assert (row["unanswered"], row["refused"]) == ("", f"{asked}: {key} is false")
    data = verify(made)
    assert (data["unanswered"], data["verdict"]) == ("", "as granted")
    assert "requested, refused by settings" in ocigpu(made, "verify", NAME).stdout
    (found,) = check_lost_gpus(Host(config=str(settings), states=(str(made.state),)))
    assert found.severity == "ok"


@pytest.mark.root
@pytest.mark.engine
def test_an_image_that_asks_for_all_is_no_finding(
    make_bundle: MakeBundle, runtime_environment: dict[str, str], simulated_host: SimulatedHost
) -> None:
    """As every image of CUDA does, with a GPU or without."""
    with container(make_bundle(WAITING, {"NVIDIA_VISIBLE_DEVICES": "all"}), runtime_environment) as plain:
        made = plain._replace(environment=simulated_host.environment(plain.environment))
        assert "requested, not granted: NVIDIA_VISIBLE_DEVICES=all" in ocigpu(made, "ps").stdout
        host = Host(config=made.environment["OCIGPU_CONFIG"], states=(str(made.state),))
        assert [item.severity for item in check_lost_gpus(host)] == ["ok"]


@pytest.mark.rest
@pytest.mark.root
@pytest.mark.engine
def test_the_kubelet_is_not_told_of_an_attach_and_nothing_is_lost_that_was_never_given(
    plain: Made, simulated_host: SimulatedHost
) -> None:
    text = ocigpu(plain, "attach", NAME, "--gpu", "2").stdout
    assert f"note: the kubelet does not know: it counts {simulated_host.gpus[2]} as free" in text
    assert ocigpu(plain, "attach", NAME, "--gpu", "2").stdout.count("kubelet") == 0  # nothing was changed
    (row,) = json.loads(ocigpu(plain, "ps", "--json").stdout)["containers"]
    paths = {"/dev/nvidia2", *(f"/dev/{name}" for name in CONTROL_NODES)}
    assert ({device["path"] for device in row["devices"]}, row["lost"], row["beyond"]) == (paths, [], [])
    with opened(plain) as live:
        detach(live, ["2"])
    (row,) = json.loads(ocigpu(plain, "ps", "--all", "--json").stdout)["containers"]
    assert (row["lost"], row["beyond"]) == ([], [])


@pytest.mark.root
@pytest.mark.engine
@pytest.mark.parametrize(
    ("user", "mode", "note"),
    [
        pytest.param({"uid": 1000, "gid": 1000}, 0o660, "--group-add 44", id="not of the group"),
        pytest.param({"uid": 1000, "gid": 1000, "additionalGids": [44]}, 0o660, "", id="of the group"),
        pytest.param({"uid": 1000, "gid": 1000}, 0o666, "", id="for everybody"),
        pytest.param({"uid": 0, "gid": 0}, 0o660, "", id="root"),
    ],
)
def test_a_user_who_may_not_open_the_attached_node_is_told(
    make_bundle: MakeBundle,
    runtime_environment: dict[str, str],
    simulated_host: SimulatedHost,
    user: dict[str, Any],
    mode: int,
    note: str,
) -> None:
    """A running process cannot be given a group, and the host's mode is the operator's choice."""

    def as_user(config: dict[str, Any]) -> None:
        config["process"]["user"] = user

    bundle = make_bundle(WAITING, edit=as_user)
    with container(bundle, runtime_environment, host=simulated_host) as made, opened(made) as live:
        gpus = [
            gpu._replace(node=gpu.node._replace(mode=mode, gid=44)) if gpu.node is not None else gpu
            for gpu in live.facts.gpus
        ]
        changed = attach(live._replace(facts=live.facts._replace(gpus=tuple(gpus))), ["5"])
        assert len([text for text in changed.notes if "--group-add 44" in text]) == (1 if note else 0)
