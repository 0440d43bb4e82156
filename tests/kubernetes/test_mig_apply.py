"""``ocigpu mig``: mig-parted's examples, hooks, checkpoints, resets, by a simulated NVML and nvidia-smi."""

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from mig_lab import ABLE, layout, layouts_of, make_mig_host, mig, names
from support.products import one_in

from ocigpu.core.errors import SettingsError
from ocigpu.gpus.nvidia import nvml_process
from ocigpu.gpus.nvidia.mig_layout import balanced, plan_change
from ocigpu.kubernetes.mig.layouts import make_layouts, parse_checkpoint, parse_hooks, parse_layout_file, wanted_of
from ocigpu.sim.libraries import library_triplet
from ocigpu.sim.models import MODELS
from ocigpu.system.store import open_lock

# the layouts of mig-parted's examples and of its packages (0.15): all-PROFILE, those by model, and one for eight A100s

COUNTS = {
    7: "1g.5gb 1g.10gb 1g.12gb 1g.18gb 1g.23gb 1g.24gb 1g.34gb",
    4: "1g.20gb 1g.35gb 1g.36gb 1g.45gb 1g.47gb 1g.6gb 1g.24gb+gfx 1g.24gb-me 1g.67gb 1g.70gb",
    3: "2g.10gb 2g.20gb 2g.24gb 2g.35gb 2g.36gb 2g.45gb 2g.47gb 2g.67gb 2g.70gb",
    2: "2g.12gb 2g.48gb 2g.48gb+gfx 2g.48gb-me 3g.20gb 3g.40gb 3g.47gb 3g.48gb 3g.71gb 3g.72gb 3g.90gb 3g.93gb 3g.95gb"
    " 3g.135gb 3g.139gb",
    1: "4g.20gb 4g.24gb 4g.40gb 4g.47gb 4g.48gb 4g.71gb 4g.72gb 4g.90gb 4g.93gb 4g.95gb 4g.96gb 4g.96gb+gfx 4g.135gb"
    " 4g.139gb 7g.40gb 7g.80gb 7g.94gb 7g.96gb 7g.141gb 7g.144gb 7g.180gb 7g.186gb 7g.189gb 7g.269gb 7g.278gb 1g.5gb+me"
    " 1g.6gb+me 1g.10gb+me 1g.12gb+me 1g.18gb+me 1g.23gb+me 1g.24gb+me 1g.34gb+me 1g.35gb+me 1g.24gb+me.all 2g.12gb+me"
    " 2g.48gb+me.all",
}
BY_MODEL = {
    "all-1g.10gb": {"0x233010DE 0x20B210DE": "1g.10gb:7", "0x20B010DE 0x20B110DE": "1g.10gb:4"},
    "all-1g.24gb": {"0x294110DE": "1g.24gb:7", "0x232110DE 0x2BB510DE": "1g.24gb:4"},
    "all-balanced": {
        "0x294110DE": "1g.24gb:2 2g.47gb:1 3g.95gb:1",
        "0x234210DE": "1g.12gb:2 2g.24gb:1 3g.48gb:1",
        "0x2BB510DE": "1g.24gb:2 2g.48gb:1",
        "0x290110DE": "1g.23gb:2 2g.45gb:1 3g.90gb:1",
        "0x233510DE 0x233B10DE": "1g.18gb:2 2g.35gb:1 3g.71gb:1",
        "0x233010DE 0x20B210DE": "1g.10gb:2 2g.20gb:1 3g.40gb:1",
        "0x20B010DE 0x20B110DE": "1g.5gb:2 2g.10gb:1 3g.20gb:1",
        "0x20B710DE": "1g.6gb:2 2g.12gb:1",
    },
}
CUSTOM = [
    ([0, 1], None),
    ([2], "1g.5gb:7"),
    ([3], "2g.10gb:3"),
    ([4], "3g.20gb:2"),
    ([5], "1g.5gb:2 2g.10gb:1 3g.20gb:1"),
]


def devices(text: str) -> dict[str, int]:
    return {name: int(count) for name, _, count in (word.partition(":") for word in text.split())}


