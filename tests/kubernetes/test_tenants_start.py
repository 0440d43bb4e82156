"""docs/tenants/README.md, the tenants' start page: every command is typed, in order, and prints what the page shows.

Real: the commands, the service over HTTPS, the controller of tenancies, the manifests.  Simulated: the server with its
GPUs, fabric manager and board controller, the API server, and kubectl, which this file does for the double.
"""

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from caas_lab import Lab
from support import requirements
from support.authority import Authority
from support.cluster import Cluster
from support.process import wait_for
from support.product import PROGRAMS, REPOSITORY
from support.transcript import Typed
from tenancy_lab import make_controller, settle

from ocigpu.sim.create import create_host
from ocigpu.sim.fabric import SimulatedManager

PAGES = sorted((REPOSITORY / "docs/tenants").glob("*.md"))
START = REPOSITORY / "docs/tenants/README.md"
SHELL = ("console", "sh", "")
"""Languages of blocks that are typed; pictures and files are of others."""


def read_commands(page: str) -> list[Typed]:
    """Return what is typed in the console blocks of a page; a command goes on while a quotation is open."""
    found = []
    for block in re.findall(r"^```console\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        for text in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            lines = text.splitlines()
            count = next(count for count in range(1, len(lines) + 1) if "\n".join(lines[:count]).count("'") % 2 == 0)
            found.append(Typed("\n".join(lines[:count]), "\n".join(lines[count:])))
    return found


def lines_of(page: Path) -> Iterator[tuple[str, bool]]:
    """Yield each line of a page, and whether it is one that is typed."""
    fence: str | None = None
    for line in page.read_text().splitlines():
        if line.lstrip().startswith("```"):
            fence = None if fence is not None else line.strip()[3:]
        yield line, fence in SHELL if fence is not None else line.startswith("    ")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_variable_is_set_on_the_page_before_a_command_has_it(page: Path) -> None:
    before, missing = "", []
    for line, typed in lines_of(page):
        uses = [(use[1], before + line[: use.start()]) for use in re.finditer(r"\$\{?([A-Z][A-Z_]+)\b", line) if typed]
        missing += [name for name, text in uses if not re.search(rf"(?<![\w$]){name}=", text)]
        before += f"{line}\n"
    assert missing == []


def test_every_page_calls_the_same_things_by_the_same_names() -> None:
    typed = [line for page in PAGES for line, typed in lines_of(page) if typed]
    assert {name for line in typed for name in re.findall(r"\$([A-Z]+)\b", line)} == {"SERVICE", "KEY", "ADMIN", "ID"}


class Server:
    """A simulated server with its service machine and board controller, and what of the page stands for them."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.directory, self._stack = directory, stack
        create_host(str(directory / "host"), 8, "h100", driver="none", nodes=False)
        SimulatedManager(directory / "host").start()
        bmc = self.start([str(PROGRAMS / "ocigpu"), "sim", "bmc", str(directory / "host")])
        assert bmc.stdout is not None
        where = bmc.stdout.readline().strip()
        account = where.rpartition(" ")[2]
        for name in ("etc", "state", "modules-load.d", "modprobe.d"):
            (directory / name).mkdir()
        (directory / "etc/bmc-ca.crt").symlink_to(where.split()[3])
        self.places = {
            "--bmc https://BMC --bmc-ca /etc/ocigpu/bmc-ca.crt --credentials FILE": where,
            "-m 0600 FILE ": f"-m 0600 {account} ",
            "/sys/bus": f"{directory}/host/sys/bus",
            "/etc/modules-load.d": f"{directory}/modules-load.d",
            "/etc/modprobe.d": f"{directory}/modprobe.d",
            "/etc/ocigpu": f"{directory}/etc",
            "/var/lib/ocigpu": f"{directory}/state",
            "grpc:vsock:42:6667": f"grpc:unix:{directory}/fabric",
            "vsock:6667 --allow cid:2": f"unix:{directory}/fabric --allow uid:{os.geteuid()}",
        }
        self.variables = {
            "PATH": f"{PROGRAMS}:{os.environ['PATH']}", "HOME": str(directory),
            "OCIGPU_CONFIG": str(directory / "host/config.toml"), "PYTHONPATH": str(REPOSITORY),
        }  # fmt: skip

    def start(self, command: list[str], **variables: str) -> "subprocess.Popen[str]":
        """Start a program that runs until the end of the test."""
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **variables})
        self._stack.enter_context(child)
        self._stack.callback(child.send_signal, signal.SIGTERM)
        return child

    def translate(self, text: str) -> str:
        """Return a text of the page with this server's places."""
        for place, here in self.places.items():
            text = text.replace(place, here)
        return text

    def type(self, command: str) -> str:
        """Run a command in a shell that keeps its variables, and return what it prints."""
        kept = self.directory / "variables"
        line = f"set -a\n{command}\nstatus=$?\nenv -0 > {kept}\nexit $status\n"
        done = subprocess.run(
            ["bash", "-c", line], env=self.variables, cwd=self.directory, capture_output=True, text=True, timeout=120
        )
        findings = (0, 3, 4) if "doctor" in command else (0,)  # a simulated server lacks the nodes of GPUs
        assert done.returncode in findings, f"{command}\n{done.stdout}{done.stderr}"
        pairs = [each.partition("=") for each in kept.read_text().split("\0") if each]
        self.variables = {name: value for name, _, value in pairs if name not in ("_", "SHLVL", "PWD", "status")}
        return done.stdout + done.stderr


def kubectl(cluster: Cluster, lab: Lab, server: Server, words: list[str]) -> str:
    """Do what a kubectl command of the page does, and return what it prints."""
    if words[:2] == ["apply", "-f"]:
        cluster.apply_manifests(REPOSITORY / words[2])
        return ""
    if words[:2] == ["create", "secret"]:
        paths = [word.rpartition("=")[2] for word in words[5:] if not word.startswith("-n") and "." in word]
        assert paths
        assert all((server.directory / path).is_file() for path in paths)
        metadata = {"name": words[3], "namespace": words[words.index("-n") + 1]}
        cluster.create({"apiVersion": "v1", "kind": "Secret", "metadata": metadata})
        return f"secret/{words[3]} created\n"
    if words == ["get", "gpuleases"]:
        return "\n".join(each["metadata"]["name"] for each in cluster.objects("GPULease"))
    assert words[:3] == ["exec", "-n", "ocigpu"]
    deployment = cluster.get("Deployment", words[3].removeprefix("deploy/"), "ocigpu")
    assert deployment["spec"]["template"]["spec"]["containers"][0]["name"] == "caas"
    assert words[4:] == ["--", "ocigpu", "caas", "admin-key"]
    return f"{lab.admin}\n"


def made(cluster: Cluster) -> list[dict[str, Any]]:
    """Wait for the pods of the page's two containers."""
    wait_for("the pods", lambda: len(cluster.objects("Pod")) == 2)
    return cluster.objects("Pod")


@pytest.mark.rest
@pytest.mark.timeout(300)
def test_every_command_of_the_start_page_is_typed_in_its_order(tmp_path: Path) -> None:
    requirements.require(requirements.programs("curl"))
    typed = read_commands(START.read_text())
    assert len(typed) > 20
    with ExitStack() as stack:
        server = Server(tmp_path, stack)
        cluster = stack.enter_context(Cluster())
        server.variables["KUBECONFIG"] = str(cluster.write_kubeconfig(tmp_path / "kubeconfig"))
        files = Path(Authority(tmp_path).issue("caas.example"))
        for name in ("tls.crt", "tls.key"):
            (tmp_path / name).symlink_to(files / name)
        server.variables |= dict.fromkeys(("CURL_CA_BUNDLE", "SSL_CERT_FILE"), str(files / "ca.crt"))
        lab = Lab(cluster, tmp_path, tls=(str(files / "tls.crt"), str(files / "tls.key")))
        for each in typed:
            command, shown = server.translate(each.command), server.translate(each.shown)
            inner = re.search(r"\$\(kubectl ([^)]*)\)", command)
            if inner:
                command = command.replace(inner[0], kubectl(cluster, lab, server, inner[1].split()).strip())
            if command.startswith("kubectl "):
                printed = kubectl(cluster, lab, server, command.split()[1:])
            elif command.startswith("ocigpu fabric serve"):
                server.start([str(PROGRAMS / "ocigpu"), *command.split()[1:]], **server.variables)
                wait_for("the service machine", (tmp_path / "fabric").exists)
                printed = ""
            else:
                printed = server.type(command)
            assert Typed(command, shown).fits(printed), f"{command}\n{printed}"
            if "tenancy create" in command:
                settle(make_controller(cluster))
            if "caas.yaml" in command:
                lab.start()
                stack.callback(lab.stop)
                server.places["https://caas.example"] = f"https://127.0.0.1:{lab.server.port}"
        gpus = sorted(each["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] for each in made(cluster))
        assert gpus == ["1", "2"]
