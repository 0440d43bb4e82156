"""ocigpu-runtime with CDI specifications of any vendor: what a container of runc or crun really gets."""

import json
import os
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support import requirements
from support.bundle import give_to
from support.fixtures import MakeBundle
from support.process import Completed, explain
from support.product import RUNTIME, PublicCopy, SimulatedHost, failed_with
from support.runtimes import answers, container_id, parts, probe, run_container, script

from ocigpu.cdi.edits import mount_edit
from ocigpu.core.actions import Bind

pytestmark = [pytest.mark.root, pytest.mark.engine]

RUNTIMES = pytest.mark.parametrize("low_level", ["runc", "crun"])
OWN_RUN = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o mode=755 tmpfs /run && exec "$@"', "sh")
"""Put before a command: what it keeps below /run goes with it."""
VENDORS = 'cdi.environment-vendors = ["nvidia.com", "other.org", "x.org"]'
NUMBER = os.makedev(240, 7)
"""A number that no driver has: opening such a node fails with ENXIO where it is allowed, with EPERM where not."""


class Things(NamedTuple):
    """A host with devices of a vendor of our own: directory of nodes and files, specifications, settings."""

    directory: Path
    environment: dict[str, str]

    @property
    def specs(self) -> Path:
        return self.directory / "cdi"

    @property
    def hook_output(self) -> Path:
        return self.directory / "hook-output"

    def write(self, name: str, spec: Any) -> Path:
        path = self.specs / name
        path.write_text(spec if isinstance(spec, str) else json.dumps(spec))
        path.chmod(0o644)
        return path

    def run(self, bundle: Path, prefix: tuple[str, ...] = OWN_RUN, **options: Any) -> Completed:
        env = {**self.environment, **options.pop("env", {})}
        return run_container([RUNTIME], bundle, container_id(), env=env, prefix=prefix, **options)


def make_node(path: Path, number: int) -> None:
    os.mknod(path, stat.S_IFCHR, number)
    path.chmod(0o666)


def hook_that_notes(things: Path, word: str) -> dict[str, Any]:
    command = f'cat >/dev/null; echo "{word} $MARK" >> {things}/hook-output'  # crun fails when nobody reads the state
    return {
        "hookName": "createContainer",
        "path": "/bin/sh",
        "args": ["sh", "-c", command],
        "env": ["MARK=set", "PATH=/bin"],
    }


def spec_of_things(directory: Path) -> dict[str, Any]:
    """Return a specification that uses every kind of edit that needs no special hardware."""

    def mount(name: str, *options: str) -> dict[str, Any]:
        options = ("rbind", "rprivate", "nosuid", "nodev", *options)
        return {"hostPath": f"{directory}/{name}", "containerPath": f"/opt/{name}", "options": options}

    return {
        "cdiVersion": "0.7.0",
        "kind": "example.com/thing",
        "devices": [
            {
                "name": "0",
                "containerEdits": {
                    "deviceNodes": [{"path": "/dev/thing0", "hostPath": f"{directory}/thing0", "permissions": "rw"}],
                    "env": ["THING=0"],
                },
            },
            {
                "name": "1",
                "containerEdits": {
                    "deviceNodes": [{"path": "/dev/thing1", "hostPath": f"{directory}/null"}],
                    "env": ["THING=1"],
                    "hooks": [hook_that_notes(directory, "device")],
                },
            },
            {"name": "gone", "containerEdits": {"deviceNodes": [{"path": f"{directory}/gone"}]}},
        ],
        "containerEdits": {
            "env": ["VENDOR=example.com", "NVIDIA_VISIBLE_DEVICES=void"],
            "mounts": [mount("lib", "ro"), mount("lib/file", "ro"), mount("socket-directory")],
            "hooks": [hook_that_notes(directory, "common")],
            "additionalGids": [1234],
        },
    }


