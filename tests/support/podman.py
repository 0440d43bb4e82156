"""Real Podman with storage of its own, which finds CDI specifications in a directory of ours.

Podman has no option for its CDI directories, so it runs in a mount namespace where /run/cdi (which is /var/run/cdi)
is that directory.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from support import machine, requirements
from support.engines import SYSTEM_PATH
from support.process import Completed, run, wait_for
from support.runtimes import container_id

# conmon, which starts the runtime, keeps none of our variables: a script brings crun what it needs here
WRAPPER = '#!/bin/sh\nLD_PRELOAD="{preload}" exec {program} "$@"\n'
CONFIGURATION = """\
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
log_driver = "none"
netns = "none"
pids_limit = 0
[engine]
cgroup_manager = "cgroupfs"
events_logger = "none"
[engine.runtimes]
runc = ["{runc}"]
crun = ["{crun}"]
"""
# instead of a runtime: it keeps the configuration that it gets and says no
RECORDER = """\
#!/bin/sh
while [ $# -gt 0 ]; do
    if [ "$1" = --bundle ]; then cp "$2/config.json" "$0.json"; fi
    shift
done
exit 1
"""
PRIVATE_RUN = 'mount -t tmpfs none /run && mkdir /run/cdi && mount --bind "$0" /run/cdi && exec "$@"'
# the same with /etc/cdi, which the machine need not have: what is written to /etc is gone with the mount namespace
PRIVATE_BOTH = (
    "mount -t tmpfs none /run && mkdir /run/upper /run/work /run/cdi"
    " && mount -t overlay none -o lowerdir=/etc,upperdir=/run/upper,workdir=/run/work /etc && mkdir -p /etc/cdi"
    ' && mount --bind "$0" /run/cdi && mount --bind "$1" /etc/cdi && shift && exec "$@"'
)


class Podman(NamedTuple):
    """Podman: its ``directory``, and ``cdi``, where specifications are put for it.

    ``etc_cdi``: what it sees as /etc/cdi; without it, what the machine has there.
    """

    directory: Path
    cdi: Path
    etc_cdi: Path | None = None

    def run_rootfs(
        self, runtime: str, devices: Sequence[str], rootfs: Path, arguments: Sequence[str], *options: str
    ) -> Completed:
        """``podman run`` a copy of a root file system with CDI devices; returns how it went.

        ``runtime``: "runc", "crun", another of its configuration, or "" for the configuration's default.
        """
        name = container_id()
        copy = self.directory / name
        shutil.copytree(rootfs, copy, symlinks=True)
        words = ["run", "--rm", "--name", name, f"--cgroup-parent=/{name}", *options]
        words.append("--cap-add=MKNOD")  # a container of Podman 5 has it no more by itself
        words += [f"--device={device}" for device in devices]
        try:
            return self.run_words(runtime, name, words, "--rootfs", copy, *arguments)
        finally:
            shutil.rmtree(copy)
            machine.remove_cgroups(name)

    def build_image(self, name: str, rootfs: Path, annotations: dict[str, str]) -> None:
        """Make an image of a root file system whose manifest has annotations."""
        context = self.directory / f"{name}.image"
        shutil.copytree(rootfs, context / "rootfs", symlinks=True)
        (context / "Containerfile").write_text("FROM scratch\nCOPY rootfs /\n")
        words = [f"--annotation={key}={value}" for key, value in annotations.items()]
        try:
            built = self.run(
                "", "build", "--isolation=chroot", "--no-cache", "--format=oci", f"--tag={name}", *words, context
            )
            assert built.returncode == 0, built.stderr
        finally:
            shutil.rmtree(context)

    def run_image(self, runtime: str, image: str, arguments: Sequence[str], *options: str) -> Completed:
        """``podman run`` an image of :meth:`build_image`; returns how it went."""
        name = container_id()
        try:
            words = ["run", "--rm", "--pull=never", "--name", name, f"--cgroup-parent=/{name}", *options]
            return self.run_words(runtime, name, words, image, *arguments)
        finally:
            machine.remove_cgroups(name)

    def start_rootfs(
        self, runtime: str, device: str, root: Path, name: str, arguments: Sequence[str], output: Path, *options: str
    ) -> "subprocess.Popen[bytes]":
        """Start a container in the directory ``root`` with a CDI device and return Podman's process.

        It has its /run to itself: what it has there is looked at from there, through /proc.
        """
        command, environment = self._command(
            runtime, "run", "--rm", "--name", name, f"--cgroup-parent=/{name}", f"--device={device}", *options,
            "--rootfs", root, *arguments,
        )  # fmt: skip
        with output.open("wb") as file:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment)

    def write_config(self, devices: Sequence[str], rootfs: Path, *options: str) -> dict[str, Any]:
        """Return the configuration that Podman writes for its runtime; no container is started.

        What differs between two containers of the same options (id, time) is made equal.
        """
        recorder = self.directory / "recorder"
        recorder.write_text(RECORDER)
        recorder.chmod(0o755)
        name = container_id()
        words = ["run", "--rm", "--name", name, f"--cgroup-parent=/{name}", *options]
        words += [f"--device={device}" for device in devices]
        try:
            completed = self.run(str(recorder), *words, "--rootfs", rootfs, "true")
            wait_for("conmon to end", lambda: not machine.processes_of(str(self.directory)))
            record = Path(f"{recorder}.json")
            assert record.exists(), completed.stderr
            text = record.read_text().replace(name, "NAME")
            record.unlink()
        finally:
            machine.remove_cgroups(name)
        container = json.loads(text)["linux"]["cgroupsPath"].rpartition("-")[2]
        config: dict[str, Any] = json.loads(text.replace(container, "ID").replace(container[:12], "ID"))
        config.get("annotations", {}).pop("io.kubernetes.cri-o.Created", None)  # until Podman 4
        return config

    def run_words(self, runtime: str, name: str, words: Sequence[str], *container: str | os.PathLike[str]) -> Completed:
        """Run a container by these words, and its own; what it wrote is read from its log.

        On a busy machine Podman may end before it has read all that a short-lived container wrote; conmon's log has it.
        """
        log = self.directory / f"{name}.log"
        completed = self.run(runtime, *words, "--log-driver=k8s-file", f"--log-opt=path={log}", *container)
        wait_for("conmon and its cleanup to end", lambda: not self._is_ending(name))
        if log.exists():
            completed.stdout = read_log(log.read_text())
            log.unlink()
        return completed

    def _is_ending(self, name: str) -> bool:
        """Whether conmon of a container that has ended, or what it starts then, is still there."""
        lines = machine.processes_of(str(self.directory)).values()
        return any(f" -n {name} " in line or " container cleanup " in line for line in lines)

    def run(self, runtime: str, *words: str | os.PathLike[str]) -> Completed:
        """Run Podman with these words; returns how it went."""
        command, environment = self._command(runtime, *words)
        return run(command, check=False, env=environment)

    def _command(self, runtime: str, *words: str | os.PathLike[str]) -> tuple[list[str], dict[str, str]]:
        """Return what starts Podman with these words, and the environment for it."""
        view = () if requirements.is_unified() else requirements.CGROUP2_VIEW
        places = ["--root", self.directory / "storage", "--runroot", self.directory / "run"]
        places += ["--tmpdir", self.directory / "tmp", "--storage-driver", "vfs"]
        environment = {"PATH": SYSTEM_PATH, "HOME": str(self.directory)}
        environment["CONTAINERS_CONF"] = str(self.directory / "containers.conf")
        private = ["unshare", "--mount", "sh", "-c", PRIVATE_RUN, self.cdi]
        if self.etc_cdi:
            private = ["unshare", "--mount", "sh", "-c", PRIVATE_BOTH, self.cdi, self.etc_cdi]
        chosen = ["--runtime", runtime] if runtime else []
        command = [os.fspath(word) for word in (*view, *private, "podman", *places, *chosen, *words)]
        return command, environment


def read_log(text: str) -> str:
    """Return what a container wrote to stdout, of conmon log: TIME STREAM F-or-P TEXT, P for a part of a line."""
    lines = [line.split(" ", 3) for line in text.splitlines()]
    return "".join(line[3] + ("\n" if line[2] == "F" else "") for line in lines if line[1] == "stdout")


def make_podman(directory: Path, preload: str) -> Podman:
    """Make the files of a Podman; ``preload``: what crun needs in LD_PRELOAD on this machine, or ""."""
    requirements.require(requirements.cgroup_v2(), requirements.programs("podman", "conmon", "runc", "crun"))
    directory.mkdir()
    (directory / "cdi").mkdir()
    (directory / "containers.conf").write_text(CONFIGURATION.format(**write_wrappers(directory, preload)))
    return Podman(directory, directory / "cdi")


def write_wrappers(directory: Path, preload: str) -> dict[str, Path]:
    """Write the scripts that start runc and crun; returns their paths by name."""
    programs = {}
    for name in ("runc", "crun"):
        programs[name] = directory / name
        preloaded = preload if name == "crun" else ""
        programs[name].write_text(WRAPPER.format(preload=preloaded, program=requirements.find_program(name)))
        programs[name].chmod(0o755)
    return programs
