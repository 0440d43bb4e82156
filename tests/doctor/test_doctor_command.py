"""The command: exit status, JSON, lists, the page of documentation, and what it does where it may not look."""

import json
import os
import re
import shlex
from pathlib import Path
from string import Formatter

import pytest
from doctor.conftest import Broken, bad, examine
from support.fixtures import Run
from support.process import run
from support.product import python_of_nobody

from ocigpu.cdi.versions import newest_version
from ocigpu.containers.believed import Container
from ocigpu.core.errors import HostError
from ocigpu.doctor import findings
from ocigpu.doctor.findings import CHECKS, EVERY, SEVERITIES, Finding
from ocigpu.doctor.host import Host
from ocigpu.doctor.report import exit_status, run_checks
from ocigpu.doctor.system import check_deleted
from ocigpu.system.proc import read_stat

DOCS = Path(__file__).parents[2] / "docs/DOCTOR.md"


@pytest.mark.parametrize(
    ("severities", "status"),
    [
        ([], 0),
        (["ok", "not-checked"], 0),
        (["ok", "note"], 0),
        (["note", "warning"], 3),
        (["warning", "error", "ok"], 4),
    ],
)
def test_the_exit_status_is_that_of_the_worst_finding(severities: list[str], status: int) -> None:
    assert exit_status([Finding(severity, "text") for severity in severities]) == status


@pytest.mark.parametrize(
    ("engine", "release", "newest"),
    [
        ("podman", "4.3.1", "0.5.0"),
        ("podman", "4.9.3", "0.6.0"),
        ("podman", "4.0.3", ""),
        ("docker", "20.10.24", ""),
        ("docker", "25.0.17", "0.8.0"),
        ("docker", "27.3.1", "0.7.0"),
        ("docker", "30.1.0", "1.1.0"),
        ("docker", "nonsense", None),
        ("containerd", "1.6.20", ""),
        ("containerd", "1.7.24", "0.7.0"),
        ("containerd", "1.7.28", "0.8.0"),
        ("containerd", "2.0.3", "0.8.0"),
        ("crio", "1.31.2", "0.8.0"),
        ("other", "1.0", None),
    ],
)
def test_what_a_release_reads_of_cdi_is_known(engine: str, release: str, newest: str | None) -> None:
    assert newest_version(engine, release) == newest


@pytest.mark.parametrize(
    ("faults", "status"), [((), 3), (("no-persistence",), 3), (("no-dev-char",), 3), (("stale-cdi",), 4)]
)
def test_the_command_ends_with_that_status(faults: tuple[str, ...], status: int, broken: Broken, run: Run) -> None:
    code, out, err = run("doctor", "--root", broken(*faults))
    assert (code, err) == (status, "")
    assert "SIMULATED" in out.splitlines()[0]


def test_json_has_everything_that_the_text_has(broken: Broken, run: Run) -> None:
    root = broken("missing-uvm")
    code, out, _ = run("doctor", "--root", root, "--json")
    report = json.loads(out)
    assert (code, report["exit_status"], report["simulated"]) == (4, 4, True)
    assert sum(report["counts"].values()) == len(report["findings"])
    found = {item["name"]: item for item in report["findings"]}
    assert set(found) == {check.name for check in CHECKS}
    missing = found["uvm-missing"]
    assert missing["severity"] == "error"
    assert missing["evidence"][0] == {
        "path": f"{root}/dev/nvidia-uvm",
        "found": "missing",
        "wanted": missing["evidence"][0]["wanted"],
    }
    assert missing["fixes"] == [f"ocigpu system create-device-nodes --config '{root}/config.toml'"]
    _, text, _ = run("doctor", "--root", root, "--all")
    for item in report["findings"]:
        assert item["name"] in text
        for fix in item["fixes"]:
            assert fix in text


def test_nothing_is_well_on_an_empty_root_that_was_not_looked_at(tmp_path: Path) -> None:
    findings = run_checks(Host(str(tmp_path)))
    assert {item.name for item in findings} == {check.name for check in CHECKS}
    well = {item.name for item in findings if item.severity == "ok"}
    assert well == {"settings-unusable", "docker-snap", "vendor-toolkit"}  # that files are not there can be seen
    assert all(item.text for item in findings if item.severity == "not-checked")


def test_this_machine_can_be_examined_as_it_is() -> None:
    findings = run_checks(Host())
    assert {item.severity for item in findings} <= set(SEVERITIES)
    assert not [item for item in findings if "the check failed" in item.text]