@pytest.fixture
def make_things(work_directory: Path, runtime_environment: dict[str, str]) -> Callable[..., Things]:
    """Call with the low-level runtime and more settings: returns a host with things."""

    def make(low_level: str = "runc", more: str = 'mode = "cdi"') -> Things:
        requirements.require(requirements.programs(low_level))
        directory = work_directory / "things"
        (directory / "cdi").mkdir(parents=True, mode=0o755)
        (directory / "lib").mkdir()
        (directory / "lib/file").write_text("a file of the driver\n")
        (directory / "socket-directory").mkdir()
        (directory / "hook-output").touch()
        (directory / "hook-output").chmod(0o666)  # hooks may run with the container's user ids
        make_node(directory / "thing0", NUMBER)
        make_node(directory / "null", os.makedev(1, 3))
        program = requirements.find_program(low_level)
        settings = directory / "config.toml"
        text = f'{more}\nruntime.runtimes = ["{program}"]\nruntime.log = "{directory}/log"\n'
        settings.write_text(
            f'{text}cdi.spec-dirs = ["{directory}/cdi"]\ncdi.default-kind = "example.com/thing"\n{VENDORS}\n'
        )
        settings.chmod(0o644)
        variables = {
            name: value for name, value in runtime_environment.items() if low_level == "crun" or name != "LD_PRELOAD"
        }
        things = Things(directory, {**variables, "OCIGPU_CONFIG": str(settings)})
        things.write("thing.json", spec_of_things(directory))
        return things

    return make


MakeThings = Callable[..., Things]
LOOK = script(
    ["env"],
    probe(
        ["list", "/dev", "/opt"],
        ["open", "/dev/thing0", "/dev/thing1"],
        ["read", "/opt/lib/file"],
        ["create", "/opt/lib/x", "/opt/socket-directory/x"],
        ["mknod", "/dev/other", "240", "8"],
        ["open", "/dev/other"],
    ),
    ["id", "-G"],
)


def ask_by_variable(config: dict[str, Any]) -> None:
    config["process"]["env"].append("NVIDIA_VISIBLE_DEVICES=0,example.com/thing=1")


def ask_by_annotation(config: dict[str, Any]) -> None:
    config["annotations"] = {"cdi.k8s.io/thing_1": "example.com/thing=1", "cdi.k8s.io/thing_0": "example.com/thing=0"}


def ask_by_mount(config: dict[str, Any]) -> None:
    for name in ("thing/0", "thing=1"):
        destination = f"/var/run/nvidia-container-devices/cdi/example.com/{name}"
        config["mounts"].append(
            {"type": "bind", "source": "/dev/null", "destination": destination, "options": ["bind", "ro"]}
        )


@RUNTIMES
@pytest.mark.parametrize("ask", [ask_by_variable, ask_by_annotation, ask_by_mount])
def test_a_container_gets_what_the_specification_says(
    make_things: MakeThings, make_bundle: MakeBundle, low_level: str, ask: Callable[[dict[str, Any]], None]
) -> None:
    things = make_things(low_level, 'mode = "cdi"\naccept-nvidia-visible-devices-as-volume-mounts = true')
    bundle = make_bundle(LOOK, layout="busybox", edit=ask)
    result = things.run(bundle, cgroup="v2")
    assert result.returncode == 0, explain(result)
    variables, probed, groups = parts(result.stdout)
    found = variables.splitlines()
    assert {"VENDOR=example.com", "NVIDIA_VISIBLE_DEVICES=void", "THING=1"} <= set(found)
    assert len([line for line in found if line.startswith(("NVIDIA_VISIBLE", "THING"))]) == 2
    seen = answers(probed)
    assert seen["open", "/dev/thing0"] == "ENXIO", "allowed, and no driver behind it"
    assert seen["open", "/dev/thing1"] == "ok"
    assert seen["read", "/opt/lib/file"] == "a file of the driver"
    assert seen["create", "/opt/lib/x"] == "EROFS"
    assert seen["create", "/opt/socket-directory/x"] == "ok"
    assert seen["mknod", "/dev/other"] == "ok"
    assert seen["open", "/dev/other"] == "EPERM", "only the devices asked for are allowed"
    assert "1234" in groups.split()
    assert things.hook_output.read_text().splitlines() == ["common set", "device set"]
    log = (things.directory / "log").read_text()
    assert "granted example.com/thing=0, example.com/thing=1" in log
    assert "level=warning" not in log