def example() -> str:
    every = {
        f"all-{name.replace('+', '.')}": f"{name}:{most}" for most, all_ in COUNTS.items() for name in all_.split()
    }
    entry = {"devices": "all", "mig-enabled": True}
    layouts: dict[str, list[dict[str, object]]] = {
        "all-disabled": [{"devices": "all", "mig-enabled": False}],
        "all-enabled": [{**entry, "mig-devices": {}}],
        **{name: [{**entry, "mig-devices": devices(text)}] for name, text in every.items()},
        **{
            name: [{"device-filter": ids.split(), **entry, "mig-devices": devices(text)} for ids, text in each.items()]
            for name, each in BY_MODEL.items()
        },
        "custom": [
            {"devices": numbers, "mig-enabled": bool(text), **({"mig-devices": devices(text)} if text else {})}
            for numbers, text in CUSTOM
        ],
    }
    return yaml.safe_dump({"version": "v1", "mig-configs": layouts})


@pytest.mark.parametrize("model", ABLE)
def test_every_layout_of_the_examples_fits_where_the_model_has_its_profiles(model: str) -> None:
    gpu = layout(model)
    has = {profile.name for profile in gpu.profiles}
    layouts = parse_layout_file(example(), "config.yaml")
    possible = 0
    for name in layouts.by_name:
        for _, wanted in wanted_of(layouts.select(name), [gpu]):
            found = plan_change(gpu, wanted, {})
            assert bool(found.problem) == (not has.issuperset(wanted.devices)), (name, found.problem)
            made = sorted(gpu.name_of(one) for one in found.create)
            expected = sorted(each for each, count in wanted.devices.items() for _ in range(count))
            assert made == ([] if found.problem else expected)
            possible += not found.problem
    assert possible >= 2 + len({profile.slices for profile in gpu.profiles})
    found = [wanted.devices for _, wanted in wanted_of(layouts.select("all-balanced"), [gpu])]
    # newer drivers call GB200's profiles otherwise, and the examples have no balanced B300
    assert model in ("gb200", "b300") or found == [balanced(gpu)]


@pytest.mark.rest
@pytest.mark.root
@pytest.mark.parametrize("model", one_in(9, ABLE))
def test_every_layout_of_the_examples_is_made_or_changes_nothing(
    model: str, work_directory: Path, capfd: pytest.CaptureFixture[str], share: Callable[..., list[Any]]
) -> None:
    host = make_mig_host(work_directory / "host", 1, model)
    file = work_directory / "config.yaml"
    file.write_text(example())
    layouts, gpu = parse_layout_file(example(), "config.yaml"), layout(model)
    has = {profile.name for profile in gpu.profiles}
    chosen = {name: [wanted for _, wanted in wanted_of(entries, [gpu])] for name, entries in layouts.by_name.items()}
    able = [name for name, all_ in chosen.items() if all_ and has.issuperset(all_[0].devices)]
    for name in share(able, 12, ABLE.index(model)):
        assert mig(host, capfd, "apply", "-f", str(file), "-c", name)[0] == 0, name
        expected = sorted(each for each, count in chosen[name][0].devices.items() for _ in range(count))
        assert names(layouts_of(host)[0]) == expected
    before = layouts_of(host)
    for name in [name for name, all_ in chosen.items() if all_ and name not in able][:1]:
        status, _, err = mig(host, capfd, "apply", "-f", str(file), "-c", name)
        assert (status, err[:22]) == (1, "ocigpu: OCIGPU-MIG-2: "), name
    assert layouts_of(host) == before