@pytest.mark.root
def test_an_ordinary_user_is_told_what_was_not_checked(broken: Broken, work_directory: Path) -> None:
    root = broken("deleted-files", "apparmor")
    os.chmod(root / "var/log/kern.log", 0o600)
    os.chmod(root / "proc/4242/maps", 0o600)
    script = (
        "import json, sys; from ocigpu.doctor.host import Host; from ocigpu.doctor.report import run_checks;"
        f"print(json.dumps([[i.name, i.severity, i.text] for i in run_checks(Host({str(root)!r}))]))"
    )
    done = run([*python_of_nobody(work_directory), "-c", script])
    found = {name: (severity, text) for name, severity, text in json.loads(done.stdout)}
    assert found["apparmor-denies"][0] == "not-checked"
    assert "kern.log" in found["apparmor-denies"][1]
    assert found["deleted-driver-files"][0] == "not-checked"


def test_a_log_that_is_no_file_is_not_waited_for(broken: Broken) -> None:
    root = broken()
    os.mkfifo(root / "var/log/syslog")
    assert Host(str(root)).kernel_log
    (root / "var/log/kern.log").unlink()
    with pytest.raises(HostError, match="/var/log/syslog: not a regular file"):
        assert Host(str(root)).kernel_log


def test_a_process_is_of_the_container_in_whose_cgroup_it_is() -> None:
    """An id may be any text: every process has it in the text of its cgroups."""
    host = Host()
    me, state = os.getpid(), "/nowhere/0/state.json"
    started = read_stat(f"/proc/{os.getppid()}/stat").start
    first = Container("0", "zero", "docker", "runc", "running", os.getppid(), "/b", "/r", state, started)
    host.__dict__ |= {"containers": ([first], []), "replaced_files": ({me: ("pytest", "/usr/lib/libcuda.so.1")}, 0)}
    (found,) = check_deleted(host)
    assert found.evidence[0].path == f"pytest ({me})"
    assert found.fixes == (f"# restart these programs: {me}",)
    host.__dict__ |= {"replaced_files": ({first.pid: ("sh", "/usr/lib/libcuda.so.1")}, 0)}
    assert check_deleted(host)[0].fixes == ("docker restart zero",)


def test_a_check_that_meets_nonsense_does_not_end_the_others(broken: Broken, run: Run) -> None:
    root = broken()
    (root / "etc/docker/daemon.json").write_text('{"runtimes": {"ocigpu": 7}, "features": [], "exec-opts": 3}')
    (root / "etc/cdi").mkdir(exist_ok=True)
    (root / "etc/cdi/nvidia.yaml").write_bytes(b"\xff\xfe\x00")
    (root / "etc/passwd").write_bytes(b"\xff:x:99999999999999:0:::\n:::\n")
    (root / "proc/devices").write_text("Character devices:\n999999999999 nvidia\n")
    findings = examine(root)
    assert {item.name for item in findings} == {check.name for check in CHECKS}
    assert {"cdi-unreadable", "engine-config-broken"} <= bad(findings)
    assert run("doctor", "--root", root, "--json")[0] == 4


@pytest.mark.parametrize(
    ("name", "text", "fix"),
    [
        ("acme.yaml", "cdiVersion: 0.6.0\nkind: acme.example/test\ndevices: [{name: one}]\n",
         "# correct {path}: line 3: devices[0].containerEdits is missing or empty: it holds deviceNodes,"),
        ("acme.yaml", "cdiVersion: 0.6.0\nkind: acme.example/test\n",
         "# correct {path}: devices is missing or empty: a list of objects with name and containerEdits"),
        ("my-nvidia.yaml", "a: [\n", "# correct {path}: line 2 column 1: "),
        ("nvidia.yaml", "cdiVersion: 0.6.0\nkind: acme.example/test\n", "# correct {path}: devices is missing"),
        ("nvidia.yaml", "cdiVersion: 0.6.0\nkind: nvidia.com/gpu\n", "ocigpu cdi generate"),
    ],
)  # fmt: skip
def test_a_specification_that_somebody_wrote_is_corrected_not_removed(
    broken: Broken, name: str, text: str, fix: str
) -> None:
    root = broken()
    path = root / "etc/cdi" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    (found,) = [item for item in examine(root) if item.name == "cdi-unreadable" and item.is_bad]
    fixes = " ".join(found.fixes)
    assert fix.format(path=path) in fixes
    assert "rm " not in fixes
    assert "cdi validate" in found.fixes[0]


def test_a_file_system_of_its_own_is_no_file_that_is_gone(broken: Broken) -> None:
    root = broken()
    (root / "etc/cdi").mkdir(exist_ok=True)
    mount = "{hostPath: tmpfs, containerPath: /x, type: tmpfs, options: [nosuid]}"
    edits = f"{{deviceNodes: [{{path: /dev/nvidia0}}], mounts: [{mount}]}}"
    (root / "etc/cdi/nvidia.yaml").write_text(
        f"cdiVersion: 0.6.0\nkind: nvidia.com/gpu\ndevices: [{{name: '0', containerEdits: {edits}}}]\n"
    )
    assert not {"cdi-stale", "cdi-unreadable"} & bad(examine(root))


