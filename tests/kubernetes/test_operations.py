"""docs/tenants/OPERATIONS.md: its commands, typed in order on a store that has something to lose.

Real: the service, its store, the commands of ocigpu, the shell, PostgreSQL.  ``kubectl`` is a program of this file: it
executes in the place of the pod, and asks the double of the API server.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from caas_lab import Lab, make_lab, running
from deployment_lab import objects
from support import requirements
from support.postgresql import find_postgres, postgres
from support.process import wait_for
from support.product import PROGRAMS, REPOSITORY
from support.transcript import Typed
from test_tenants_start import read_commands

from ocigpu.tenants.service.server import audit_text

PAGE = (REPOSITORY / "docs/tenants/OPERATIONS.md").read_text()
STORE = "/var/lib/ocigpu/caas"
MANIFESTS = REPOSITORY / "packaging/kubernetes"
KUBECTL = f"""#!{sys.executable}
import json, os, subprocess, sys, urllib.parse, urllib.request
words = sys.argv[1:]
if words[0] == "exec":
    inside = [word.replace({STORE!r}, os.environ["STATE"]) for word in words[words.index("--") + 1 :]]
    inside += ["--store", os.environ["STATE"]] if inside[:1] == ["ocigpu"] else []
    sys.exit(subprocess.run(inside).returncode)
if words[0] == "logs":
    print(open(os.environ["LOG"]).read(), end="")
    sys.exit()

def ask(method, path):
    head = {{"Authorization": "Bearer " + os.environ["TOKEN"]}}
    request = urllib.request.Request(os.environ["CLUSTER"] + path, method=method, headers=head)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)

space = "/namespaces/" + words[words.index("-n") + 1] if "-n" in words else ""
query = "?labelSelector=" + urllib.parse.quote(words[words.index("-l") + 1])
for kind in words[1].split(","):
    for each in ask("GET", f"/api/v1{{space}}/{{kind}}{{query}}")["items"]:
        head = each["metadata"]
        if words[0] == "get":
            print(head["labels"]["ocigpu.io/container"], head["namespace"])
        else:
            ask("DELETE", f"/api/v1{{space}}/{{kind}}/{{head['name']}}")
