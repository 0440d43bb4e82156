"""The device plugin and a kubelet: registration, restarts of both, sockets and configuration that come and go."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from plugin_lab import GPU, MIG_1G, MIG_3G, Kubelet, Plugin, kubelet, other_plugin, plugin
from support import requirements
from support.process import run, wait_for
from support.product import PROGRAMS, SimulatedHost, make_simulated_host
from support.products import one_in

pytestmark = pytest.mark.root
SHARED = {"sharing": {"timeSlicing": {"resources": [{"name": "gpu", "replicas": 2}]}}}


@pytest.fixture
def directory(work_directory: Path) -> Path:
    return work_directory / "dp"


@pytest.fixture(scope="module")
def mixed(session_directory: Path, mig_host: SimulatedHost) -> Iterator[tuple[Kubelet, Plugin]]:
    """Three resources of a host with MIG devices."""
    directory = session_directory / "mixed"
    strategies = "--device-list-strategy=envvar,volume-mounts"
    with (
        kubelet(directory) as kubelets,
        plugin(mig_host.settings, directory, strategies, MIG_STRATEGY="mixed") as running,
    ):
        kubelets.expect(gpu=(1, 1), mig_3g=(1, 1), mig_1g=(1, 1))
        yield kubelets, running


@pytest.fixture(scope="module")
def eight_gpus(session_directory: Path, simulated_host: SimulatedHost) -> Iterator[tuple[Kubelet, Plugin]]:
    """A node with eight GPUs; see ``eight``."""
    directory = session_directory / "eight"
    with kubelet(directory) as kubelets, plugin(simulated_host.settings, directory) as running:
        yield kubelets, running


@pytest.fixture
def eight(eight_gpus: tuple[Kubelet, Plugin]) -> Iterator[tuple[Kubelet, Plugin]]:
    """A node with eight GPUs for tests that leave it as it was, without pods."""
    kubelets, running = eight_gpus
    kubelets.expect(gpu=(8, 8))
    running.wait_for_log("registered with the kubelet")
    running.forget_log()
    yield kubelets, running
    for pod in ("kept", "rest", "pod"):
        kubelets.delete(pod)


def test_several_resources_have_a_socket_each(mixed: tuple[Kubelet, Plugin]) -> None:
    kubelets, running = mixed
    assert running.sockets == ["nvidia-gpu.sock", "nvidia-mig-1g.5gb.sock", "nvidia-mig-3g.20gb.sock"]
    registered = sorted(line for line in kubelets.read_journal() if line.startswith("registered"))
    assert registered == [f"registered {name} nvidia-{name[11:]}.sock" for name in (GPU, MIG_1G, MIG_3G)]
    assert kubelets.options(GPU) == {"pre_start": False, "preferred": True}


def test_of_two_resources_with_the_same_variable_the_first_wins(
    mixed: tuple[Kubelet, Plugin], mig_host: SimulatedHost
) -> None:
    kubelets, _ = mixed
    given = kubelets.admit("both", "main", {GPU: 1, MIG_1G: 1})
    kubelets.delete("both")
    assert given["envs"] == {"NVIDIA_VISIBLE_DEVICES": "/var/run/nvidia-container-devices"}
    paths = {mount["container_path"].rpartition("/")[2] for mount in given["mounts"]}
    assert paths == {mig_host.gpus[1], mig_host.mig_devices[1][0]}, "mounts are joined"


@pytest.mark.parametrize(
    ("ids", "error"),
    [
        (["GPU-unknown"], 'INVALID_ARGUMENT: OCIGPU-KUBE-2: invalid allocation request for "nvidia.com/gpu": unknown'),
        (["x\ny" * 500], "INVALID_ARGUMENT: OCIGPU-KUBE-2"),
    ],
    ids=["unknown", "hostile"],
)
def test_a_wrong_request_gets_one_line(mixed: tuple[Kubelet, Plugin], ids: list[str], error: str) -> None:
    kubelets, running = mixed
    answer = kubelets.answer("allocate", GPU, ids)["error"]
    assert answer.startswith(error)
    assert "\n" not in answer
    assert len(answer) < 400
    assert kubelets.answer("pre_start", GPU, ids)["error"].startswith("INVALID_ARGUMENT")
    wanting = kubelets.answer("prefer", GPU, ["a"], [], 2)["error"]
    assert wanting.startswith("INVALID_ARGUMENT: OCIGPU-KUBE-2: preferred allocation of 2 devices")
    running.wait_for_log("unknown device")


def test_a_container_that_starts_again_is_not_given_anything_anew(mixed: tuple[Kubelet, Plugin]) -> None:
    kubelets, _ = mixed
    given = kubelets.admit("again", "main", {GPU: 1})
    before = kubelets.read_journal()
    assert kubelets.start_container("again", "main") == given
    assert kubelets.read_journal() == before
    kubelets.delete("again")


def test_a_pod_gets_the_gpus_of_its_finished_init_container_again(eight_gpus: tuple[Kubelet, Plugin]) -> None:
    """The kubelet names them as those that a preferred allocation must include."""
    kubelets, _ = eight_gpus
    kubelets.expect(gpu=(8, 8))
    first = kubelets.admit("pod", "init", {GPU: 1})["envs"]["NVIDIA_VISIBLE_DEVICES"]
    kubelets.finish_init_container("pod", "init")
    given = kubelets.admit("pod", "main", {GPU: 2})["envs"]["NVIDIA_VISIBLE_DEVICES"].split(",")
    assert len(given) == 2
    assert first in given
    kubelets.delete("pod")
    asked = [line.split()[2:] for line in kubelets.read_journal() if line.startswith("preferred")]
    assert sorted(asked[-1]) == sorted(given)


def test_the_kubelet_starts_again(simulated_host: SimulatedHost, eight: tuple[Kubelet, Plugin]) -> None:
    kubelets, running = eight
    assert set(kubelets.devices(GPU)) == set(simulated_host.gpus)
    assert all(len(nodes) == 1 for nodes in kubelets.topology(GPU).values()), "each GPU has its NUMA node"
    given = kubelets.admit("kept", "main", {GPU: 2})
    held = kubelets.held("kept")[GPU]
    kubelets.restart()
    kubelets.expect(gpu=(8, 8))
    assert kubelets.held("kept") == {GPU: held}, "its checkpoint says so"
    assert kubelets.start_container("kept", "main") == given
    rest = kubelets.admit("rest", "main", {GPU: 6})["envs"]["NVIDIA_VISIBLE_DEVICES"].split(",")
    assert sorted([*held, *rest]) == sorted(simulated_host.gpus)
    full = kubelets.answer("admit", "late", "main", {GPU: 1})["error"]
    assert "Requested: 1, Available: 0" in full
    running.wait_for_log("was removed: serving again")


@pytest.mark.rest
def test_the_kubelet_starts_again_in_the_middle_of_calls(
    simulated_host: SimulatedHost, eight: tuple[Kubelet, Plugin]
) -> None:
    kubelets, _ = eight
    for _ in range(3):
        assert kubelets.restart_during_calls(GPU, list(simulated_host.gpus)) >= 20
        kubelets.expect(gpu=(8, 8))
    kubelets.admit("pod", "main", {GPU: 8})


@pytest.mark.rest
def test_a_kubelet_that_was_killed_leaves_a_socket_that_nobody_serves(
    simulated_host: SimulatedHost, directory: Path
) -> None:
    killed = Kubelet(directory)
    killed.wait_until_ready()
    killed.kill()
    with plugin(simulated_host.settings, directory) as running:
        running.wait_for_log("did not take it")
        with kubelet(directory) as kubelets:
            kubelets.expect(gpu=(8, 8))


@pytest.mark.rest
def test_the_plugin_starts_again_with_the_same_ids(simulated_host: SimulatedHost, directory: Path) -> None:
    with kubelet(directory) as kubelets:
        with plugin(simulated_host.settings, directory) as running:
            kubelets.expect(gpu=(8, 8))
            before = kubelets.devices(GPU)
            kubelets.admit("kept", "main", {GPU: 3})
            assert running.end() == 0
            assert running.sockets == []
            kubelets.expect(gpu=(8, 0))
            refused = kubelets.answer("admit", "early", "main", {GPU: 1})["error"]
            assert "no healthy devices present" in refused
        with plugin(simulated_host.settings, directory):
            kubelets.expect(gpu=(8, 8))
            assert kubelets.devices(GPU) == before
            kubelets.admit("late", "main", {GPU: 5})


@pytest.mark.rest
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT], ids=["int", "quit"])
def test_signals_end_it_cleanly_also_without_a_kubelet(
    simulated_host: SimulatedHost, directory: Path, number: int
) -> None:
    directory.mkdir()
    with plugin(simulated_host.settings, directory) as running:
        running.wait_for_log("waiting for the kubelet")
        assert running.sockets == ["nvidia-gpu.sock"]
        assert running.end(number) == 0
    assert list(directory.iterdir()) == []


@pytest.mark.rest
def test_a_left_over_socket_is_replaced(simulated_host: SimulatedHost, directory: Path) -> None:
    directory.mkdir()
    with plugin(simulated_host.settings, directory) as running:
        wait_for("its socket", lambda: running.sockets == ["nvidia-gpu.sock"])
        running.send(signal.SIGKILL)
        running.child.wait()
        assert running.sockets == ["nvidia-gpu.sock"]
    os.mkfifo(directory / "nvidia-gpu.new")
    with plugin(simulated_host.settings, directory), kubelet(directory) as kubelets:
        kubelets.expect(gpu=(8, 8))


@pytest.mark.rest
def test_sockets_and_their_directory_vanish(simulated_host: SimulatedHost, directory: Path) -> None:
    with plugin(simulated_host.settings, directory) as running:
        running.wait_for_log(f"there is no directory {directory}")
        with kubelet(directory) as kubelets:
            kubelets.expect(gpu=(8, 8))
            running.wait_for_log("registered with the kubelet")  # the kubelet has the list before its answer arrives
            (directory / "nvidia-gpu.sock").unlink()
            running.wait_for_log("was removed: serving again")
            running.wait_for_log("registered with the kubelet", 2)
            kubelets.expect(gpu=(8, 8))
            shutil.rmtree(directory)
            running.wait_for_log(f"there is no directory {directory}", 2)
            kubelets.restart()
            kubelets.expect(gpu=(8, 8))


def test_a_kubelet_that_refuses_is_asked_again(eight: tuple[Kubelet, Plugin]) -> None:
    kubelets, running = eight
    kubelets.set_refusal("not now")
    running.send(signal.SIGHUP)
    running.wait_for_log("did not take it: not now")
    kubelets.expect(gpu=(8, 0))
    kubelets.set_refusal("")
    kubelets.expect(gpu=(8, 8))


def test_a_kubelet_that_no_longer_listens_is_told_again(eight: tuple[Kubelet, Plugin]) -> None:
    """Kubelets before 1.25 close the connection of a plugin whose resource another one registers."""
    kubelets, running = eight
    other_plugin(running.directory, 0.5)
    kubelets.expect(gpu=(8, 8))
    running.wait_for_log("the kubelet no longer listens (it ended, or another plugin serves this resource)")
    assert kubelets.admit("pod", "main", {GPU: 8})["envs"], "its own connection, not one of the other's"


@pytest.mark.rest
def test_a_kubelet_that_lost_the_devices_is_told_again(simulated_host: SimulatedHost, work_directory: Path) -> None:
    """Later ones go on listening, and hold all devices for unhealthy when the other plugin goes."""
    directory = work_directory / "kubelet" / "device-plugins"
    pods = work_directory / "kubelet" / "pod-resources"
    pods.mkdir(parents=True)
    with kubelet(directory) as kubelets:
        kubelets.keep_streams()
        kubelets.serve_pods(str(pods / "kubelet.sock"))
        with plugin(simulated_host.settings, directory) as running:
            kubelets.expect(gpu=(8, 8))
            running.wait_for_log("registered with the kubelet")
            other_plugin(directory, 0.5)
            running.wait_for_log(
                "the kubelet does not have these devices (another plugin serves or served this resource)"
            )
            kubelets.expect(gpu=(8, 8))
            assert kubelets.admit("pod", "main", {GPU: 8})["envs"]
            running.wait_for_log("registered with the kubelet", 2)
            assert "no longer listens" not in str(running.log)


@pytest.mark.rest
def test_sixty_four_gpus(session_directory: Path, directory: Path) -> None:
    requirements.require(requirements.programs("gcc"))
    host = make_simulated_host(session_directory / "host64", 64, model="h100")
    with kubelet(directory) as kubelets, plugin(host.settings, directory):
        kubelets.expect(gpu=(64, 64))
        kubelets.admit("some", "main", {GPU: 8})
        kubelets.admit("many", "main", {GPU: 40})
        kubelets.delete("some")
        kubelets.delete("many")
        assert kubelets.soak(GPU, 40, [1, 2, 4, 8, 3]) == {"pods": 40, "devices": 144}


@pytest.mark.rest
def test_gpus_that_appear_are_offered(work_directory: Path, directory: Path) -> None:
    requirements.require(requirements.programs("gcc"))
    settings = work_directory / "settings.toml"
    settings.write_text(f'[simulation]\nroot = "{work_directory}/host"\n')
    with kubelet(directory) as kubelets, plugin(settings, directory) as running:
        running.wait_for_log("no devices to offer: ")
        make_simulated_host(work_directory / "host", 1)
        kubelets.expect(gpu=(1, 1))
        assert not [line for line in running.log if "Traceback" in line]


@pytest.mark.rest
def test_ids_of_mig_devices_that_are_gone_are_refused(work_directory: Path, directory: Path) -> None:
    requirements.require(requirements.programs("gcc"))
    host = make_simulated_host(work_directory / "host", 1, ("0:3g.20gb,1g.5gb",))
    with kubelet(directory) as kubelets, plugin(host.settings, directory, "--mig-strategy", "mixed") as running:
        kubelets.expect(mig_3g=(1, 1), mig_1g=(1, 1))
        (old,) = kubelets.devices(MIG_1G)
        run([PROGRAMS / "ocigpu", "sim", "remove", host.directory])
        make_simulated_host(host.directory, 1, ("0:3g.20gb",))
        running.wait_for_log(f"{MIG_1G}: no longer offered")
        kubelets.expect(mig_3g=(1, 1), mig_1g=(0, 0))
        assert kubelets.answer("admit", "late", "main", {MIG_1G: 1})["error"].startswith("no healthy devices")
        assert "unknown device" in kubelets.answer("allocate", MIG_3G, [old])["error"]


# --- configuration


@pytest.mark.rest
def test_the_configuration_file_is_read_again(
    simulated_host: SimulatedHost, work_directory: Path, directory: Path
) -> None:
    """As a ConfigMap: a link ..data to a directory, replaced as a whole."""
    mounted = work_directory / "config"

    def publish(version: str, text: str) -> None:
        (mounted / version).mkdir(parents=True)
        (mounted / version / "dp.yaml").write_text(text)
        (mounted / "..new").symlink_to(version)
        (mounted / "..new").rename(mounted / "..data")

    publish("..1", "flags: {migStrategy: [}")
    (mounted / "dp.yaml").symlink_to("..data/dp.yaml")
    words = ("--config-file", str(mounted / "dp.yaml"))
    with kubelet(directory) as kubelets, plugin(simulated_host.settings, directory, *words) as running:
        running.wait_for_log("nothing is offered until it is corrected")
        publish("..2", json.dumps(SHARED))
        kubelets.expect(gpu=(16, 16))
        first, second = (f"{simulated_host.gpus[0]}::{n}" for n in (0, 1))
        given = kubelets.allocate(GPU, [second, first])
        assert given["envs"] == {"NVIDIA_VISIBLE_DEVICES": simulated_host.gpus[0]}, "one GPU, asked twice"
        publish("..3", "sharing: {timeSlicing: {replicas: 4}}")
        running.wait_for_log("the one before stays")
        kubelets.expect(gpu=(16, 16))
        one_each = {"failRequestsGreaterThanOne": True, **SHARED["sharing"]["timeSlicing"]}
        publish("..4", json.dumps({"sharing": {"timeSlicing": {**one_each, "renameByDefault": True}}}))
        kubelets.wait_for({"nvidia.com/gpu.shared": [16, 16]})
        kubelets.expect(gpu=(0, 0))
        refused = kubelets.answer("allocate", "nvidia.com/gpu.shared", [first, second])["error"]
        assert "maximum request size for shared resources is 1; found 2" in refused
        (mounted / "dp.yaml").unlink()
        running.wait_for_log("No such file")
        running.send(signal.SIGHUP)
        running.wait_for_log("SIGHUP")
        kubelets.wait_for({"nvidia.com/gpu.shared": [16, 16]})


@pytest.mark.rest
def test_devices_shared_by_mps_wait_for_their_daemon(
    simulated_host: SimulatedHost, work_directory: Path, directory: Path
) -> None:
    file = work_directory / "dp.yaml"
    mps = {"resources": [{"name": "gpu", "replicas": 2}]}
    file.write_text(json.dumps({"flags": {"mpsRoot": f"{work_directory}/mps"}, "sharing": {"mps": mps}}))
    ready = work_directory / "mps/nvidia.com/gpu/.ready"
    ready.parent.mkdir(parents=True)
    with (
        kubelet(directory) as kubelets,
        plugin(simulated_host.settings, directory, "--config-file", str(file)) as running,
    ):
        kubelets.expect(gpu=(16, 0))
        running.wait_for_log("no control daemon is ready")
        ready.touch()
        kubelets.expect(gpu=(16, 16))
        given = kubelets.admit("pod", "main", {GPU: 1})
        assert given["envs"]["CUDA_MPS_PIPE_DIRECTORY"] == "/mps/nvidia.com/gpu/pipe"
        ready.unlink()
        kubelets.expect(gpu=(16, 0))


def test_sighup_registers_anew(eight: tuple[Kubelet, Plugin]) -> None:
    kubelets, running = eight
    before = kubelets.read_journal()
    running.send(signal.SIGHUP)
    wait_for("a registration", lambda: kubelets.read_journal() == [*before, f"registered {GPU} nvidia-gpu.sock"])
    running.wait_for_log("registered with the kubelet")
    kubelets.expect(gpu=(8, 8))


@pytest.mark.parametrize(
    ("words", "variables", "status", "error"),
    one_in(
        3,
        [
            (["--mig-strategie=none"], {}, 2, 'OCIGPU-ARG-1: no such option: "--mig-strategie=none"'),
            (["--mig-strategy"], {}, 2, "OCIGPU-ARG-1: --mig-strategy needs a value"),
            (["--log-format", "xml"], {}, 2, "OCIGPU-ARG-1: --log-format"),
            (["--mig-strategy", "some"], {}, 1, "OCIGPU-KUBE-1: --mig-strategy"),
            ([], {"PASS_DEVICE_SPECS": "maybe"}, 1, "OCIGPU-KUBE-1: PASS_DEVICE_SPECS"),
            (["--fail-on-init-error"], {}, 1, "OCIGPU-HOST-1: no NVIDIA driver"),
        ],
    ),
    ids=["option", "value", "format", "choice", "variable", "no-driver"],
)
def test_a_wrong_command_line_says_so(
    work_directory: Path, words: list[str], variables: dict[str, str], status: int, error: str
) -> None:
    settings = work_directory / "settings.toml"
    (work_directory / "none").mkdir()
    settings.write_text(f'[simulation]\nroot = "{work_directory}/none"\n')
    command = [PROGRAMS / "ocigpu", "device-plugin", "--config", settings, f"--kubelet-socket={work_directory}/k.sock"]
    done = run([*command, *words], check=False, env={"PATH": os.environ["PATH"], **variables})
    assert done.returncode == status, done
    assert done.stderr.startswith(f"ocigpu: {error}"), done.stderr
    assert list(work_directory.glob("*.sock*")) == []


def test_without_the_extra_the_command_names_it(work_directory: Path) -> None:
    code = "import sys; sys.modules['grpc'] = None\n"
    code += "from ocigpu.cli.front.main import main\nsys.exit(main(['device-plugin']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "OCIGPU-KUBE-3" in done.stderr
    assert "-py3-none-any.whl[kubernetes]'" in done.stderr


def test_the_command_itself_works(simulated_host: SimulatedHost, directory: Path) -> None:
    command = [PROGRAMS / "ocigpu", "device-plugin", "--config", str(simulated_host.settings)]
    with kubelet(directory) as kubelets:
        kubelets.wait_until_ready()
        child = subprocess.Popen(
            [*command, "--kubelet-socket", f"{directory}/kubelet.sock", "--log-format", "json"],
            stdout=subprocess.PIPE,
            text=True,
        )
        lines: list[str] = []
        try:
            kubelets.expect(gpu=(8, 8))
            assert child.stdout
            for line in child.stdout:  # the kubelet asks for devices before it answers the registration
                lines.append(line)
                if len(lines) == 2:
                    break
        finally:
            child.terminate()
            output, _ = child.communicate(timeout=60)
    assert child.returncode == 0
    messages = [json.loads(line) for line in [*lines, *output.splitlines()]]
    assert {(each["level"], each["msg"]) for each in messages} == {
        ("info", "nvidia.com/gpu: 8 devices"),
        ("info", "nvidia.com/gpu: registered with the kubelet"),
        ("info", "ending"),
    }
