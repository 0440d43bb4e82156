"""``ocigpu node-labels``: files, and an API server over real HTTPS."""

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes_lab import configured
from support.api_server import TOKEN, FakeApiServer, make_account
from support.lines import Lines
from support.process import Completed, run, stop, wait_for
from support.product import PROGRAMS, SimulatedHost
from support.products import one_in
from support.trees import pci_function, write_tree

from ocigpu.core.errors import HostError, SettingsError
from ocigpu.core.settings import Settings
from ocigpu.kubernetes.cluster.api_server import ApiServer, find_api_server, request
from ocigpu.kubernetes.labels import program as labelling
from ocigpu.kubernetes.labels.program import Labeller, LabelPlace, find_place, publish, read_labels, withdraw
from ocigpu.kubernetes.node.config import CommandInput, PluginOptions
from ocigpu.sim.create import create_host
from ocigpu.system.service import MAX_TOPICS
from ocigpu.system.settings_file import read_settings

Command = Callable[..., Completed]
POD = {"NODE_NAME": "node-1", "POD_NAME": "labels-x7", "POD_NAMESPACE": "gpu"}
FEATURE = "/apis/nfd.k8s-sigs.io/v1alpha1/namespaces/gpu/nodefeatures/nvidia-features-for-node-1"
NODE = "/api/v1/nodes/node-1"
PRODUCT = "nvidia.com/gpu.product"


@pytest.fixture(scope="module")
def account(session_directory: Path) -> Path:
    directory = session_directory / "service-account"
    directory.mkdir()
    make_account(directory)
    return directory