"""


class Operator:
    """Types commands of the page in a shell that keeps its variables."""

    def __init__(self, lab: Lab, directory: Path) -> None:
        self.lab, self.directory = lab, directory
        programs = directory / "bin"
        programs.mkdir()
        (programs / "kubectl").write_text(KUBECTL)
        (programs / "kubectl").chmod(0o755)
        config = lab.cluster.kubeconfig()
        self.variables = {
            "PATH": f"{programs}:{PROGRAMS}:{os.environ['PATH']}", "HOME": str(directory), "STATE": lab.store,
            "LOG": str(directory / "log"), "CLUSTER": config["clusters"][0]["cluster"]["server"],
            "TOKEN": config["users"][0]["user"]["token"],
            "KUBECONFIG": str(lab.cluster.write_kubeconfig(directory / "kubeconfig")),
        }  # fmt: skip
        self.places: dict[str, str] = {}

    def type(self, each: Typed) -> None:
        command = each.command
        for place, here in self.places.items():
            command = command.replace(place, here)
        words = command.split()
        if words[:2] == ["kubectl", "scale"]:
            assert words[2:5] == ["-n", "ocigpu", "deploy/ocigpu-caas"]
            self.lab.stop() if words[5] == "--replicas=0" else self.start()
            return
        if words[:2] in (["kubectl", "wait"], ["kubectl", "apply"]) or "pod/ocigpu-caas-restore" in words:
            return
        lines = (self.directory / "audit").read_text().splitlines() if (self.directory / "audit").exists() else []
        (self.directory / "log").write_text("".join(f"{audit_text(yaml.safe_load(line))}\n" for line in lines))
        script = f"set -a\n{command}\nstatus=$?\nenv -0 > {self.directory}/variables\nexit $status\n"
        done = subprocess.run(
            ["bash", "-c", script], env=self.variables, cwd=self.directory, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        pairs = [one.partition("=") for one in (self.directory / "variables").read_text().split("\0") if one]
        self.variables = {name: value for name, _, value in pairs if name not in ("_", "SHLVL", "PWD", "status")}
        assert each.fits(done.stdout) or not each.shown, f"{command}\n{done.stdout}{done.stderr}"

    def start(self) -> None:
        self.lab.start()
        self.places["https://caas.example"] = f"http://127.0.0.1:{self.lab.server.port}"
        self.variables["OCIGPU_CAAS_URL"] = self.places["https://caas.example"]


def part(title: str) -> list[Typed]:
    return read_commands(PAGE.split(f"## {title}\n")[1].split("\n## ")[0])


@pytest.mark.rest
@pytest.mark.timeout(300)
def test_backup_restore_and_a_leaked_key(tmp_path: Path) -> None:
    with make_lab(tmp_path) as lab:
        operator = Operator(lab, tmp_path)
        operator.places["https://caas.example"] = f"http://127.0.0.1:{lab.server.port}"
        for each in read_commands(PAGE.split("## Backup")[0]):
            operator.type(each)
        key = lab.key()
        before = lab.run(key)
        lab.bind(before)
        lab.set_status(before, **running())
        lab.wait(key, before, "running")
        for each in part("Backup"):
            operator.type(each)
        assert (tmp_path / "caas-backup.sqlite").stat().st_mode & 0o777 == 0o600
        later, after = lab.key(), lab.run(key, secrets={"A": "b"})
        lab.pod(after)
        operator.places["ctr_06g1r8yvw3k5h2q7c4x9m0b8dt"] = after
        restore = part("Restore")
        known = next(number for number, each in enumerate(restore) if "get pods -A" in each.command)
        for each in restore[:known]:
            operator.type(each)
        assert lab.show(key, before)["lifecycle"] == "running"
        assert lab.ask("GET", "/v1/containers", later).status == 401
        assert lab.show(key, after)["code"] == "not_found"
        for each in restore[known:]:
            operator.type(each)
        assert (tmp_path / "in-store").read_text().split() == [before]
        wait_for("the end of its pod", lambda: len(lab.cluster.objects("Pod")) == 1)
        assert not lab.cluster.objects("Secret")
        third = lab.run(key)
        operator.places |= {"3f9a0c41d27b": key.split("_")[1], "ctr_06g1r8yvw3k5h2q7c4x9m0b8dt": third}
        for each in part("A leaked key"):
            operator.type(each)
        night = re.findall(r"\| `((?:kubectl exec|kubectl logs|ocigpu) [^`]*)` \|", PAGE.split("## At 3 a.m.")[1])
        assert len(night) == 4
        for command in night:
            operator.type(Typed(command, ""))
        assert lab.ask("GET", "/v1/containers", key).status == 401
        assert lab.cluster.get("Tenancy", "landon")["spec"]["suspended"]
        wait_for("the end of the thief's container", lambda: lab.show(lab.admin, third).get("code") == "not_found")


def test_a_dump_of_postgresql_is_restored(tmp_path: Path) -> None:
    requirements.require(
        "" if find_postgres() else "not installed: postgresql", requirements.programs("pg_dump", "pg_restore")
    )
    blocks = re.findall(r"^```sh\n(pg_.*?)^```", PAGE, re.S | re.M)
    assert [one.split()[0] for one in blocks] == ["pg_dump", "pg_restore"]
    with postgres() as server:
        url = server.make_database()
        with make_lab(tmp_path, store=url) as lab:
            key = lab.key()
            before = lab.run(key)
            lab.pod(before)
            dump, restore = (one.replace("postgresql://ocigpu@db.example/ocigpu", f"'{url}'") for one in blocks)
            subprocess.run(["bash", "-ec", dump], cwd=tmp_path, check=True, timeout=60)
            later = lab.key()
            lab.stop()
            subprocess.run(["bash", "-ec", restore], cwd=tmp_path, check=True, timeout=60)
            lab.start()
            assert lab.show(key, before)["id"] == before
            assert lab.ask("GET", "/v1/containers", later).status == 401
            assert lab.run(key) != before


def test_the_values_are_the_charts() -> None:
    (values,) = [yaml.safe_load(one) for one in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.S | re.M) if "caas:" in one]
    found = objects(values)
    (service,) = [one for one in found if one["kind"] == "Service" and one["metadata"]["name"].endswith("-caas")]
    assert service["spec"]["type"] == "LoadBalancer"
    assert service["metadata"]["annotations"] == values["caas"]["serviceAnnotations"]


def test_labels_and_names_of_the_night_are_those_of_the_manifests() -> None:
    text = "\n---\n".join((MANIFESTS / f"{name}.yaml").read_text() for name in ("tenants", "leases", "caas"))
    there: list[dict[str, Any]] = [one for one in yaml.safe_load_all(text) if one]
    pods = [one["spec"]["template"] for one in there if one["kind"] in ("Deployment", "DaemonSet")]
    components = {one["metadata"]["labels"]["app.kubernetes.io/component"] for one in pods}
    assert set(re.findall(r"app.kubernetes.io/component=([\w-]+)", PAGE)) == components
    assert set(re.findall(r"deploy/([\w-]+)", PAGE)) <= {
        one["metadata"]["name"] for one in there if one["kind"] == "Deployment"
    }
    (restore,) = [yaml.safe_load(one) for one in re.findall(r"^```yaml\n(.*?)^```", PAGE, re.S | re.M) if "Pod" in one]
    (claim,) = [one["metadata"]["name"] for one in there if one["kind"] == "PersistentVolumeClaim"]
    assert restore["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim
    (name, patch) = re.findall(r"`kubectl patch pvc (\S+) -n ocigpu -p '(.*?)'`", PAGE)[0]
    assert name == claim
    assert yaml.safe_load(patch)["spec"]["resources"]["requests"] == {"storage": "51Gi"}
