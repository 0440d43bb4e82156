"""What a container is to have, worked out from its configuration, whatever is in that: no container is needed."""

import subprocess
from typing import Any

import pytest
from live_lab import read_facts
from support.bundle import base_config
from support.product import RUNTIME, SimulatedHost

from ocigpu.containers.attached import AttachRecord
from ocigpu.containers.believed import Container
from ocigpu.containers.live import Live, Now, change_grant, plan_for, read_now
from ocigpu.containers.rules import numbers_of
from ocigpu.containers.shown import Mount, ShownMounts, read_mounts
from ocigpu.core.facts import DeviceNode, ImageFacts
from ocigpu.gpus.nvidia.views import PROC_DRIVER
from ocigpu.provision.apply import Caller
from ocigpu.provision.container import open_container
from ocigpu.system.settings_file import read_settings

pytestmark = pytest.mark.root

FOUND = Container("one", "one", "", "runc", "running", 1 << 22, "/nowhere", "/nowhere/rootfs", "/nowhere/state.json")
HOOK = {"prestart": [{"path": str(RUNTIME.with_name("ocigpu-hook")), "args": ["ocigpu-hook", "prestart"]}]}
ALL = {"NVIDIA_VISIBLE_DEVICES": "all"}


def made(device: str, root: str, point: str) -> Mount:
    return Mount(1, 0, device, root, point, ("rw",), (), "ext4", "none", ("rw",))


def live_of(host: SimulatedHost, config: dict[str, Any], mounted: bool = True) -> Live:
    """A container of this configuration, with the mounts that a hook makes for all GPUs or without."""
    settings = read_settings(str(host.settings))
    facts = read_facts(settings)
    places = [*(library.host_path for library in facts.libraries), *(file.host_path for file in facts.binaries)]
    mounts = [made("8:1", path, f"/inside{path}") for path in places]
    for gpu in facts.gpus:
        path = f"{PROC_DRIVER}/gpus/{gpu.proc_name}"
        mounts.append(made("0:9", path.removeprefix("/proc"), path))
    table = ShownMounts(tuple(mounts) if mounted else (), (made("8:1", "/", "/"),))
    return Live(FOUND, None, config, settings, facts, ImageFacts(), Caller(), (), table)


def with_hook(variables: dict[str, str], hooks: object = HOOK) -> dict[str, Any]:
    return {**base_config(["true"], variables), "hooks": hooks}


@pytest.mark.parametrize(
    ("hooks", "count"),
    [
        pytest.param(HOOK, 8, id="our hook"),
        pytest.param({"prestart": [{"path": "/x/nvidia-container-runtime-hook"}]}, 8, id="the vendor's hook"),
        pytest.param({"createRuntime": HOOK["prestart"]}, 8, id="by its newer name"),
        pytest.param({"poststop": HOOK["prestart"]}, 0, id="at another stage"),
        pytest.param({"prestart": [{"path": "/bin/true"}, 7, None, {"path": ["ocigpu-hook"]}]}, 0, id="other hooks"),
        pytest.param({"prestart": "ocigpu-hook"}, 0, id="no list"),
        pytest.param([], 0, id="no object"),
    ],
)
def test_only_a_hook_that_ran_answers_a_variable(simulated_host: SimulatedHost, hooks: object, count: int) -> None:
    assert len(read_now(live_of(simulated_host, with_hook(ALL, hooks))).devices) == count
    assert read_now(live_of(simulated_host, with_hook(ALL, hooks), mounted=False)).devices == ()
    elsewhere = live_of(simulated_host, with_hook(ALL, hooks))
    assert read_now(elsewhere._replace(mounts=elsewhere.mounts._replace(of_runtime=False))).devices == ()


@pytest.mark.parametrize(
    "edit",
    [
        {"mounts": [{"source": ["/dev/null"], "destination": {}}, 3, None, {"destination": "/x"}]},
        {"mounts": {"source": "/"}},
        {"linux": {"devices": [{"path": 7, "type": "c", "major": 195, "minor": 3}, [], None]}},
        {"linux": {"devices": [{"path": "/dev/nvidia3", "type": "c", "major": "195", "minor": True}]}},
        {"annotations": {"ocigpu/declared": "{{{"}},
        {"process": []},
        {"linux": {"resources": {"devices": "all"}}},
        {"linux": []},
    ],
)
def test_parts_of_the_wrong_type_grant_nothing(simulated_host: SimulatedHost, edit: dict[str, Any]) -> None:
    live = live_of(simulated_host, {**base_config(["true"], ALL), **edit})
    now = read_now(live)
    assert (now.devices, now.grant.numbers) == ((), frozenset())