@pytest.mark.root
def test_a_layout_by_index_is_made(work_directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    host = make_mig_host(work_directory / "host", 6, "a100")
    file = work_directory / "config.yaml"
    file.write_text(example())
    assert mig(host, capfd, "apply", "-f", str(file), "-c", "custom")[0] == 0
    expected = [
        sorted(name for name, count in devices(text or "").items() for _ in range(count))
        for numbers, text in CUSTOM
        for _ in numbers
    ]
    assert [names(gpu) for gpu in layouts_of(host)] == expected
    assert [gpu.mode for gpu in layouts_of(host)] == [0, 0, 1, 1, 1, 1]


@pytest.mark.root
def test_gpus_that_are_as_the_layout_says_are_only_read(
    work_directory: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = make_mig_host(work_directory / "host", 1, "h100", "0:3g.40gb,3g.40gb")
    verbs: list[str] = []

    def ask(verb: str, *arguments: Any, **options: Any) -> Any:
        verbs.append(verb)
        return nvml_process.ask(verb, *arguments, **options)

    monkeypatch.setattr("ocigpu.gpus.nvidia.mig.ask", ask)
    assert mig(host, capfd, "apply", "-c", "all-3g.40gb")[0] == 0
    assert verbs == ["mig-layout"]


@pytest.mark.root
def test_a_layout_that_says_nothing_of_a_gpu_is_not_what_it_is(
    work_directory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As by the vendor's assert, which tells so of modes only with the devices."""
    host = make_mig_host(work_directory / "host", 2, "h100")
    file = work_directory / "config.yaml"
    off = "devices: [0], mig-enabled: false"
    file.write_text(f"version: v1\nmig-configs: {{a: [{{{off}}}]}}")
    assert mig(host, capfd, "apply", "-f", str(file))[0] == 0
    status, out, _ = mig(host, capfd, "assert", "-f", str(file))
    assert (status, out.splitlines()[-2:]) == (
        1,
        ["  ! the layout does not mention it", "impossible: 1; nothing was changed"],
    )
    assert mig(host, capfd, "assert", "-f", str(file), "-m")[0] == 0
    file.write_text(file.read_text().replace("[0]", "[1, 0]"))
    assert mig(host, capfd, "assert", "-f", str(file))[0] == 0


@pytest.mark.rest
@pytest.mark.root
def test_gpus_that_the_host_lacks_are_named(work_directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    host = make_mig_host(work_directory / "host", 2, "h100")
    file = work_directory / "config.yaml"
    entry = "{devices: [2, 3, 4, 7], mig-enabled: true, mig-devices: {1g.10gb: 7}}"
    file.write_text(f"version: v1\nmig-configs: {{a: [{{devices: [0, 1], mig-enabled: false}}, {entry}]}}")
    for word in ("plan", "apply", "assert"):
        status, out, err = mig(host, capfd, word, "-f", str(file))
        assert (status, "the layout names GPUs 2-4, 7, and this host has GPUs 0-1" in out) == (0, True), out + err
    many = "version: v1\nmig-configs: {a: [{devices: all, mig-enabled: true, mig-devices: {7g.80gb: 2}}]}"
    file.write_text(many)
    _, _, err = mig(host, capfd, "apply", "-f", str(file))
    assert "GPUs 0-1: it does not fit" in err, "of equal GPUs it is said once"
    file.write_text(f"version: v1\nmig-configs: {{a: [{entry}]}}")
    status, out, _ = mig(host, capfd, "apply", "-f", str(file))
    assert (status, out.splitlines()[-1]) == (0, "the layout is about no GPU of this host; nothing was changed")


@pytest.mark.root
def test_changes_of_one_host_wait_for_no_other(work_directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    one, other = (make_mig_host(work_directory / name, 1, "h100") for name in ("one", "other"))
    with os.fdopen(open_lock("mig.lock", str(one)), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "another process changes MIG devices" in mig(one, capfd, "apply", "-c", "all-disabled")[2]
        assert mig(other, capfd, "apply", "-c", "all-disabled")[0] == 0
    assert mig(one, capfd, "apply", "-c", "all-disabled")[0] == 0


# files made of what is there


@pytest.mark.rest
@pytest.mark.root
def test_generated_layouts_and_checkpoints_are_read_again(
    work_directory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    host = make_mig_host(work_directory / "host", 1, "rtxpro6000")
    file, saved = work_directory / "config.yaml", work_directory / "saved.json"
    assert mig(host, capfd, "generate-config", "-f", str(file)) == (0, "", "")
    layouts = parse_layout_file(file.read_text(), "config.yaml")
    assert layouts.by_name.keys() == make_layouts(layouts_of(host)).by_name.keys()
    status, out, _ = mig(host, capfd, "generate-config", "-o", "json")
    assert (status, json.loads(out)) == (0, yaml.safe_load(file.read_text()))
    assert mig(host, capfd, "generate-config", "-o", "xml")[0] == 2

    assert mig(host, capfd, "apply", "-f", str(file), "-c", "all-balanced")[0] == 0
    assert mig(host, capfd, "checkpoint", "-f", str(saved)) == (0, "", "")
    before = layouts_of(host)
    told = json.loads(mig(host, capfd, "checkpoint", "-f", str(saved), "--json")[1])
    assert told == {"schema-version": 1, "checkpoint-file": str(saved), "gpus": [before[0].uuid]}
    device = json.loads(saved.read_text())["MigState"]["Devices"][0]
    assert (device["UUID"], device["MigMode"]) == (before[0].uuid, 1)
    compute = [{"ProfileID": 0, "EngProfileID": 0}]
    assert {"ProfileID": 0, "Placement": {"Start": 3, "Size": 3}, "ComputeInstances": compute} in device["GpuInstances"]
    for other in ("all-disabled", "all-1g.24gb"):
        assert mig(host, capfd, "apply", "-c", other)[0] == 0
        assert mig(host, capfd, "restore", "-f", str(saved))[0] == 0
        found = layouts_of(host)
        places = [[sorted((one.kind, one.start) for one in gpu.instances) for gpu in each] for each in (found, before)]
        assert places[0] == places[1]
    assert "kept: 3" in mig(host, capfd, "restore", "-f", str(saved))[1]
    status, out, _ = mig(host, capfd, "export", "-o", "json", "-l", "now")
    assert list(json.loads(out)["mig-configs"]) == ["now"]
    saved.write_text(saved.read_text().replace(before[0].uuid, "GPU-other"))
    assert "GPUs that this host lacks: GPU-other" in mig(host, capfd, "restore", "-f", str(saved))[2]


_WITH_NVML = """
import sys, pynvml
pynvml.nvmlInit()
gpu = pynvml.nvmlDeviceGetHandleByIndex(0)
pynvml.nvmlDeviceSetMigMode(gpu, 1)
for compute in map(int, sys.argv[1:]):
    instance = pynvml.nvmlDeviceCreateGpuInstance(gpu, 15)
    pynvml.nvmlGpuInstanceCreateComputeInstance(instance, compute)
for index in range(len(sys.argv) - 1):
    mig = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index)
    print(pynvml.nvmlDeviceGetName(mig), pynvml.nvmlDeviceGetAttributes_v2(mig).multiprocessorCount)
"""


def with_nvml(host: Path, *words: str) -> list[str]:
    """Make GPU instances of profile 15 with these compute profiles, as nvidia-smi does; returns what there is."""
    variables = {"LD_LIBRARY_PATH": str(host / "usr/lib" / library_triplet()), "PATH": os.environ["PATH"]}
    code = [sys.executable, "-c", _WITH_NVML, *words]
    return subprocess.run(code, env=variables, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.rest
@pytest.mark.root
def test_of_two_compute_profiles_of_one_size_the_instances_own_is_taken(
    work_directory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """1g.67gb of a B300 has 30 multiprocessors, a slice 18: compute profile 7 has all, as nvidia-smi -C makes it."""
    host, saved = make_mig_host(work_directory / "host", 1, "b300"), work_directory / "saved.json"
    assert mig(host, capfd, "apply", "-c", "all-1g.67gb")[0] == 0
    (gpu,) = layouts_of(host)
    assert {(one.cis, one.numbers, one.usual) for one in gpu.instances} == {((1,), (7,), True)}
    assert mig(host, capfd, "apply", "-c", "all-disabled")[0] == 0

    assert [line.rpartition(" ")[2] for line in with_nvml(host, "7", "0")] == ["30", "18"]
    (gpu,) = layouts_of(host)
    assert names(gpu) == ["1c.1g.67gb", "1g.67gb"]
    assert len([uuid for one in gpu.instances for uuid in one.uuids]) == 2
    assert mig(host, capfd, "checkpoint", "-f", str(saved))[0] == 0
    for other in ("all-disabled", "all-1g.67gb"):
        assert mig(host, capfd, "apply", "-c", other)[0] == 0, "both can be destroyed"
        assert mig(host, capfd, "restore", "-f", str(saved))[0] == 0
        assert names(layouts_of(host)[0]) == ["1c.1g.67gb", "1g.67gb"], "and come back as they were"
    status, out, _ = mig(host, capfd, "plan", "-c", "all-1g.67gb")
    assert (status, "keep 1g.67gb" in out or "kept: 1" in out) == (0, True), out
    assert mig(host, capfd, "apply", "-c", "all-1g.67gb")[0] == 0
    assert [one.numbers for one in layouts_of(host)[0].instances] == [(7,)] * 4


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "Invalid JSON"),
        ("{}", "Version: "),
        ('{"Version": "v2", "MigState": {}}', "Version: "),
        ('{"Version": "v1", "MigState": {"Devices": [{"UUID": "GPU-a", "MigMode": 2}]}}', "Devices.0.MigMode"),
        ('{"Version": "v1", "MigState": {"Devices": [{"UUID": "GPU-a", "MigMode": 1, "x": 1}]}}', "Devices.0.x"),
    ],
)
def test_a_checkpoint_that_is_wrong_is_refused_by_the_place(text: str, words: str) -> None:
    with pytest.raises(SettingsError, match=r"a\.json: ") as caught:
        parse_checkpoint(text, "a.json")
    assert (caught.value.code, words in str(caught.value)) == ("OCIGPU-MIG-1", True)


# hooks


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "version and hooks are missing"),
        ("version: v1\nhooks: [", "not YAML: line 3 column 1: did not find expected node content"),
        ("version: v2\nhooks: {}", "version: "),
        ("version: v1\nhooks: {pre-apply: []}", "hooks.pre-apply: "),
        ("version: v1\nhooks: {apply-exit: [{}]}", "hooks.apply-exit.0.command: "),
        ("version: v1\nhooks: {apply-exit: [{command: a, args: [1]}]}", "hooks.apply-exit.0.args.0: "),
        ("version: v1\nhooks: {apply-exit: [{command: a, shell: b}]}", "hooks.apply-exit.0.shell: "),
    ],
)
def test_a_file_of_hooks_that_is_wrong_is_refused_by_the_place(text: str, words: str) -> None:
    with pytest.raises(SettingsError, match=r"a\.yaml: ") as caught:
        parse_hooks(text, "a.yaml", {})
    assert (caught.value.code, words in str(caught.value)) == ("OCIGPU-MIG-1", True)


MOMENTS = ("apply-start", "pre-apply-mode", "pre-apply-config", "apply-exit")


def hooks(directory: Path, **scripts: str) -> str:
    """A file of hooks: each notes its moment; ``scripts``: what it does then."""
    log = directory / "log"
    made = {
        moment: [
            {
                "command": "sh",
                "args": [
                    "-ec",
                    f'echo {moment} $MINE $MIG_PARTED_SELECTED_CONFIG >> "{log}"; '
                    + scripts.get(moment.replace("-", "_"), ""),
                ],
                "envs": {"MINE": "own"},
                "workdir": str(directory),
            }
        ]
        for moment in MOMENTS
    }
    (directory / "hooks.yaml").write_text(yaml.safe_dump({"version": "v1", "hooks": made}))
    log.write_text("")
    return str(directory / "hooks.yaml")


@pytest.mark.rest
@pytest.mark.root
def test_hooks_are_run_in_order_and_end_what_uses_the_gpus(
    work_directory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    host = make_mig_host(work_directory / "host", 1, "h100")
    load, log = host / "load", work_directory / "log"
    load.write_text("process 0 4242 100 5\n")
    asked = ("apply", "-c", "all-balanced")
    assert "process 4242 uses it" in mig(host, capfd, *asked)[2]
    file = hooks(work_directory, pre_apply_mode=f'rm "{load}"')
    assert mig(host, capfd, *asked, "-k", file)[0] == 0
    assert log.read_text().split("\n") == [*(f"{moment} own all-balanced" for moment in MOMENTS), ""]
    log.write_text("")
    assert mig(host, capfd, *asked, "-k", file)[0] == 0
    assert [line.split()[0] for line in log.read_text().splitlines()] == ["apply-start", "apply-exit"]


@pytest.mark.root
@pytest.mark.parametrize("moment", one_in(4, MOMENTS))
def test_a_hook_that_fails_leaves_all_as_it_was(
    work_directory: Path, capfd: pytest.CaptureFixture[str], moment: str
) -> None:
    host = make_mig_host(work_directory / "host", 1, "h100")
    before = layouts_of(host)
    file = hooks(work_directory, **{moment.replace("-", "_"): "echo no such unit >&2; exit 3"})
    status, out, err = mig(host, capfd, "apply", "-c", "all-balanced", "-k", file)
    assert status == 1
    assert ("made: " in out) == (moment == "apply-exit"), "what was changed is said, whatever the last hook does"
    assert err.startswith(f"ocigpu: OCIGPU-MIG-5: {file}: hooks.{moment}.0: sh: no such unit")
    ran = [line.split()[0] for line in (work_directory / "log").read_text().splitlines()]
    assert ran == [*MOMENTS[: MOMENTS.index(moment) + 1], *(["apply-exit"] if moment in MOMENTS[1:3] else [])]
    assert (layouts_of(host) == before) == (moment != "apply-exit")


@pytest.mark.root
def test_a_change_that_is_killed_leaves_what_was_before(
    work_directory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    host = make_mig_host(work_directory / "host", 1, "h100")
    before = layouts_of(host)
    file = hooks(work_directory, pre_apply_config="kill -9 $PPID")
    config = ("--config", str(host / "config.toml"))
    words = [sys.executable, "-m", "ocigpu.cli.front.main", "mig", "apply", "-c", "all-balanced", "-k", file, *config]
    assert subprocess.run(words, capture_output=True).returncode == -signal.SIGKILL
    assert [gpu.mode for gpu in layouts_of(host)] == [1]
    kept = host / "run/ocigpu/mig-before.json"
    hooks(work_directory, pre_apply_config="exit 1")
    assert mig(host, capfd, "apply", "-c", "all-balanced", "-k", file)[0] == 1
    status, out, _ = mig(host, capfd, "restore", "-f", str(kept))
    assert (status, f"note: an earlier change ended half-way; what was before it: ocigpu mig restore -f {kept}") == (
        0,
        " ".join(out.splitlines()[-1].split()),
    )
    assert (layouts_of(host), kept.exists()) == (before, False)
    assert mig(host, capfd, "apply", "-c", "all-balanced", "-k", file)[0] == 1
    assert not kept.exists()  # all was put back


@pytest.mark.rest
def test_an_error_of_what_was_asked_leaves_no_note(work_directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    host = make_mig_host(work_directory / "host", 1, "h100")
    checkpoint = work_directory / "checkpoint.json"
    assert mig(host, capfd, "checkpoint", "-f", str(checkpoint))[0] == 0
    checkpoint.write_text(checkpoint.read_text().replace("GPU-", "GPU-x"))
    for words in (("apply", "-c", "nonsense"), ("restore", "-f", str(checkpoint))):
        assert mig(host, capfd, *words)[0] == 1
        assert not (host / "run/ocigpu/mig-before.json").exists()
    assert "an earlier change" not in mig(host, capfd, "apply", "-c", "all-balanced")[1]


# resets


@pytest.mark.rest
@pytest.mark.root
def test_a_mode_that_waits_for_a_reset_gets_it(work_directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Ampere, with a client that NVML does not list as a process."""
    host = make_mig_host(work_directory / "host", 2, "a100")
    (host / "faults").write_text("mig-busy 0\n")
    status, _, err = mig(host, capfd, "apply", "-c", "all-balanced", "-s")
    assert (status, "nvidia-smi --gpu-reset -i 0000" in err) == (1, True)
    assert [(gpu.mode, gpu.pending) for gpu in layouts_of(host)] == [(0, 1), (1, 1)]
    assert mig(host, capfd, "apply", "-c", "all-enabled", "-m", "-s")[0] == 0
    assert [(gpu.mode, gpu.pending) for gpu in layouts_of(host)] == [(0, 1), (1, 1)]
    assert mig(host, capfd, "apply", "-c", "all-balanced")[0] == 0
    assert [names(gpu) for gpu in layouts_of(host)] == [["1g.5gb", "1g.5gb", "2g.10gb", "3g.20gb"]] * 2
    assert mig(host, capfd, "apply", "-c", "all-disabled")[0] == 0
    assert [(gpu.mode, gpu.pending) for gpu in layouts_of(host)] == [(0, 0)] * 2


@pytest.mark.rest
@pytest.mark.root
def test_a_gpu_that_waits_for_a_reset_and_is_not_meant_is_not_reset(
    work_directory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its instances would be gone, and whoever has them, without a process at the moment, would not be asked."""
    host = make_mig_host(work_directory / "host", 2, "a100")
    assert mig(host, capfd, "apply", "-c", "all-balanced")[0] == 0
    (host / "faults").write_text("mig-busy 0\nmig-busy 1\n")
    assert mig(host, capfd, "apply", "-c", "all-disabled", "-m", "-s")[0] == 0
    cut = layouts_of(host)[1]
    file = host / "a.yaml"
    for wanted, mode in (("mig-enabled: false", 0), ("mig-enabled: true, mig-devices: {}", 1)):
        file.write_text(f"version: v1\nmig-configs: {{a: [{{devices: [0], {wanted}}}]}}")
        assert mig(host, capfd, "apply", "-f", str(file))[0] == 0
        first, other = layouts_of(host)
        assert (first.mode, first.pending) == (mode, mode)
        assert other == cut


@pytest.mark.rest
@pytest.mark.root
def test_a_reset_that_is_refused_puts_all_back(work_directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    host = make_mig_host(work_directory / "host", 2, "a100")
    assert mig(host, capfd, "apply", "-c", "all-balanced")[0] == 0
    places = [sorted((one.kind, one.start) for one in gpu.instances) for gpu in layouts_of(host)]
    (host / "load").write_text("process 0 4242 100 5\n")
    status, _, err = mig(host, capfd, "apply", "-c", "all-disabled", "--force")
    assert status == 1
    assert "OCIGPU-MIG-4: reset GPU 0: nvidia-smi: The following GPUs could not be reset" in err
    assert "(all is as it was before)" in err
    assert [sorted((one.kind, one.start) for one in gpu.instances) for gpu in layouts_of(host)] == places
    assert [(gpu.mode, gpu.pending) for gpu in layouts_of(host)] == [(1, 1)] * 2


@pytest.mark.rest
@pytest.mark.root
def test_an_instance_that_a_process_uses_is_not_destroyed(
    work_directory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    host = make_mig_host(work_directory / "host", 1, "h100")
    assert mig(host, capfd, "apply", "-c", "all-3g.40gb")[0] == 0
    before = layouts_of(host)
    (host / "load").write_text(f"process 0 4242 100 5 {before[0].instances[0].gi}\n")
    status, _, err = mig(host, capfd, "apply", "-c", "all-1g.10gb")
    assert (status, "not beside the instances in use: process 4242 uses MIG-" in err) == (1, True)
    assert "kept: 1" in mig(host, capfd, "plan", "-c", "all-balanced")[1]
    status, _, err = mig(host, capfd, "apply", "-c", "all-1g.10gb", "--force")
    assert "In use by another client (all is as it was before)" in err
    assert layouts_of(host) == before


def test_a_reset_by_hand_takes_mig_devices_away(work_directory: Path) -> None:
    host = make_mig_host(work_directory / "host", 2, "h100", "0:3g.40gb", "1:1g.10gb")
    smi = str(host / "usr/bin/nvidia-smi")

    def run(*words: str) -> tuple[int, str]:
        done = subprocess.run([smi, *words], capture_output=True, text=True, check=False)
        return done.returncode, done.stdout

    capability = host / "proc/driver/nvidia/capabilities/gpu0/mig"
    assert [path.name for path in capability.iterdir()] == ["gi1"]
    assert run("-r", "-i", "0,7") == (6, "No devices were found\n")
    (host / "load").write_text("process 0 1 1 1\n")
    assert run("-r", "-i", "0")[0] == 19
    assert run("-r", "-i", "1")[0] == 0
    (host / "load").unlink()
    assert run("--gpu-reset") == (
        0,
        "GPU 00000000:01:00.0 was successfully reset.\nGPU 00000000:02:00.0 was successfully reset.\n",
    )
    assert list(capability.iterdir()) == []
    assert "MIG" not in run("-L")[1]


def test_the_models_with_mig_are_known() -> None:
    assert [key for key in MODELS if key in ABLE] == ABLE
