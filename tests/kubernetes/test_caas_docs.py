"""docs/tenants/CAAS.md: its curl commands, run against the service over HTTPS, answer as the page shows."""

import json
import os
import re
import shlex
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from caas_lab import Lab, ended, make_lab, running
from support.authority import Authority
from support.process import run, wait_for

PAGE = (Path(__file__).parents[2] / "docs/tenants/CAAS.md").read_text()
PRINTED = ("[Vector addition of 50000 elements]", "Test PASSED")


class Example(NamedTuple):
    command: str
    answer: str


def examples(page: str) -> Iterator[Example]:
    """Yield the curl commands of the console blocks; a command goes on while a quotation is open."""
    for block in re.findall(r"^```console\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        for text in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            lines = text.splitlines()
            count = next(count for count in range(1, len(lines) + 1) if is_whole("\n".join(lines[:count])))
            if text.startswith("curl "):
                yield Example("\n".join(lines[:count]), "\n".join(lines[count:]))


def is_whole(command: str) -> bool:
    try:
        shlex.split(command)
    except ValueError:
        return False
    return True


def alike(answer: str) -> Any:
    """Return an answer without what is new each time: ids, keys, times, and how long something took."""
    for pattern, word in (
        (r"ctr_[0-9a-z]{26}", "ctr_0"), (r"\bocigpu_[0-9a-f]{12}_[\w-]{43}", "ocigpu_0"),
        (r'"id": ?"[0-9a-f]{12}"', '"id": "0"'), (r"\d{4}-\d\d-\d\dT[\d:.]+Z", "2026"), (r"[0-9a-f-]{36}", "0"),
    ):  # fmt: skip
        answer = re.sub(pattern, word, answer)
    if not answer.startswith("{"):
        return answer
    found = json.loads(answer)
    for name in ("version", "phases"):
        if name in found:
            found[name] = {key: value is None for key, value in found[name].items()} if name == "phases" else 0
    return found


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def files(authority: Authority) -> Path:
    return Path(authority.issue("caas.example"))


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, files: Path) -> Iterator[Lab]:
    with make_lab(tmp_path_factory.mktemp("caas"), tls=(str(files / "tls.crt"), str(files / "tls.key"))) as made:
        yield made


def let_run(lab: Lab, container: str) -> None:
    """What scheduler and kubelet do: the node is chosen, the image pulled, the container started."""
    lab.bind(container)
    name = container.replace("_", "-")
    for reason, at in (("Pulling", "2026-11-23T10:01:40Z"), ("Pulled", "2026-11-23T10:01:55Z")):
        head = {"apiVersion": "v1", "kind": "Event", "metadata": {"name": reason.lower(), "namespace": "tenant-landon"}}
        involved = {"kind": "Pod", "name": name, "namespace": "tenant-landon"}
        lab.cluster.create({**head, "involvedObject": involved, "reason": reason, "lastTimestamp": at})
    lab.set_status(container, **running())


def let_end(lab: Lab, container: str) -> None:
    for line in PRINTED:
        lab.cluster.log("tenant-landon", container.replace("_", "-"), f"2026-11-23T10:02:01Z {line}")
    lab.set_status(container, **ended())


def test_the_examples_with_curl_answer_as_the_page_shows(lab: Lab, files: Path) -> None:
    found = list(examples(PAGE))
    assert len(found) == len(re.findall(r"^ *\$ curl ", PAGE, re.MULTILINE)) >= 6
    environment = {
        "PATH": os.environ["PATH"], "CURL_CA_BUNDLE": str(files / "ca.crt"), "KEY": lab.key(), "ADMIN": lab.admin,
        "SERVICE": f"https://127.0.0.1:{lab.server.port}",
    }  # fmt: skip
    happens = {"wait=running": let_run, "/logs": let_end}
    for each in found:
        for word, happen in happens.items():
            if word in each.command:
                happen(lab, environment["ID"])
        # a wait of the page's may be over before a busy machine has come so far
        answer = run(["bash", "-c", each.command.replace("timeout=60", "timeout=300")], env=environment).stdout.strip()
        assert alike(answer) == alike(each.answer), each.command
        environment.setdefault("ID", json.loads(answer)["id"] if "ctr_" in answer else "")


def test_a_renewed_certificate_is_taken_up_and_half_of_one_is_not(lab: Lab, authority: Authority, files: Path) -> None:
    address = ("127.0.0.1", lab.server.port)
    before = ssl.get_server_certificate(address)
    renewed = Path(authority.issue("renewed.example"))
    os.replace(renewed / "tls.crt", files / "tls.crt")
    wait_for("a word about it", lambda: any("not a certificate with its key" in line for _, line in lab.lines))
    assert ssl.get_server_certificate(address) == before
    os.replace(renewed / "tls.key", files / "tls.key")
    wanted = (files / "tls.crt").read_text()
    wait_for("the new one", lambda: ssl.get_server_certificate(address).split() == wanted.split())