def test_the_checks_are_listed_with_stable_names(run: Run) -> None:
    _, out, _ = run("doctor", "--list")
    names = [line.split()[0] for line in out.splitlines()[1:]]
    assert names == [check.name for check in CHECKS]
    assert all(name.replace("-", "").isalpha() and name == name.lower() for name in names)
    assert len(set(names)) == len(names)


def test_the_page_of_documentation_is_the_one_that_is_printed(run: Run) -> None:
    _, out, _ = run("doctor", "--markdown")
    assert out == DOCS.read_text()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--root", "/no/such/directory"), "--root /no/such/directory: not a directory"),
        (("--list", "--markdown"), "exclude each other"),
        (("--nonsense",), "no such option"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_status_2(words: tuple[str, ...], text: str, run: Run) -> None:
    code, out, err = run("doctor", *words)
    assert (code, out) == (2, "")
    assert text in err


def test_nothing_below_the_root_is_changed(broken: Broken) -> None:
    root = broken("vendor-cdi", "missing-nodes")

    def look() -> dict[str, tuple[int, int, int]]:
        found = {}
        for directory, directories, files in os.walk(root):
            for name in (*directories, *files):
                status = os.lstat(os.path.join(directory, name))
                found[os.path.join(directory, name)] = (status.st_mode, status.st_size, status.st_mtime_ns)
        return found

    before = look()
    examine(root)
    assert look() == before


def test_every_sentence_of_the_table_is_one_that_a_check_says() -> None:
    texts = [
        text for check in EVERY for entry in check.says.values() for text in (entry["text"], *entry.get("fixes", ()))
    ]
    places = {place for text in texts for _, place, *_ in Formatter().parse(text) if place is not None}
    assert all(place.isidentifier() for place in places)
    sources = "".join(path.read_text() for path in Path(findings.__file__).parent.glob("*.py"))
    used = {name.partition("{")[0] for name in re.findall(r'say\w*\(\s*(?:host, )?f?"([^"]+)"', sources)}
    said = {f"{check.name}.{name}" for check in EVERY for name in check.says}
    assert not [name for name in said if name not in used and f"{name.partition('.')[0]}." not in used]
    assert not [name for name in used if not name.endswith(".") and name not in said]


def test_a_name_of_several_lines_is_never_several_commands() -> None:
    found = findings.say("cdi-duplicate.one-directory", number=1, name="a", remove=("rm 'x\nreboot'", "rm y"))
    assert found.fixes == ("rm 'x\nreboot'", "rm y")
    assert findings.say("container-lost-gpu.lost", name="a", repair="ocigpu repair 'a\nb'").fixes[0].endswith("'a\nb'")


@pytest.mark.parametrize(
    ("text", "mode", "fixes"),
    [
        ("[simulation]\ngpus = 8\n", 0o644, ["# keys of [simulation]: root", "ocigpu config check {path}"]),
        ('mdoe = "hook"\n', 0o644, ["# did you mean mode?", "ocigpu config check {path}"]),
        (
            'mode = "cuda"\n',
            0o644,
            ["ocigpu config unset mode --config {path}  # its default holds then: ocigpu config keys"],
        ),
        (
            "mode = hook\n",
            0o644,
            [
                "sed -i '1s/^/# /' {path}  # the defaults of these lines hold then",
                "# correct the file, or do without: mv {path} {path}.bad",
            ],
        ),
        (None, 0, ["# See what names this file: --config, or OCIGPU_CONFIG in the environment."]),
    ],
)
def test_settings_that_cannot_be_used_are_mended_by_what_is_wrong(
    tmp_path: Path, text: str | None, mode: int, fixes: list[str]
) -> None:
    path = tmp_path / "config.toml"
    if text is not None:
        path.write_text(text)
        path.chmod(mode)
    (found,) = run_checks(Host(config=str(path)), ("settings-unusable",))
    assert [seen.wanted for seen in found.evidence] == ["usable settings"]
    assert list(found.fixes) == [fix.format(path=path) for fix in fixes]


def test_no_ldconfig_is_no_error_and_none_is_needed_where_caches_are_merged(broken: Broken, run: Run) -> None:
    """A hook without an ldconfig leaves a note, and loaders look in their own directories all the same."""
    root = broken("no-ldconfig")
    (found,) = run_checks(Host(str(root)), ("ldconfig-missing",))
    assert found.severity == "warning"
    (fix,) = [fix for fix in found.fixes if "loader-cache" in fix]
    command = fix.removeprefix("# or do without: ocigpu ")
    where = root / "etc/ocigpu/config.toml"
    assert command == f"config set loader-cache merge --config {shlex.quote(str(where))}"
    assert run(*shlex.split(command))[0] == 0
    (found,) = run_checks(Host(str(root)), ("ldconfig-missing",))
    assert found.severity == "ok"
