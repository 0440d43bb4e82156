"""What we read of a config.json and what the low-level runtime reads are the same, or the container does not start.

The judge is a decoder of its own (:mod:`support.go_json`), held to the real runc at the end of this file.
"""

import copy
import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import go_json
from support.bundle import base_config, write_bundle
from support.runtimes import container_id, run_container, set_cgroup

from ocigpu.bundle.document import KEYS, fold_key, parse_config
from ocigpu.core.config_json import get_list, get_object, get_rules
from ocigpu.core.errors import OcigpuError, SpecError
from ocigpu.core.settings import Settings
from ocigpu.gpus.request import Request
from ocigpu.gpus.vendors import parse_request

DOCUMENTS = 8_000
"""A tenth of them in make test."""
SETTINGS = Settings(
    mode="auto", accept_nvidia_visible_devices_as_volume_mounts=True, swarm_resource="DOCKER_RESOURCE_GPU"
)
Place = tuple[str | int, ...]

VARIABLES = [
    "NVIDIA_VISIBLE_DEVICES=0,GPU-b2c6d6fa",
    "NVIDIA_DRIVER_CAPABILITIES=compute,utility",
    "NVIDIA_REQUIRE_CUDA=cuda>=11.0",
    "NVIDIA_VISIBLE_DEVICES=all",
    "NVIDIA_GDS=enabled",
    "NVIDIA_IMEX_CHANNELS=0,7",
    "CUDA_VERSION=9.0",
    "DOCKER_RESOURCE_GPU=1",
    "NVIDIA_MIG_CONFIG_DEVICES=all",
]


def documents_to_change() -> list[dict[str, Any]]:
    """Return small configurations that ask for devices in every way, for an engine's usual ones."""
    small = base_config(["/bin/true"], None)
    small["mounts"] = small["mounts"][:1]
    small["process"]["capabilities"] = {name: ["CAP_CHOWN"] for name in ("bounding", "effective")}
    small["linux"] = {name: small["linux"][name][:2] for name in ("namespaces", "maskedPaths")}
    small["linux"]["resources"] = {"devices": [{"allow": False, "access": "rwm"}]}
    by_variables = copy.deepcopy(small)
    by_variables["process"]["env"] += VARIABLES[:3]
    privileged = copy.deepcopy(by_variables)
    privileged["process"]["capabilities"]["bounding"].append("CAP_SYS_ADMIN")
    privileged["process"]["env"] += VARIABLES[-1:]
    by_mounts = copy.deepcopy(small)
    by_mounts["mounts"] = [
        {"destination": f"/var/run/nvidia-container-devices/{name}", "type": "bind", "source": "/dev/null"}
        for name in ("1", "imex/3")
    ]
    by_annotations = copy.deepcopy(small)
    by_annotations["annotations"] = {"cdi.k8s.io/a_b": "nvidia.com/gpu=0,nvidia.com/gpu=1", "other": "x"}
    asking_nothing = copy.deepcopy(small)
    asking_nothing["linux"]["devices"] = [{"path": "/dev/fuse", "type": "c", "major": 10, "minor": 229}]
    asking_nothing["hooks"] = {"prestart": [{"path": "/usr/bin/hook", "args": ["hook", "prestart"], "timeout": 5}]}
    asking = [by_variables, privileged, by_mounts, by_annotations]
    assert all(parse_request(each, SETTINGS).selection != "nothing" for each in asking)
    return [*asking, asking_nothing]