@pytest.mark.parametrize("obeyed", [True, False])
def test_what_else_an_image_asks_for_comes_with_an_attach_only_where_variables_are_obeyed(
    simulated_host: SimulatedHost, obeyed: bool
) -> None:
    live = live_of(simulated_host, base_config(["true"], {"NVIDIA_IMEX_CHANNELS": "0", **ALL}))
    settings = live.settings._replace(accept_nvidia_visible_devices_envvar_when_unprivileged=obeyed)
    channel = DeviceNode("/dev/nvidia-caps-imex-channels/channel0", "", 234, 0)
    live = live._replace(settings=settings, facts=live.facts._replace(imex_major=234, imex_nodes=(channel,)))
    plan = plan_for(live, [simulated_host.gpus[2]])
    assert plan.gpus == (simulated_host.gpus[2],)
    assert any(rule.major == 234 for rule in plan.device_rules()) == obeyed


def test_what_was_detached_is_denied_and_what_was_attached_allowed(simulated_host: SimulatedHost) -> None:
    live = live_of(simulated_host, with_hook({"NVIDIA_VISIBLE_DEVICES": "0,1"}))
    gpus = simulated_host.gpus
    started = read_now(live).grant
    grant = change_grant(live, started, (gpus[1], gpus[5]))
    assert grant.devices == (gpus[1], gpus[5])
    assert {number for number in grant.numbers if number[0] == 195 and number[1] < 8} == {(195, 1), (195, 5)}
    assert {path for path in grant.nodes if path.startswith("/dev/nvidia")} == {
        "/dev/nvidia1", "/dev/nvidia5", "/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools",
    }  # fmt: skip
    assert change_grant(live, started, started.devices).numbers == started.numbers


def test_the_devices_of_a_container_follow_from_its_start_and_its_record(simulated_host: SimulatedHost) -> None:
    started = read_now(live_of(simulated_host, with_hook({"NVIDIA_VISIBLE_DEVICES": "0,1"}))).grant
    gpus = simulated_host.gpus
    now = Now(started, AttachRecord(attached=(gpus[5],), detached=(gpus[0],)), started)
    assert now.devices == (gpus[1], gpus[5])


@pytest.mark.parametrize(
    ("words", "with_users", "expected"),
    [
        pytest.param(["-m"], False, True, id="as a runtime makes it"),
        pytest.param(["-m"], True, False, id="without its user namespace"),
        pytest.param(["-U", "-r", "-m"], True, True, id="as a runtime makes it with users"),
        pytest.param(["-U", "-r", "-m"], False, False, id="left by the container"),
        pytest.param(["-U", "-r", "unshare", "-U", "-r", "-m"], True, False, id="left with users"),
    ],
)
def test_a_mount_namespace_that_a_container_made_itself_tells_nothing(
    words: list[str], with_users: bool, expected: bool
) -> None:
    command = ["unshare", *words, "sh", "-c", "echo; exec sleep 60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            inside = open_container(process.pid, "/", process.pid)
            config = {"linux": {"namespaces": [{"type": "user"}] if with_users else []}}
            assert read_mounts(inside, config).of_runtime == expected
            inside.close()
        finally:
            process.kill()


def test_a_mig_device_has_its_capabilities_and_its_gpu(mig_host: SimulatedHost) -> None:
    facts = read_facts(read_settings(str(mig_host.settings)))
    uuid, *minors = mig_host.mig_devices[0]
    majors = dict(facts.majors)
    numbers = numbers_of(facts, [uuid])
    assert {(majors["nvidia-caps"], minor) for minor in minors} | {(195, 0)} <= numbers
    other = numbers_of(facts, [mig_host.mig_devices[1][0]])
    assert (195, 0) in other
    assert not any((majors["nvidia-caps"], minor) in other for minor in minors)