@RUNTIMES
def test_a_container_without_device_rules_can_open_its_device(
    make_things: MakeThings, make_bundle: MakeBundle, low_level: str
) -> None:
    things = make_things(low_level)

    def edit(config: dict[str, Any]) -> None:
        del config["linux"]["resources"]

    bundle = make_bundle(probe(["open", "/dev/thing0", "/dev/null"]), {"NVIDIA_VISIBLE_DEVICES": "0"}, "busybox", edit)
    seen = answers(things.run(bundle, cgroup="v2").stdout)
    assert (seen["open", "/dev/thing0"], seen["open", "/dev/null"]) == ("ENXIO", "ok")


@RUNTIMES
def test_a_container_with_user_ids_of_its_own_gets_the_node_of_another_path(
    make_things: MakeThings, make_bundle: MakeBundle, low_level: str
) -> None:
    """Runtimes bind the host's node of the same path there, so another path must be a mount of ours."""
    things = make_things(low_level)

    def edit(config: dict[str, Any]) -> None:
        config["linux"]["namespaces"].append({"type": "user"})
        for name in ("uidMappings", "gidMappings"):
            config["linux"][name] = [{"containerID": 0, "hostID": 100000, "size": 65536}]
        config["mounts"] = [item for item in config["mounts"] if item["destination"] != "/sys"]

    bundle = make_bundle(LOOK, {"NVIDIA_VISIBLE_DEVICES": "0,1"}, "busybox", edit)
    give_to(bundle / "rootfs", 100000, 100000)
    result = things.run(bundle, cgroup="v2")
    assert result.returncode == 0, explain(result)
    _, probed, _ = parts(result.stdout)
    seen = answers(probed)
    assert (seen["open", "/dev/thing0"], seen["open", "/dev/thing1"]) == ("ENXIO", "ok")
    assert seen["read", "/opt/lib/file"] == "a file of the driver"


@RUNTIMES
def test_a_container_of_an_ordinary_user_gets_its_devices(
    make_things: MakeThings, make_bundle: MakeBundle, public_copy: PublicCopy, low_level: str
) -> None:
    requirements.require(requirements.user_namespaces())
    things = make_things(low_level)
    (things.directory / "log").touch()
    (things.directory / "log").chmod(0o666)
    things.write("thing.json", {**spec_of_things(things.directory), "containerEdits": {"env": ["VENDOR=x"]}})

    def edit(config: dict[str, Any]) -> None:
        linux = config["linux"]
        linux["namespaces"] = [item for item in linux["namespaces"] if item["type"] != "network"] + [{"type": "user"}]
        for name in ("uidMappings", "gidMappings"):
            linux[name] = [{"containerID": 0, "hostID": 4321, "size": 1}]
        del linux["resources"]
        config["mounts"] = [item for item in config["mounts"] if item["destination"] not in ("/sys", "/dev/pts")]

    bundle = make_bundle(probe(["open", "/dev/thing0"]), {"NVIDIA_VISIBLE_DEVICES": "0"}, "busybox", edit)
    config = json.loads((bundle / "config.json").read_text())
    del config["linux"]["cgroupsPath"]
    (bundle / "config.json").write_text(json.dumps(config))
    home = bundle.parent / "home"
    (home / "run").mkdir(parents=True, mode=0o700)
    give_to(bundle, 4321, 4321)
    give_to(home, 4321, 4321)
    env = {**things.environment, "HOME": str(home), "XDG_RUNTIME_DIR": str(home / "run")}
    user = ("setpriv", "--reuid=4321", "--regid=4321", "--clear-groups")
    result = run_container(
        [public_copy.runtime], bundle, container_id(), env=env, prefix=user, cgroup="v2", state=home / "state"
    )
    assert result.returncode == 0, explain(result)
    assert answers(result.stdout)["open", "/dev/thing0"] == "ENXIO"


