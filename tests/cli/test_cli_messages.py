"""Messages of other programs that ``ocigpu explain`` knows."""

import io
import json
import re
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from support.fixtures import Run
from support.products import one_in

from ocigpu.cli.front.main import COMMANDS, find_command
from ocigpu.doctor.findings import CHECKS, Evidence, Finding
from ocigpu.doctor.messages import MESSAGES, Message, find_messages, render_markdown

SAMPLES = [
    (sample["title"], sample["text"])
    for sample in tomllib.loads((Path(__file__).parent / "data/messages.toml").read_text(encoding="utf-8"))["sample"]
]
STEPS = [step for entry in MESSAGES for step in entry.steps if step.startswith("ocigpu ")]


def titles(text: str, log: bool = False) -> list[str]:
    return [found.message.title for found in find_messages(text, log)]


@pytest.mark.parametrize(("title", "text"), SAMPLES, ids=[text[:60] for _, text in SAMPLES])
def test_what_people_paste_is_its_own_message_and_no_other(title: str, text: str) -> None:
    assert titles(text) == [title]
    assert titles(text, log=True) == [title]


@pytest.mark.rest
@pytest.mark.parametrize(
    "print_it",
    one_in(
        3,
        [
            lambda line: f'time="2026-11-21T10:00:00Z" level=error msg="{line}"',
            lambda line: f"Nov 21 03:12:11 node7 kubelet[1311]: E1121 10:00:00.8 1311 pod_workers.go:949] {line}",
            lambda line: "web-1  | \x1b[31m" + line.replace(" ", "  ") + "\x1b[0m",
            lambda line: json.dumps(json.dumps({"log": line + "\n", "stream": "stderr"})),
            lambda line: line.upper(),
        ],
    ),
    ids=["logrus", "kubelet", "coloured", "json-twice", "upper-case"],
)
def test_the_noise_around_a_message_does_not_count(print_it: Callable[[str], str]) -> None:
    wrong = []
    for title, text in SAMPLES:
        printed = "\n".join(print_it(line) for line in text.split("\n"))
        if title not in titles(printed):
            wrong.append((title, printed))
    assert not wrong


def test_a_message_that_is_wrapped_is_found() -> None:
    wrong = []
    for title, text in SAMPLES:
        lines = [text[start : start + 70] for start in range(0, len(text), 70)]
        boxed = "\n".join(f"\u2502 {line} \u2502" for line in lines[:8])
        if len(lines) <= 8 and titles(boxed)[:1] != [title]:
            wrong.append((title, boxed, titles(boxed)))
    assert not wrong


@pytest.mark.rest
def test_each_wording_is_its_own_entrys() -> None:
    wrong = [(text, entry.title) for entry in MESSAGES for text in entry.wordings() if titles(text) != [entry.title]]
    assert not wrong


def test_every_message_has_a_sample_a_source_and_something_to_do() -> None:
    assert len(MESSAGES) >= 120
    assert {entry.title for entry in MESSAGES} == {title for title, _ in SAMPLES}
    assert all(entry.source.startswith("https://") and entry.steps and entry.meaning for entry in MESSAGES)


def test_part_of_a_message_is_enough_and_a_word_is_not() -> None:
    assert titles("found. Waiting indef") == ["device plugin: no strategy"]
    assert titles("driver") == titles("") == []
    assert titles("all is very well, and the GPUs compute") == []


def test_what_is_no_failure_is_nothing_of_the_table() -> None:
    log = """\
| NVIDIA-SMI 550.163.01    Driver Version: 550.163.01    CUDA Version: 12.4     |
time="2026-11-21T10:00:00Z" level=info msg="Loading containers: done."
INFO 11-27 07:19:27 model_runner.py:1110] Loading model weights took 14.9 GB
I0000 00:00:17 gpu_device.cc:2022] Created device /job:localhost/replica:0/task:0/device:GPU:0 with 22000 MB memory
Epoch 3/10: 100%|##########| 500/500 [00:42<00:00, 11.9it/s, loss=0.012, gpu=98%, error 0.03]
10.0.0.7 - - [21/Nov/2026:10:00:00 +0000] "GET /driver HTTP/1.1" 200 8030 "-" "curl/8.5.0"
container web started; Device 0: NVIDIA L4, compute capability 8.9, VMM: yes
kernel: nvidia-uvm: Loaded the UVM driver, major device number 510.
W tensorflow/compiler/tf2tensorrt/utils/py_utils.cc:38] TF-TRT Warning: Could not find TensorRT
"""
    assert titles(log, log=True) == []