def places(value: Any, path: Place = ()) -> list[Place]:
    """Return the paths of everything inside a document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for name, item in inner for place in places(item, (*path, name)))]


def respell(random_: random.Random, name: str) -> str:
    """Return a key in another spelling, as far as it has letters."""
    letters = [index for index, character in enumerate(name) if character.isalpha()]
    for index in random_.sample(letters, min(len(letters), random_.choice((1, 1, 2, len(letters))))):
        folded = {"s": "\u017f", "k": "\u212a"}.get(name[index].lower(), "")
        character = folded if folded and random_.random() < 0.5 else name[index].swapcase()
        name = name[:index] + character + name[index + 1 :]
    return name


def change_tree(random_: random.Random, document: dict[str, Any]) -> str:
    """Return the text of a document with something changed somewhere: a key, a value, or one more of either."""
    place = random_.choice([place for place in places(document) if place])
    parent = document
    for name in place[:-1]:
        parent = parent[name]
    key: Any = place[-1]
    other = random_.choice(
        (
            *(None, True, 0, 7, -1, 1.5, 1e300, 1 << 33, 1 << 70, "", "all", "0", "CAP_SYS_ADMIN"),
            *([], ["all"], {}, {"a": 1}),
            *VARIABLES,
        )
    )
    value = random_.choice((parent[key], other))
    kind = random_.randrange(6)
    if kind == 0 or (isinstance(parent, list) and kind < 3):
        parent[key] = other
    elif kind == 1:
        renamed = respell(random_, key)
        items = [(renamed if name == key else name, item) for name, item in parent.items()]
        parent.clear()
        parent.update(items)
    elif kind == 2:  # beside the one that is there, in front of it or behind it
        items = [*parent.items()]
        items.insert(random_.choice((0, len(items))), (respell(random_, key), value))
        parent.clear()
        parent.update(items)
    elif kind == 3:
        del parent[key]
    elif kind == 4 and isinstance(parent, list):
        parent.insert(key, value)
    elif kind == 4:
        return json.dumps(document).replace(
            json.dumps(key), f"{json.dumps(key)}:{json.dumps(value)},{json.dumps(key)}", 1
        )
    else:
        text = json.dumps(document)
        name = str(key if isinstance(parent, dict) else value)
        escaped = "".join(f"\\u{ord(character):04x}" if random_.random() < 0.5 else character for character in name)
        return text.replace(json.dumps(name), f'"{escaped}"', 1)
    return json.dumps(document, ensure_ascii=random_.random() < 0.5)


def change_bytes(random_: random.Random, text: bytes) -> bytes:
    """Return a text with a few bytes changed, put in, taken out or said twice."""
    for _ in range(random_.choice((1, 1, 2, 5))):
        start = random_.randrange(len(text))
        end = min(len(text), start + random_.choice((0, 1, 1, 2, 8)))
        added = random_.choice(
            (b"", b'"', b",", b"}", b"0", b"e", b" ", b"null", b"\\ud800", b"\xff", b"\xc5\xbf", text[start:end] * 2)
        )
        text = text[:start] + added + text[end:]
    return text


def mutants(count: int) -> list[bytes]:
    """Return changed documents, always the same ones."""
    random_ = random.Random(20260813)
    texts = [json.dumps(document) for document in documents_to_change()]
    found = []
    for _ in range(count):
        text = change_tree(random_, json.loads(random_.choice(texts)))
        for _ in range(random_.choice((0, 0, 1))):
            try:
                text = change_tree(random_, json.loads(text))
            except ValueError:  # changed so that nobody reads it
                break
        data = text.encode()
        found.append(change_bytes(random_, data) if random_.random() < 0.2 else data)
    return found


def reading(config: dict[str, Any]) -> str:
    """Return what decides over a container's devices, as we read it; the code of the refusal where there is one.

    Of half a surrogate pair Go makes another character: no path has one (:func:`ocigpu.core.config_json.is_path`).
    """
    try:
        request: Request | str = parse_request(config, SETTINGS)
    except OcigpuError as error:
        request = error.code
    linux = get_object(config, "linux")

    def fields(entries: list[Any], *names: str) -> list[list[Any]]:
        return [[entry.get(name) or "" for name in names] for entry in entries if isinstance(entry, dict)]

    found = (
        request,
        get_object(config, "root").get("path") or "",
        fields(get_list(linux, "namespaces"), "type", "path"),
        fields(get_rules(config), "allow", "type", "major", "minor", "access"),
        fields(get_list(linux, "devices"), "path", "type", "major", "minor"),
        fields(get_list(config, "mounts"), "destination", "type", "source"),
        fields(get_list(get_object(config, "hooks"), "prestart"), "path", "timeout"),
    )
    return re.sub(r"\\ud[89a-f][0-9a-f]{2}", "\ufffd", repr(found))


def test_changed_documents_are_read_as_the_runtime_reads_them_or_refused(times: Callable[[int], int]) -> None:
    seen = {"same": 0, "refused by us": 0, "refused by the runtime": 0}
    documents = times(DOCUMENTS)
    for text in mutants(documents):
        try:
            expected = go_json.decode(text)
        except go_json.GoError:
            seen["refused by the runtime"] += 1
            continue
        try:
            config = parse_config(text, "config.json")
        except SpecError:
            seen["refused by us"] += 1
            continue
        assert reading(config) == reading(expected), text
        seen["same"] += 1
    assert all(number > documents // 10 for number in seen.values()), seen  # else the comparison says nothing


def test_every_key_that_decides_is_known() -> None:
    def check(ours: dict[str, Any], theirs: Any, place: str) -> None:
        theirs = theirs[0] if isinstance(theirs, list) else theirs
        if isinstance(theirs, dict):
            assert theirs.keys() <= ours.keys(), place
            for name, inner in theirs.items():
                check(ours[name], inner, f"{place}.{name}")

    check(KEYS, go_json.SPEC, "")


def test_spellings_are_compared_as_go_compares_them() -> None:
    letters = "abcdefghijklmnopqrstuvwxyz"
    characters = list(map(chr, range(0x20000)))  # beyond, no character has another case
    expected = {*letters, *letters.upper(), "\u017f", "\u212a"}
    assert {character for character in characters if fold_key(character) in set(letters)} == expected
    assert {character for character in characters if go_json.fold(character) in set(letters)} == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(Process=c["process"]), '"Process" is not process'),
        (lambda c: c.update({"proce\u017fs": c.pop("process")}), '"proce\u017fs" is not process'),
        (lambda c: c["process"].update(ENV=[]), 'process."ENV" is not env'),
        (lambda c: c["process"]["capabilities"].update(Bounding=[]), 'process.capabilities."Bounding" is not bounding'),
        (lambda c: c["mounts"][0].update(Source="/"), 'mounts."Source" is not source'),
        (lambda c: c["linux"].update({"mas\u212aedPaths": []}), 'linux."mas\u212aedPaths" is not maskedPaths'),
        (
            lambda c: c["linux"]["resources"]["devices"][0].update(Allow=True),
            'linux.resources.devices."Allow" is not allow',
        ),
        (lambda c: c.update({"process\0": c.pop("process")}), '"process\\x00" is not process'),
        (lambda c: c["process"].update({"env\0x": []}), 'process."env\\x00x" is not env'),
        (lambda c: c.update(hooks={"PreStart": []}), 'hooks."PreStart" is not prestart'),
        (lambda c: c.update(hooks={"prestart": [{"Path": "/x"}]}), 'hooks.prestart."Path" is not path'),
    ],
)
def test_a_known_key_in_another_spelling_is_refused(change: Callable[[Any], None], message: str) -> None:
    config = base_config(["/bin/true"], {"NVIDIA_VISIBLE_DEVICES": "0"})
    change(config)
    with pytest.raises(SpecError) as caught:
        parse_config(json.dumps(config).encode(), "config.json")
    assert caught.value.code == "OCIGPU-SPEC-2"
    assert caught.value.message == f"config.json: {message}, but some runtimes take it for that"


def test_names_that_are_the_users_own_have_any_spelling() -> None:
    config = base_config(["/bin/true"], None)
    config["annotations"] = {"Process": "x", "ENV": "x", "Path": "x"}
    config["linux"]["sysctl"] = {"Net.x": "1"}
    config["vendor"] = {"Process": 1, "process": 2}
    config["Stra\u00dfe"] = config["proce\u00df"] = 1
    assert parse_config(json.dumps(config).encode(), "x") == config


# --- the judge, judged


def rename(parent: dict[str, Any], name: str, other: str) -> None:
    parent[other] = parent.pop(name)


@pytest.mark.root
@pytest.mark.engine
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda c: rename(c, "process", "Process"), id="another case"),
        pytest.param(lambda c: rename(c, "process", "proce\u017f\u017f"), id="U+017F"),
        pytest.param(lambda c: rename(c["process"], "env", "ENV"), id="inside"),
        pytest.param(
            lambda c: [rename(item, "destination", "De\u017ftination") for item in c["mounts"]], id="in a list"
        ),
        pytest.param(lambda c: c["process"].update(Env=["PATH=/bin", "WHICH=second"]), id="the last of two lists"),
        pytest.param(lambda c: c.update(PROCESS={"eNv": ["PATH=/bin", "WHICH=second"]}), id="two objects are one"),
        pytest.param(lambda c: c.update(HostName="second"), id="the last of two texts"),
        pytest.param(lambda c: c.update({"\u212aey": 1, "Hostname\u017f": "second"}), id="another name"),
    ],
)
def test_runc_reads_keys_as_the_judge_does(
    change: Callable[[Any], object], work_directory: Path, rootfs: Callable[[str], Path]
) -> None:
    config = base_config(["sh", "-c", "echo $WHICH; hostname; grep -c ' /sys ' /proc/self/mounts"], {"WHICH": "first"})
    bundle = write_bundle(work_directory / "bundle", config, rootfs("busybox"))
    name = container_id()
    set_cgroup(bundle, name)
    config = json.loads((bundle / "config.json").read_text())
    change(config)
    text = json.dumps(config, ensure_ascii=False).encode()
    (bundle / "config.json").write_bytes(text)
    read = go_json.decode(text)
    which = dict(variable.split("=", 1) for variable in read["process"]["env"])["WHICH"]
    mounts = sum(mount["destination"] == "/sys" for mount in read["mounts"])
    done = run_container(["runc"], bundle, name)
    assert (done.stdout.split(), done.stderr) == ([which, read["hostname"], str(mounts)], "")