@pytest.mark.parametrize("mode", ["auto", "cdi"])
def test_auto_serves_qualified_names_and_nothing_else_from_specifications(
    make_things: MakeThings, make_bundle: MakeBundle, mode: str
) -> None:
    things = make_things(more=f'mode = "{mode}"')
    variables = {"NVIDIA_VISIBLE_DEVICES": "example.com/thing=1"}
    bundle = make_bundle(probe(["open", "/dev/thing1"]), variables, "busybox")
    assert answers(things.run(bundle).stdout) == {("open", "/dev/thing1"): "ok"}
    mixed = make_bundle(["true"], {"NVIDIA_VISIBLE_DEVICES": "example.com/thing=1,x"}, "busybox")
    code = "OCIGPU-REQ-1" if mode == "auto" else "OCIGPU-CDI-4"
    assert failed_with(code, things.run(mixed))


def test_hooks_that_would_give_gpus_are_taken_out(make_things: MakeThings, make_bundle: MakeBundle) -> None:
    things = make_things()

    def edit(config: dict[str, Any]) -> None:
        names = ("nvidia-container-runtime-hook", "ocigpu-hook")
        config["hooks"] = {"prestart": [{"path": f"/nonexistent/{name}", "args": [name, "prestart"]} for name in names]}

    bundle = make_bundle(probe(["open", "/dev/thing1"]), {"NVIDIA_VISIBLE_DEVICES": "1"}, "busybox", edit)
    result = things.run(bundle)
    assert result.returncode == 0, explain(result)
    assert json.loads((bundle / "config.json").read_text())["hooks"]["prestart"] == []


def test_devices_of_several_vendors_come_together(make_things: MakeThings, make_bundle: MakeBundle) -> None:
    things = make_things()
    things.write(
        "other.yaml",
        f"cdiVersion: 0.5.0\nkind: other.org/nic\ndevices:\n- name: a\n  containerEdits:\n    env: [NIC=a]\n"
        f"    deviceNodes: [{{path: /dev/nic, hostPath: {things.directory}/thing0}}]\n",
    )
    variables = {"NVIDIA_VISIBLE_DEVICES": "other.org/nic=a,example.com/thing=1"}
    bundle = make_bundle(script(["env"], probe(["open", "/dev/nic", "/dev/thing1"])), variables, "busybox")
    result = things.run(bundle)
    assert result.returncode == 0, explain(result)
    variables_seen, probed = parts(result.stdout)
    assert {"NIC=a", "THING=1", "VENDOR=example.com"} <= set(variables_seen.splitlines())
    assert answers(probed) == {("open", "/dev/nic"): "ENXIO", ("open", "/dev/thing1"): "ok"}


def one_line(result: Completed, code: str) -> str:
    """Return the line with which the shim failed; a hint may follow it, nothing else."""
    assert result.returncode == 1, explain(result)
    line, *hints = result.stderr.splitlines()
    assert line.startswith(f"ocigpu-runtime: {code}: "), explain(result)
    assert [hint[:6] for hint in hints] in ([], ["hint: "])
    return line