@pytest.fixture
def api(account: Path) -> Iterator[FakeApiServer]:
    """A server with a node that has a label of somebody else, and our pod."""
    owners = [
        {"apiVersion": "v1", "kind": "Other", "name": "o", "uid": "1"},
        {"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "labels", "uid": "2", "controller": True},
    ]
    server = FakeApiServer(account)
    server.objects = {
        NODE: {"metadata": {"name": "node-1", "labels": {"zone": "a"}}},
        "/api/v1/namespaces/gpu/pods/labels-x7": {"metadata": {"ownerReferences": owners}},
    }
    yield server
    server.close()


def no_sleep(_seconds: float) -> None:
    return


# --- the API server


def test_requests_are_answered_over_https_with_the_token(api: FakeApiServer) -> None:
    answer = request(api.place, "GET", NODE)
    assert (answer.status, answer.body["metadata"]["name"]) == (200, "node-1")
    assert request(api.place, "GET", "/api/v1/nodes/none").status == 404


def test_a_busy_server_is_asked_again_ever_more_rarely(api: FakeApiServer) -> None:
    pauses: list[float] = []
    api.answers = [503, 429, 409, 500, 200]
    assert request(api.place, "GET", NODE, sleep=pauses.append).status == 200
    assert pauses == [0.5, 1, 2, 4]
    api.answers = [503] * 5
    with pytest.raises(HostError, match=r"GET https://127.*/nodes/node-1: 503 Service Unavailable: answer 503 of"):
        request(api.place, "GET", NODE, sleep=no_sleep)
    assert len(api.requests) == 10


@pytest.mark.parametrize("status", [400, 401, 403, 422])
def test_a_refusal_is_an_error_of_one_line_at_once(api: FakeApiServer, status: int) -> None:
    api.answers = [status]
    with pytest.raises(HostError) as caught:
        request(api.place, "GET", NODE, sleep=no_sleep)
    assert caught.value.code == "OCIGPU-KUBE-5"
    assert caught.value.message.endswith(f": answer {status} of the tests")
    assert len(caught.value.message.splitlines()) == len(api.requests) == 1


def test_the_server_must_be_certified_by_its_own_authority(api: FakeApiServer, tmp_path: Path) -> None:
    make_account(tmp_path)
    with pytest.raises(HostError, match="certificate"):
        request(api.place._replace(account=str(tmp_path)), "GET", NODE, sleep=no_sleep)
    assert api.requests == [], "nothing was sent, no token either"
    with pytest.raises(HostError, match="localhost"):
        request(api.place._replace(host="localhost"), "GET", NODE, sleep=no_sleep)


def test_a_token_is_read_anew_for_every_request(api: FakeApiServer) -> None:
    token = Path(api.place.account, "token")
    try:
        token.write_text("expired")
        with pytest.raises(HostError, match="401 Unauthorized"):
            request(api.place, "GET", NODE, sleep=no_sleep)
    finally:
        token.write_text(TOKEN)
    assert request(api.place, "GET", NODE).status == 200


def test_a_server_that_is_not_there_is_an_error_of_one_line(api: FakeApiServer, tmp_path: Path) -> None:
    with pytest.raises(HostError, match=r"https://127.0.0.1:1/: .*Connection refused"):
        request(api.place._replace(port=1), "GET", "/", sleep=no_sleep)
    with pytest.raises(HostError, match=r"service account: .*ca.crt.*No such file"):
        request(api.place._replace(account=str(tmp_path)), "GET", "/", sleep=no_sleep)
    (tmp_path / "ca.crt").touch()
    with pytest.raises(HostError, match=r"service account: .*ca.crt.*: it is empty"):
        request(api.place._replace(account=str(tmp_path)), "GET", "/", sleep=no_sleep)


def test_the_server_is_that_of_the_pod(tmp_path: Path) -> None:
    variables = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    assert find_api_server(variables, str(tmp_path)) is None
    (tmp_path / "token").write_text("t")
    assert find_api_server(variables, str(tmp_path)) == ApiServer("fd00::1", 6443, str(tmp_path))
    assert find_api_server({}, str(tmp_path)) is None
    assert find_api_server({**variables, "KUBERNETES_SERVICE_PORT": "x"}, str(tmp_path)) is None


# --- places


def test_where_labels_go(api: FakeApiServer) -> None:
    owner = {"apiVersion": "apps/v1", "kind": "DaemonSet", "name": "labels", "uid": "2"}
    place = find_place(PluginOptions(), "", POD, api.place)
    assert place == LabelPlace("node-feature", "", api.place, "node-1", "gpu", owner)
    assert str(place) == "NodeFeature gpu/nvidia-features-for-node-1"
    alone = find_place(PluginOptions(), "", {"NODE_NAME": "node-1"}, api.place)
    assert (alone.namespace, alone.owner) == ("gpu", {})
    assert find_place(PluginOptions(use_node_feature_api=False), "", POD, api.place).target == "file"
    assert find_place(PluginOptions(output_file="/f"), "", POD) == LabelPlace("file", "/f")
    assert find_place(PluginOptions(), "node", POD, api.place).target == "node"


@pytest.mark.parametrize(
    ("target", "environment", "message"),
    [
        ("node-feature", POD, "labels: node-feature needs the API server"),
        ("node", {}, "labels: node needs the API server"),
    ],
)
def test_without_a_pod_only_a_file_is_possible(target: str, environment: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        find_place(PluginOptions(), target, environment)


def test_the_name_of_the_node_must_be_known(api: FakeApiServer) -> None:
    with pytest.raises(SettingsError, match="NODE_NAME is not set"):
        find_place(PluginOptions(), "node", {}, api.place)
    with pytest.raises(SettingsError, match="no output file"):
        find_place(PluginOptions(output_file=""), "file", {})


def test_a_node_feature_is_made_changed_and_removed(api: FakeApiServer) -> None:
    place = find_place(PluginOptions(), "", POD, api.place)
    publish(place, {PRODUCT: "A100", "nvidia.com/gpu.count": "2"})
    found = api.objects[FEATURE]
    assert found["apiVersion"] == "nfd.k8s-sigs.io/v1alpha1"
    assert found["metadata"]["labels"] == {"nfd.node.kubernetes.io/node-name": "node-1"}
    assert [each["name"] for each in found["metadata"]["ownerReferences"]] == ["labels"]
    assert found["spec"]["labels"] == {PRODUCT: "A100", "nvidia.com/gpu.count": "2"}
    publish(place, {PRODUCT: "H100"})
    assert found["spec"]["labels"] == {PRODUCT: "H100"}
    withdraw(place)
    assert FEATURE not in api.objects
    withdraw(place)


def test_labels_of_a_node_leave_those_of_others(api: FakeApiServer) -> None:
    place = find_place(PluginOptions(), "node", POD, api.place)
    publish(place, {PRODUCT: "A100", "nvidia.com/gpu.count": "2"})
    publish(place, {PRODUCT: "H100"})
    assert api.objects[NODE]["metadata"]["labels"] == {"zone": "a", PRODUCT: "H100"}
    withdraw(place)
    assert api.objects[NODE]["metadata"]["labels"] == {"zone": "a"}
    del api.objects[NODE]
    with pytest.raises(HostError, match="403 Forbidden: nodes is forbidden"):
        publish(place, {})


def test_a_cluster_without_node_feature_discovery_says_so(api: FakeApiServer) -> None:
    api.types.remove("nodefeatures")
    place = find_place(PluginOptions(), "", POD, api.place)
    with pytest.raises(HostError, match=r"is node feature discovery 0\.14 or later installed"):
        publish(place, {PRODUCT: "A100"})


# --- labelling


def labeller(host: SimulatedHost, log: Lines, file: Path) -> Labeller:
    told = CommandInput({"output_file": str(file), "no_timestamp": "true"}, "")
    return Labeller(read_settings(str(host.settings)), told, log, "file")


def test_labels_stay_while_the_driver_gives_no_answer(simulated_host: SimulatedHost, tmp_path: Path) -> None:
    log = Lines()
    file = tmp_path / "features.d/gfd"
    ours = labeller(simulated_host, log, file)
    ours.once()
    before = file.read_text()
    assert "nvidia.com/gpu.count=8\n" in before
    faults = simulated_host.directory / "faults"
    faults.write_text("init 999\n")
    try:
        with pytest.raises(HostError, match="the labels stay as they are") as caught:
            ours.once()
    finally:
        faults.unlink()
    assert caught.value.code == "OCIGPU-KUBE-7"
    assert file.read_text() == before
    ours.once()
    assert log.lines == [f"info: {len(before.splitlines())} labels: {file}"]


STAMP = "nvidia.com/gfd.timestamp"


@pytest.mark.rest
def test_what_has_not_changed_is_neither_stamped_nor_written_again(
    simulated_host: SimulatedHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,000 nodes that write each minute are 17 writes a second, each an event for everybody who watches."""
    written: list[dict[str, str]] = []
    monkeypatch.setattr(labelling, "publish", lambda _place, found: written.append(dict(found)))
    monkeypatch.setattr(labelling, "find_place", lambda *_: LabelPlace("node", node="node-1"))
    clock = iter(range(1700000000, 1800000000, 60))
    monkeypatch.setattr(labelling, "read_labels", lambda *words: read_labels(*words[:2], next(clock)))
    config = tmp_path / "config.yaml"
    config.write_text("version: v1\n")
    ours = Labeller(read_settings(str(simulated_host.settings)), CommandInput({}, str(config)), Lines())
    for _ in range(5):
        ours.once()
    assert [each[STAMP] for each in written] == ["1700000000"]
    config.write_text("flags: {migStrategy: mixed}\n")
    for _ in range(3):
        ours.once()
    assert [(each[STAMP], each.get("nvidia.com/mig.strategy")) for each in written[1:]] == [("1700000300", "mixed")]
    ours.once(anyway=True)
    monkeypatch.setattr(labelling, "HEARTBEAT", 0.0)
    ours.once()
    assert written[2:] == [written[1]] * 2, "a heartbeat says the same as before"
    config.write_text("flags: {migStrategy: mixed, gfd: {noTimestamp: true}}\n")
    ours.once()
    assert STAMP not in written[-1]


def test_labels_that_were_not_taken_are_written_again(
    simulated_host: SimulatedHost, api: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = find_place(PluginOptions(), "", POD, api.place)
    monkeypatch.setattr(labelling, "find_place", lambda *_: place)
    ours = Labeller(read_settings(str(simulated_host.settings)), CommandInput({}, ""), Lines())
    api.answers = [422]
    with pytest.raises(HostError, match="422"):
        ours.once()
    ours.once()
    before = len(api.requests)
    ours.once()
    assert len(api.requests) == before
    assert api.objects[FEATURE]["spec"]["labels"]["nvidia.com/gpu.count"] == "8"


def test_a_file_is_written_again_only_when_it_is_another(simulated_host: SimulatedHost, tmp_path: Path) -> None:
    file = tmp_path / "features.d/gfd"
    ours = labeller(simulated_host, Lines(), file)
    ours.once()
    before = file.stat()
    ours.once()
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    for spoil in (file.unlink, lambda: file.write_text("nvidia.com/gpu.count=9\n")):
        spoil()
        ours.once()
        assert "nvidia.com/gpu.count=8\n" in file.read_text()


@pytest.mark.parametrize("flag", ["--oneshot", "--fail-on-init-error"])
def test_the_command_ends_without_a_driver_when_told_so(
    simulated_host: SimulatedHost, node_labels: Command, tmp_path: Path, flag: str
) -> None:
    faults = simulated_host.directory / "faults"
    faults.write_text("init 999\n")
    try:
        failed = node_labels(flag, f"--output-file={tmp_path}/gfd", check=False)
    finally:
        faults.unlink()
    assert failed.returncode == 1
    assert "OCIGPU-KUBE-7" in failed.stderr


def test_a_node_without_gpus_is_labelled_so(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    found = read_labels(Settings(simulation_root=str(tmp_path)), configured(no_timestamp="true"), 0)
    assert (found.labels, found.silent) == ({"nvidia.com/vgpu.present": "false"}, "")


@pytest.mark.rest
@pytest.mark.parametrize("drivers", [("vfio-pci",), ("vfio-pci", "nvidia")], ids=str)
def test_a_node_whose_gpus_are_for_virtual_machines_is_labelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drivers: tuple[str, ...]
) -> None:
    """As in the pod, which has no /dev/vfio; one with a GPU whose driver does not answer keeps its labels."""
    functions = [
        pci_function(f"0000:{number:02x}:00.0", "10de:2330", "0302", driver, str(number))
        for number, driver in enumerate(drivers, 0x3B)
    ]
    write_tree(tmp_path, {"/proc/uptime": "", **{path: text for tree in functions for path, text in tree.items()}})
    monkeypatch.setattr(labelling, "read_model_names", lambda: {0x2330: "GH100 [H100 SXM5 80GB]"})
    found = read_labels(Settings(simulation_root=str(tmp_path)), configured(), 0)
    assert bool(found.silent) == (len(drivers) > 1)
    if not found.silent:
        names = ("gpu.product", "gpu.count", "gpu.mode")
        assert [found.labels[f"nvidia.com/{name}"] for name in names] == ["GH100-H100-SXM5-80GB", "1", "compute"]


def labels_of_amd(directory: Path) -> dict[str, str]:
    found = read_labels(Settings(simulation_root=str(directory)), configured(no_timestamp="true"), 0)
    assert found.silent == ""
    return {name: value for name, value in found.labels.items() if "amd.com/" in name}


@pytest.fixture
def amd_host(tmp_path: Path) -> Path:
    create_host(str(tmp_path / "host"), gpus=3, model="mi300x", compat32=False, nodes=False)
    return tmp_path / "host"


def test_a_node_with_amds_gpus_has_the_labels_of_amds_labeller(amd_host: Path) -> None:
    shared = {
        "gpu.device-id": "74a1",
        "gpu.product-name": "AMD_Instinct_MI300X_OAM",
        "gpu.vram": "192G",
        "gpu.simd-count": "1216",
        "gpu.cu-count": "304",
    }
    expected = {f"amd.com/{name}": value for name, value in shared.items()}
    expected |= {f"beta.amd.com/{name}": value for name, value in shared.items()}
    expected |= {f"beta.amd.com/{name}.{value}": "3" for name, value in shared.items()}
    expected |= {
        "amd.com/compute-memory-partition": "spx_nps1",
        "amd.com/compute-partitioning-supported": "true",
        "amd.com/memory-partitioning-supported": "false",
        "amd.com/gpu.driver-version": "6.12.12",
    }
    assert labels_of_amd(amd_host) == expected


def test_of_several_models_each_is_a_label_and_what_is_no_label_is_left_out(amd_host: Path) -> None:
    device = amd_host / "sys/bus/pci/devices/0000:42:00.0"
    (device / "product_name").write_text("AMD Radeon PRO W7900\n")
    (device / "device").write_text("0x7448\n")
    (device / "current_compute_partition").unlink()
    found = labels_of_amd(amd_host)
    assert found["amd.com/gpu.product-name.AMD_Radeon_PRO_W7900"] == "1"
    assert found["amd.com/gpu.product-name.AMD_Instinct_MI300X_OAM"] == "2"
    assert (found["amd.com/gpu.device-id.7448"], found["beta.amd.com/gpu.device-id.74a1"]) == ("1", "2")
    assert not {"amd.com/gpu.product-name", "amd.com/gpu.device-id", "amd.com/compute-memory-partition"} & set(found)
    for name in ("../../etc/passwd", "x" * 200, "-", "\x1b[2J", "caf\u00e9"):
        (device / "product_name").write_text(f"{name}\n")
        products = {label: value for label, value in labels_of_amd(amd_host).items() if "product-name" in label}
        assert products == {
            "amd.com/gpu.product-name.AMD_Instinct_MI300X_OAM": "2",
            "beta.amd.com/gpu.product-name.AMD_Instinct_MI300X_OAM": "2",
        }


def test_labels_stay_while_sysfs_cannot_be_read(amd_host: Path) -> None:
    file = amd_host / "sys/bus/pci/devices/0000:41:00.0/product_name"
    file.unlink()
    file.mkdir()
    with pytest.raises(HostError):
        labels_of_amd(amd_host)


# --- the command


@pytest.fixture
def node_labels(simulated_host: SimulatedHost) -> Command:
    def call(*words: str | Path, check: bool = True, **env: str) -> Completed:
        environment = {**os.environ, "OCIGPU_CONFIG": str(simulated_host.settings), **env}
        return run([PROGRAMS / "ocigpu", "node-labels", *words], env=environment, check=check)

    return call


def test_the_command_shows_the_labels(node_labels: Command) -> None:
    text = node_labels("--show", "--no-timestamp", "--mig-strategy", "single").stdout
    assert "nvidia.com/mig.strategy=single\n" in text
    assert "timestamp" not in text
    data = json.loads(node_labels("--show", "--json", GFD_MIG_STRATEGY="mixed").stdout)
    assert data["labels"]["nvidia.com/mig.strategy"] == "mixed"
    assert data["problem"] == ""


def test_the_command_writes_once_and_removes_when_told(node_labels: Command, tmp_path: Path) -> None:
    file = tmp_path / "gfd"
    written = node_labels("--oneshot", f"--output-file={file}")
    assert written.stdout.endswith(f" labels: {file}\n")
    assert "nvidia.com/gpu.count=8\n" in file.read_text()
    assert "nvidia.com/gpu.product=NVIDIA-A100-SXM4-40GB\n" in file.read_text()
    node_labels("--remove", "--to", "file", GFD_OUTPUT_FILE=str(file))
    assert not file.exists()


@pytest.mark.parametrize(
    ("words", "message"),
    one_in(
        4,
        [
            (["--kubeconfig", "/k"], "--kubeconfig is refused"),
            (["--to", "moon"], "not one of node-feature, node, file"),
            (["--to", "node"], "not a pod with a service account"),
            (["--sleep-interval=60"], 'Write a unit: "60s"'),
            (["--device-list-strategy=envvar"], "no such option"),
            (["--mig-strategy"], "--mig-strategy needs a value"),
            (["--kube-api-qps", "many"], "kube-api-qps"),
            (["--node-name"], "--node-name"),
        ],
    ),
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_the_command_refuses(node_labels: Command, words: list[str], message: str) -> None:
    failed = node_labels(*words, check=False)
    assert failed.returncode in (1, 2)
    assert message in failed.stderr
    assert "Traceback" not in failed.stderr


@pytest.mark.rest
def test_the_command_has_the_vendors_names_of_options_and_variables(node_labels: Command, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("flags: {migStrategy: mixed, gfd: {sleepInterval: infinite}}\n")
    variables = {"GFD_CONFIG_FILE": str(config), "CONFIG_FILE": "/nowhere", "USE_NODE_FEATURE_API": "false"}
    node_labels("--oneshot", "-o", tmp_path / "gfd", **variables)
    assert "nvidia.com/mig.strategy=mixed\n" in (tmp_path / "gfd").read_text()
    node_labels("--oneshot", "--output", tmp_path / "two", "--node-name=n", "--namespace=gpu", "--pod-name", "p")
    assert (tmp_path / "two").exists()
    refused = node_labels("--oneshot", USE_NODE_FEATURE_API="perhaps", check=False)
    assert "USE_NODE_FEATURE_API" in refused.stderr


@pytest.mark.rest
def test_an_infinite_interval_ends_with_a_signal(simulated_host: SimulatedHost, tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = start(simulated_host, log, f"--output-file={tmp_path / 'gfd'}", "--sleep-interval=infinite")
    try:
        wait_for("labels", (tmp_path / "gfd").exists, on_failure=log.read_text)
        (tmp_path / "gfd").unlink()
        child.send_signal(signal.SIGHUP)
        wait_for("labels again", (tmp_path / "gfd").exists, on_failure=log.read_text)
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 0
    finally:
        if child.poll() is None:
            stop(child.pid)


def start(host: SimulatedHost, log: Path, *words: str | Path) -> "subprocess.Popen[str]":
    environment = {**os.environ, "OCIGPU_CONFIG": str(host.settings)}
    with open(log, "w") as output:
        command = [PROGRAMS / "ocigpu", "node-labels", "--json", "--no-timestamp", *words]
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, text=True
        )


@pytest.mark.rest
@pytest.mark.parametrize("removing", [False, True])
def test_the_command_labels_again_and_keeps_labels_unless_told(
    simulated_host: SimulatedHost, tmp_path: Path, removing: bool
) -> None:
    file, log, config = tmp_path / "gfd", tmp_path / "log", tmp_path / "config.yaml"
    config.write_text("version: v1\n")
    extra = ["--remove-on-exit"] if removing else []
    child = start(
        simulated_host, log, f"--output-file={file}", f"--config-file={config}", "--sleep-interval=1h", *extra
    )
    try:
        wait_for("labels", file.exists, on_failure=log.read_text)
        sharing: dict[str, Any] = {"timeSlicing": {"resources": [{"name": "gpu", "replicas": 3}]}}
        config.write_text(json.dumps({"sharing": sharing}))
        child.send_signal(signal.SIGHUP)
        wait_for("replicas", lambda: "nvidia.com/gpu.replicas=3\n" in file.read_text(), on_failure=log.read_text)
        config.write_text("sharing: [\n")
        child.send_signal(signal.SIGHUP)
        wait_for("a message", lambda: "stays in force" in log.read_text())
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 0
    finally:
        if child.poll() is None:
            stop(child.pid)
    assert file.exists() is not removing
    assert all(json.loads(line)["level"] for line in log.read_text().splitlines())


@pytest.mark.rest
def test_each_failure_of_labelling_is_told_and_its_end(simulated_host: SimulatedHost, tmp_path: Path) -> None:
    log, faults = tmp_path / "log", simulated_host.directory / "faults"
    child = start(simulated_host, log, f"--output-file={tmp_path / 'gfd'}", "--sleep-interval=1h")

    def wait_for_lines(text: str, count: int) -> None:
        child.send_signal(signal.SIGHUP)
        wait_for(text, lambda: log.read_text().count(text) == count, on_failure=log.read_text)

    try:
        wait_for("labels", (tmp_path / "gfd").exists, on_failure=log.read_text)
        for count in (1, 2):
            faults.write_text("init 999\n")
            wait_for_lines("the labels stay as they are", count)
            faults.unlink()
            wait_for_lines("labelling works again", count)
    finally:
        faults.unlink(missing_ok=True)
        child.terminate()
        child.wait(60)


@pytest.mark.rest
def test_refusals_that_differ_each_time_are_not_all_remembered(simulated_host: SimulatedHost, tmp_path: Path) -> None:
    log = Lines()
    ours = labeller(simulated_host, log, tmp_path / "gfd")
    for number in range(3000):
        for _ in range(2):
            ours.report("error", f"request {number} timed out")
    assert len(log.lines) == 3000
    assert len(log.last_lines) <= MAX_TOPICS