def test_a_number_is_a_whole_one() -> None:
    assert titles("CUDA error 803 in line 8") == ["driver and libraries differ"]
    assert titles("NVRM: Xid (PCI:0000:01:00): 790, pid=1") == ["Xid of the kernel module"]


def test_a_log_is_explained_newest_first_once_each(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["starting", "RuntimeError: No CUDA GPUs are available", "", "x" * 5000]
    lines += [
        "NVRM: Xid (PCI:0000:01:00): 79, pid=1",
        "NVRM: Xid (PCI:0000:01:00): 31, pid=1",
        lines[1],
        "OCIGPU-DEV-1: no",
    ]
    log = "\n".join(lines * 50).encode() + b"\xff"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(log)))
    status, output, _ = run("explain", "-", "--json", "--no-checks")
    assert status == 0
    data = json.loads(output)
    assert [entry["code"] for entry in data["codes"]] == ["OCIGPU-DEV-1"]
    assert [(entry["line"], entry["title"]) for entry in data["messages"]] == [
        (399, "no devices"),
        (398, "CUDA: fault inside of the program"),
        (397, "GPU fallen off the bus"),
    ]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"all is well\n")))
    status, _, error = run("explain", "-")
    assert (status, "no known message in it" in error) == (2, True)


def _seconds(text: str) -> float:
    begin = time.process_time()
    find_messages(text, log=True)
    return time.process_time() - begin


@pytest.mark.parametrize(
    "line",
    one_in(
        4,
        [
            "Failed to initialize NVML: Unknown Error",
            "nvidia-container-cli: initialization error: load library failed: libnvidia-ml.so.1: cannot open",
            'could not select device driver "" with capabilities: [[gpu]]',
            "level=info msg=started nvidia container error 4711 failed to open device",
        ],
    ),
)
def test_a_log_takes_time_by_its_length(line: str) -> None:
    """And not by the square of it: four times the lines would then take sixteen times as long."""
    short, long = (_seconds(f"{line}\n" * number) for number in (10_000, 40_000))
    assert long < 9 * short + 0.5


def test_a_long_log_is_searched_for_what_it_may_have() -> None:
    filler = "".join(f"2026-11-27T10:00:00 host kubelet[{number}]: an ordinary line\n" for number in range(40_000))
    (found,) = find_messages(f"{filler}Failed to initialize NVML: Unknown Error\n{filler}", log=True)
    assert found.line == 40_001
    assert find_messages(filler, log=True) == []


def test_the_causes_are_looked_for_on_this_host(run: Run) -> None:
    """No driver is here: that is said, with the doctor's own fixes, and what was not the cause."""
    status, output, _ = run("explain", "NVRM: No NVIDIA devices probed")
    assert status == 0
    assert "no-gpu" in output
    assert "nouveau-loaded" in output
    status, output, _ = run("explain", "NVRM: No NVIDIA devices probed", "--json")
    (entry,) = json.loads(output)["messages"]
    assert {item["name"] for item in entry["here"]} == set(entry["findings"])
    assert all(item["severity"] and item["text"] for item in entry["here"])