@pytest.mark.parametrize(
    ("value", "code", "said"),
    [
        pytest.param("7", "OCIGPU-CDI-4", "unresolvable CDI devices example.com/thing=7", id="unknown device"),
        pytest.param("x.org/y=1,0", "OCIGPU-CDI-4", "unresolvable CDI devices x.org/y=1", id="unknown vendor"),
        pytest.param("disk.com/y=1", "OCIGPU-REQ-1", "the image may have written this", id="vendor not permitted"),
        pytest.param("none", "OCIGPU-CDI-4", "unresolvable CDI devices example.com/thing=none", id="none"),
        pytest.param("0,gone", "OCIGPU-CDI-6", "failed to stat CDI host device", id="missing node"),
        pytest.param("0,a b", "OCIGPU-REQ-1", '"a b" is not a CDI device', id="not a name"),
    ],
)
def test_a_device_that_cannot_be_given_stops_the_container(
    make_things: MakeThings, make_bundle: MakeBundle, value: str, code: str, said: str
) -> None:
    things = make_things()
    bundle = make_bundle(["true"], {"NVIDIA_VISIBLE_DEVICES": value}, "busybox")
    before = (bundle / "config.json").read_bytes(), (bundle / "config.json").stat().st_ino
    line = one_line(things.run(bundle), code)
    assert said in line
    assert code != "OCIGPU-CDI-6" or f"{things.specs}/thing.json: " in line
    assert ((bundle / "config.json").read_bytes(), (bundle / "config.json").stat().st_ino) == before
    assert sorted(os.listdir(bundle)) == ["config.json", "rootfs"]


def test_a_broken_file_beside_a_good_one_stops_only_who_needs_it(
    make_things: MakeThings, make_bundle: MakeBundle
) -> None:
    things = make_things()
    broken = things.write("broken.yaml", "cdiVersion: [\n")
    open_to_all = things.write("writable.json", spec_of_things(things.directory))
    open_to_all.chmod(0o666)
    good = make_bundle(probe(["open", "/dev/thing1"]), {"NVIDIA_VISIBLE_DEVICES": "1"}, "busybox")
    assert answers(things.run(good).stdout) == {("open", "/dev/thing1"): "ok"}
    bad = make_bundle(["true"], {"NVIDIA_VISIBLE_DEVICES": "x.org/y=1"}, "busybox")
    line = one_line(things.run(bad), "OCIGPU-CDI-4")
    assert f" and 2 files could not be used: {broken}: " in line
    assert f"{open_to_all}: owner 0, mode 0666: others may write" in line


def test_two_files_with_one_device_stop_the_container(make_things: MakeThings, make_bundle: MakeBundle) -> None:
    things = make_things()
    second = things.write("thing2.json", spec_of_things(things.directory))
    bundle = make_bundle(["true"], {"NVIDIA_VISIBLE_DEVICES": "1"}, "busybox")
    line = one_line(things.run(bundle), "OCIGPU-CDI-5")
    assert f'(specs "{second}", "{things.specs}/thing.json")' in line


@pytest.mark.parametrize("value", [None, "", "void"])
def test_who_asks_for_nothing_is_left_alone(
    make_things: MakeThings, make_bundle: MakeBundle, value: str | None
) -> None:
    things = make_things()
    things.write("broken.yaml", "[")
    bundle = make_bundle(["true"], None if value is None else {"NVIDIA_VISIBLE_DEVICES": value}, "busybox")
    before = (bundle / "config.json").read_bytes(), (bundle / "config.json").stat().st_ino
    result = things.run(bundle)
    assert (result.returncode, result.stderr) == (0, "")
    assert ((bundle / "config.json").read_bytes(), (bundle / "config.json").stat().st_ino) == before


def test_a_stale_specification_of_ours_is_named(
    make_things: MakeThings, make_bundle: MakeBundle, simulated_host: SimulatedHost
) -> None:
    things = make_things()
    settings = Path(things.environment["OCIGPU_CONFIG"])
    settings.write_text(settings.read_text() + simulated_host.settings.read_text())
    stale = {"ocigpu/fingerprint": "source=nvidia driver=1.2.3"}
    path = things.write("thing.json", {**spec_of_things(things.directory), "annotations": stale})
    bundle = make_bundle(probe(["open", "/dev/thing1"]), {"NVIDIA_VISIBLE_DEVICES": "1"}, "busybox")
    assert answers(things.run(bundle).stdout) == {("open", "/dev/thing1"): "ok"}
    said = f"{path} is stale: the driver was 1.2.3 and is 550.163.01"
    assert f'level=warning msg="{said}' in (things.directory / "log").read_text()
    gone = make_bundle(["true"], {"NVIDIA_VISIBLE_DEVICES": "gone"}, "busybox")
    assert said in one_line(things.run(gone), "OCIGPU-CDI-6")


def test_what_is_kept_for_the_next_container_is_for_root_alone(
    make_things: MakeThings, make_bundle: MakeBundle
) -> None:
    """And a specification of a moment ago is not kept: it could change again within the same tick of the clock."""
    things = make_things()
    kept = things.directory / "run"
    kept.mkdir()
    prefix = ("unshare", "--mount", "sh", "-c", f'mount --bind {kept} /run && exec "$@"', "sh")
    result = things.run(make_bundle(["true"], {"NVIDIA_VISIBLE_DEVICES": "1"}, "busybox"), prefix)
    assert result.returncode == 0, explain(result)
    (directory,) = kept.iterdir()
    assert directory.name == "ocigpu"
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert [name for name in os.listdir(directory) if name.startswith("cdi-")] == []


@RUNTIMES
def test_a_hook_without_an_environment_does_not_get_the_images(
    make_things: MakeThings, make_bundle: MakeBundle, low_level: str
) -> None:
    """What the image sets (LD_PRELOAD=/proc/self/cwd/x.so) would be loaded by root of the host."""
    things = make_things(low_level)
    command = f"cat >/dev/null; echo preload=$OF_THE_IMAGE. >> {things.directory}/hook-output"
    hook = {"hookName": "createContainer", "path": "/bin/sh", "args": ["sh", "-c", command]}
    spec = {
        "cdiVersion": "0.6.0",
        "kind": "x.org/thing",
        "devices": [{"name": "0", "containerEdits": {"env": ["A=1"]}}],
    }
    things.write(
        "x.json",
        {**spec, "containerEdits": {"hooks": [hook, {**hook, "args": ["sh", "-c", f"{command};"], "env": []}]}},
    )

    def edit(config: dict[str, Any]) -> None:
        config["process"]["env"] += ["OF_THE_IMAGE=evil", "NVIDIA_VISIBLE_DEVICES=x.org/thing=0"]

    result = things.run(make_bundle(["true"], layout="busybox", edit=edit), cgroup="v2")
    assert result.returncode == 0, explain(result)
    assert things.hook_output.read_text().splitlines() == ["preload=."] * 2


@RUNTIMES
def test_mounts_of_our_specifications_start_where_a_pod_has_a_user_namespace(
    make_things: MakeThings, make_bundle: MakeBundle, low_level: str
) -> None:
    """crun up to 1.29 compares the type of each mount where a namespace is joined, also one that is not there."""
    things = make_things(low_level)
    mount = mount_edit(Bind(f"{things.directory}/lib/file", "/opt/file", ("ro", "nosuid", "nodev"), ""))
    pod = subprocess.Popen(["unshare", "--ipc", "sleep", "600"])

    def edit(config: dict[str, Any]) -> None:
        config["mounts"].append(
            {"destination": mount["containerPath"], "source": mount["hostPath"]}
            | {name: mount[name] for name in ("type", "options") if name in mount}
        )
        linux = config["linux"]
        linux["namespaces"] = [each for each in linux["namespaces"] if each["type"] not in ("ipc", "user")]
        linux["namespaces"] += [{"type": "user"}, {"type": "ipc", "path": f"/proc/{pod.pid}/ns/ipc"}]
        linux["uidMappings"] = linux["gidMappings"] = [{"containerID": 0, "hostID": 0, "size": 65536}]

    try:
        while os.readlink(f"/proc/{pod.pid}/ns/ipc") == os.readlink("/proc/self/ns/ipc"):
            time.sleep(0.01)
        bundle = make_bundle(script(probe(["read", "/opt/file"])), layout="busybox", edit=edit)
        program = requirements.find_program(low_level)
        result = run_container([program], bundle, container_id(), env=things.environment, prefix=OWN_RUN, cgroup="v2")
        assert result.returncode == 0, explain(result)
        assert "a file of the driver" in result.stdout
    finally:
        pod.kill()
        pod.wait()