def test_of_a_log_causes_that_hold_here_come_first(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    log = b"NVRM: No NVIDIA devices probed\nOCIGPU-DEV-1: no\nNVRM: Xid (PCI:0000:01:00): 31, pid=1\nOCIGPU-DEV-2: no\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(log)))
    data = json.loads(run("explain", "-", "--json")[1])
    assert [entry["line"] for entry in data["messages"]] == [1, 3]
    assert [entry["code"] for entry in data["codes"]] == ["OCIGPU-DEV-2", "OCIGPU-DEV-1"]


@pytest.mark.parametrize("engine", ["docker", "podman"])
def test_a_container_that_did_not_start_is_explained_by_its_engines_record(
    engine: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    monkeypatch.setattr("ocigpu.containers.failed.ENGINES", ("gone", engine))
    program = tmp_path / engine

    def answer(error: str, running: bool = False) -> None:
        state = {"Status": "created", "Running": running, "Error": error}
        about = json.dumps([{"Id": "0123", "Name": "/web", "State": state}])
        words = "inspect --type container web"
        program.write_text(f"#!/bin/sh\n[ \"$*\" = '{words}' ] || exit 1\ncat <<'END'\n{about}\nEND\n")
        program.chmod(0o755)

    answer('OCI runtime create failed: ocigpu-runtime: OCIGPU-DEV-1: no such device "9"')
    status, output, _ = run("explain", "web", "--no-checks")
    assert (status, output.splitlines()[0]) == (0, f"container  web ({engine}; created: it did not start)")
    assert "\nOCIGPU-DEV-1: The container requests a GPU" in output
    data = json.loads(run("explain", "web", "--no-checks", "--json")[1])
    assert (data["failed_start"]["id"], data["codes"][0]["code"]) == ("0123", "OCIGPU-DEV-1")
    answer("a cause of its own")
    assert run("explain", "web", "--no-checks")[1].splitlines()[1:] == [
        "error      a cause of its own", "look       ocigpu doctor"
    ]  # fmt: skip
    answer("")
    status, _, error = run("explain", "web")
    assert (status, f"hint: {engine} has it, created: only a running one" in error) == (1, True)
    answer("", running=True)
    for name in ("web", "other", "a/b", "-v"):
        assert f"hint: {engine}" not in run("explain", name)[2]


def test_a_message_that_names_a_bundles_file_is_no_bundle(run: Run) -> None:
    status, output, _ = run(
        "explain", "failed to open OCI spec file: open /b/config.json: permission denied", "--no-checks"
    )
    assert status == 0
    assert "bundle out of reach" in output


def test_the_name_of_an_error_is_a_message(run: Run) -> None:
    status, output, _ = run("explain", "CUDA_ERROR_NO_DEVICE", "--no-checks")
    assert (status, "no devices" in output) == (0, True)


@pytest.mark.parametrize("entry", MESSAGES, ids=[entry.title for entry in MESSAGES])
def test_findings_of_a_message_are_the_doctors(entry: Message) -> None:
    assert set(entry.findings) <= {check.name for check in CHECKS}
    assert entry.steps


@pytest.mark.parametrize("step", sorted(set(STEPS)))
def test_steps_name_commands_that_there_are(step: str) -> None:
    assert find_command(step.removeprefix("ocigpu ").partition(",")[0].split())[0] in COMMANDS, step


def test_one_page_has_all_messages(run: Run) -> None:
    assert run("explain", "--messages", "--markdown") == (0, render_markdown(), "")
    titles = [entry.title[:1].upper() + entry.title[1:] for entry in MESSAGES]
    assert re.findall(r"^## (.*)$", render_markdown(), re.MULTILINE) == titles


def test_a_log_is_explained_with_the_codes_in_it(run: Run) -> None:
    log = "OCI runtime create failed: error running hook #0: ocigpu-hook: OCIGPU-DEV-1: no such device 9, OCIGPU-NO-9"
    status, output, _ = run("explain", log)
    assert status == 0
    assert output.index("OCIGPU-DEV-1") < output.index("hook of a container failed")
    status, output, _ = run("explain", log, "--json")
    data = json.loads(output)
    assert [entry["code"] for entry in data["codes"]] == ["OCIGPU-DEV-1"]
    assert [entry["title"] for entry in data["messages"]] == ["hook of a container failed"]


def test_a_finding_is_explained(run: Run) -> None:
    status, output, _ = run("explain", "uvm-missing")
    assert status == 0
    assert "CUDA needs nvidia-uvm" in output
    status, output, _ = run("explain", "uvm-missing", "--json")
    assert json.loads(output)["findings"][0]["finding"] == "uvm-missing"


def test_an_unknown_message_is_an_error_with_a_hint(run: Run) -> None:
    status, output, error = run("explain", "all is very well")
    assert (status, output) == (2, "")
    assert "no known message matches" in error
    assert "ocigpu explain --messages" in error


def test_all_messages_are_listed(run: Run) -> None:
    status, output, _ = run("explain", "--messages")
    assert status == 0
    assert output.count("\n") == 1 + sum(len(entry.texts) for entry in MESSAGES)
    status, output, _ = run("explain", "--messages", "--json")
    assert len(json.loads(output)["messages"]) == len(MESSAGES)


@pytest.mark.parametrize(
    ("text", "engines"),
    [
        ("docker: Error response from daemon: unknown or invalid runtime name: nvidia", ("docker",)),
        ('Error: default OCI runtime "nvidia" not found: invalid argument', ()),
        ('podman: Error: default OCI runtime "nvidia" not found: invalid argument', ("podman",)),
        ("ERRO[0000] validating containers config: invalid device mode: nvidia.com/gpu=0", ("podman",)),
        ('ctr: runtime "nvidia" not found: unknown runtime nvidia', ("containerd",)),
        ('kubelet[1]: Failed to create pod sandbox: no runtime for "nvidia" is configured', ("containerd", "crio")),
        ('no runtime for "ocigpu" is configured', ("containerd", "crio")),
        ("Failed to initialize NVML: Unknown Error", ()),
    ],
)
def test_the_words_around_a_message_tell_whose_it_is(text: str, engines: tuple[str, ...]) -> None:
    assert find_messages(text)[0].engines == engines
    assert find_messages(f"first line\n{text}\nlast line", log=True)[0].engines == engines


def findings_of(*items: Finding) -> Callable[..., dict[str, list[Finding]]]:
    def look(names: list[str], _: str) -> dict[str, list[Finding]]:
        return {item.name: [one for one in items if one.name == item.name] for item in items if item.name in names}

    return look


def test_a_cause_is_of_the_messages_engine_and_a_note_is_none(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = (Evidence("/x", "y"),)
    items = [
        Finding(
            "error", "Podman is installed, but not configured for GPUs", seen, ("podman fix",), "engine-not-configured"
        ),
        Finding(
            "error", "Docker is installed, but not configured for GPUs", seen, ("docker fix",), "engine-not-configured"
        ),
        Finding("note", "Docker is from a snap", seen, ("snap fix",), "docker-snap"),
        Finding("warning", "another context", seen, ("context fix",), "docker-context"),
    ]
    monkeypatch.setattr("ocigpu.cli.containers.explain.inspect_here", findings_of(*items))
    _, out, _ = run("explain", "docker: Error response from daemon: unknown or invalid runtime name: nvidia")
    assert "docker fix" in out
    assert "context fix" in out
    assert "Podman is installed" not in out
    assert "snap fix" not in out
    assert re.search(r"not the cause here +docker-snap", out)
    _, out, _ = run("explain", 'podman: Error: default OCI runtime "nvidia" not found: invalid argument')
    assert "podman fix" in out
    assert "docker fix" not in out
    assert "context fix" not in out


def test_error_35_first_means_that_no_gpu_was_given() -> None:
    for text in ("CUDA driver version is insufficient for CUDA runtime version", "cudaGetDeviceCount returned 35"):
        (found,) = find_messages(text)
        assert found.message.meaning.startswith("First of all: no GPU was given to this container")
        assert "ocigpu ps" in found.message.steps[0]
        assert found.message.findings[0] == "container-lost-gpu"


def test_whole_families_are_known() -> None:
    families = ("enroot", "pyxis", "LXC", "Incus", "Apptainer", "Swarm", "WSL", "Jetson", "DRA", "VFIO", "Kata", "MPS")
    families += ("fabric manager", "nvidia-persistenced", "mig-parted", "MIG", "Slurm", "KubeVirt", "IMEX")
    for family in families:
        assert any(entry.title.startswith(family) for entry in MESSAGES), family
    assert sum(len(list(entry.wordings())) for entry in MESSAGES) > 1700
