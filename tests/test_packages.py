"""The packages as users get them: built, installed without a network, used with Docker, upgraded, removed."""

import json
import os
import re
import shutil
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support import requirements
from support.cluster import Cluster
from support.engines import Docker, start_docker
from support.fixtures import IMAGE, MakeBundle
from support.process import Completed, run
from support.product import CONTROL_NODES, SimulatedHost, gpu_names, listed_uuids
from support.runtimes import answers, parts, probe, script, view_of
from support.scratch import ENVIRONMENT, ScratchMachine, scratch_machine
from support.upgrade import NEXT, Starts

from ocigpu import VENDOR_VERSION, __version__

pytestmark = [pytest.mark.rest, pytest.mark.xdist_group("packages"), pytest.mark.timeout(900)]

REPOSITORY = Path(__file__).resolve().parents[1]
PROGRAMS = ("ocigpu", "ocigpu-runtime", "ocigpu-hook", "ocigpu-container-cli")
VENDOR_NAMES = {
    "nvidia-container-runtime": "ocigpu-runtime",
    "nvidia-container-runtime-hook": "ocigpu-hook",
    "nvidia-container-toolkit": "ocigpu-hook",
    "nvidia-cdi-hook": "ocigpu-hook",
    "nvidia-container-cli": "ocigpu-container-cli",
    "nvidia-ctk": "ocigpu",
}
WANTED = "/etc/systemd/system/multi-user.target.wants/"
ENABLED = (f"{WANTED}ocigpu-cdi-refresh.path", f"{WANTED}ocigpu-cdi-refresh.service")
BOOKS = ("/var/lib/dpkg/", "/var/lib/rpm", "/root/.rpmdb", "/var/log/", "/var/cache/")
"""Where package managers write what they have done."""
DOCKERS = ("/etc/docker", "/opt/containerd", "/tmp/containerd.")
"""What dockerd and containerd make where they start for the first time, and where one is slow to answer the other."""


def find(packages: Path, kind: str) -> tuple[str, str, str]:
    """Return the paths of the package, of the one with the vendor's names and of that for Kubernetes."""
    more = {name: path for name in ("nvidia-names", "kubernetes") for path in packages.glob(f"ocigpu-{name}*.{kind}")}
    (main,) = {*packages.glob(f"*.{kind}")} - {*more.values()}
    return str(main), str(more["nvidia-names"]), str(more["kubernetes"])


@pytest.fixture(scope="module")
def debian(session_directory: Path, packages: Path, simulated_host: SimulatedHost) -> Iterator[ScratchMachine]:
    """A machine on which the .deb packages are installed, with settings that name a simulated host."""
    requirements.require(requirements.root())
    directory = session_directory / "debian"
    directory.mkdir()
    with scratch_machine(directory, hidden=REPOSITORY, shared=[session_directory]) as machine:
        machine("dpkg", "--install", *find(packages, "deb"))
        configure(machine, simulated_host)
        yield machine


def configure(machine: ScratchMachine, host: SimulatedHost) -> None:
    directory = machine.root / "etc/ocigpu"
    directory.mkdir()
    shutil.copy(host.settings, directory / "config.toml")


@pytest.fixture(scope="module")
def docker(debian: ScratchMachine, session_directory: Path, image: Path) -> Iterator[Docker]:
    """A dockerd on that machine, set up the way an operator or the vendor's tools would."""
    requirements.require(requirements.programs("dockerd", "docker", "containerd", "runc"))
    runtimes = {"ocigpu": "/usr/bin/ocigpu-runtime", "nvidia": "nvidia-container-runtime"}
    view = (*debian.enter, *view_of("v2"))
    with start_docker(session_directory / "docker-packages", image, runtimes, {}, view=view) as engine:
        yield engine


def test_a_package_belongs_to_root_and_is_closed_to_nobody(packages: Path) -> None:
    for path in find(packages, "deb"):
        lines = [line.split(None, 5) for line in run(["dpkg-deb", "--contents", path]).stdout.splitlines()]
        assert {owner for _, owner, *_ in lines} == {"root/root"}
        modes = {mode for mode, *_ in lines if not mode.startswith("l")}
        assert modes <= {"drwxr-xr-x", "-rw-r--r--", "-rwxr-xr-x"}


def test_both_kinds_of_package_have_the_same_files(packages: Path) -> None:
    preset = "/usr/lib/systemd/system-preset/90-ocigpu.preset"
    for deb, rpm in zip(find(packages, "deb"), find(packages, "rpm"), strict=True):
        listing = run(["dpkg-deb", "--contents", deb]).stdout.splitlines()
        ours = {line.split(None, 5)[5].partition(" -> ")[0].lstrip(".") for line in listing if line[0] != "d"}
        rows = run(["rpm", "-qp", "--qf", "[%{FILEMODES:perms} %{FILENAMES}\n]", rpm]).stdout.splitlines()
        owners = run(["rpm", "-qp", "--qf", "[%{FILEUSERNAME}:%{FILEGROUPNAME}\n]", rpm]).stdout.split()
        assert set(owners) == {"root:root"}
        theirs = {
            row.split(None, 1)[1].replace("site-functions", "vendor-completions") for row in rows if row[0] != "d"
        }
        assert theirs - ours <= {preset}
        assert ours <= theirs


def test_byte_code_is_part_of_the_package_for_the_python_it_depends_on(debian: ScratchMachine, packages: Path) -> None:
    depends = run(["dpkg-deb", "--field", find(packages, "deb")[0], "Depends"]).stdout
    python = depends.split(",")[0]
    for name in ("ocigpu-runtime", "ocigpu-hook"):
        words = (debian.root / "usr/bin" / name).read_bytes().split(b"\0")
        assert {f"/usr/bin/{python}".encode(), b"-I", b"-S"} <= {*words}, "compiled, for that Python"
    (library,) = (debian.root / "usr/lib/ocigpu/package").iterdir()
    (used,) = (debian.root / "usr/lib/ocigpu/versions").iterdir()
    assert used.name == library.name
    assert (used / "library/ocigpu/runtime.py").samefile(library / "library/ocigpu/runtime.py"), "a hard link"
    sources = [path for path in library.rglob("*.py") if path.stat().st_size]
    tag = f"cpython-{python.removeprefix('python').replace('.', '')}"
    assert [path for path in sources if not (path.parent / f"__pycache__/{path.stem}.{tag}.pyc").exists()] == []
    debian("ocigpu", "list", "--json")
    assert debian.changes("/usr/", "/etc/ocigpu/", "/etc/systemd/", "/var/lib/systemd/", *BOOKS) == []
    assert not [path for path in debian.changes() if path.endswith(".pyc") and str(REPOSITORY) in path]


def test_what_a_snapshot_is_linked_from_is_named_beside_its_sources(debian: ScratchMachine) -> None:
    """By newest.py, which compares it with what Debian has; the version's name is of that snapshot."""
    (version,) = (debian.root / "usr/lib/ocigpu/versions").iterdir()
    assert (version / "bin/ocigpu-python").exists()
    python = os.path.realpath("/usr/bin/python3")
    made = run([REPOSITORY / "packaging/snapshot/find.sh", python]).stdout.strip()
    vendored = run([REPOSITORY / "packaging/vendored.sh", python]).stdout.strip()
    assert version.name == run([REPOSITORY / "packaging/tree-id.sh", python, vendored, made]).stdout.strip()
    sources = debian.root / "usr/share/doc/ocigpu/source/snapshot"
    assert (sources / "musl.txt").read_text() == Path(made, "musl.txt").read_text()
    assert {path.name for path in (REPOSITORY / "packaging/snapshot").iterdir() if path.is_file()} <= {
        path.name for path in sources.iterdir()
    }


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_command_runs_from_the_package_alone(debian: ScratchMachine, name: str) -> None:
    hostile = {"PYTHONPATH": "/nonexistent", "PYTHONHOME": "/nonexistent"}
    word = "state" if name == "ocigpu-runtime" else "--version"
    done = debian(f"/usr/bin/{name}", word, env=hostile, check=False)
    said = done.stdout + done.stderr
    assert "Traceback" not in said
    assert __version__ in said or name in ("ocigpu-runtime", "ocigpu-container-cli"), said


def test_units_start_the_commands_of_the_package(debian: ScratchMachine) -> None:
    units = debian.root / "usr/lib/systemd/system"
    commands = {
        line
        for path in units.glob("ocigpu-*")
        for line in path.read_text().splitlines()
        if line.startswith("ExecStart=")
    }
    restore = "fabric restore --follow $OCIGPU_FABRIC_RESTORE"
    own = ("fabric serve $OCIGPU_FABRIC_SERVE", restore, "lease agent $OCIGPU_LEASE_AGENT")
    words = ("cdi refresh", "mig apply", "watch", "watch --repair", *own)
    assert commands == {f"ExecStart=/usr/bin/ocigpu {text}" for text in words}
    assert sorted(path for path in debian.changes() if path.startswith(WANTED)) == list(ENABLED)


def test_every_command_and_every_command_below_it_has_a_man_page(debian: ScratchMachine) -> None:
    from ocigpu.cli.front.main import COMMANDS

    names = {"-".join(["ocigpu", *name.split()[:depth]]) for name in COMMANDS for depth in range(4)}
    pages = {path.name for path in (debian.root / "usr/share/man/man1").glob("ocigpu*")}
    assert {f"{name}.1.gz" for name in (*names, *PROGRAMS)} <= pages
    text = debian("sh", "-c", "zcat /usr/share/man/man1/ocigpu-cdi-generate.1.gz").stdout
    assert ".TH OCIGPU\\-CDI\\-GENERATE 1" in text
    assert "\\fB\\-\\-output FILE\\fR" in text
    assert ".SH EXAMPLES\n.nf\nocigpu cdi generate" in text


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        pytest.param("ocigpu cdi gen", {"generate"}, id="a command"),
        pytest.param("ocigpu plan --priv", {"--privileged"}, id="an option"),
        pytest.param("ocigpu engine remove ", {"docker", "containerd", "crio", "podman"}, id="an engine"),
        pytest.param("ocigpu ", {"cdi", "plan", "explain"}, id="nothing yet"),
    ],
)
def test_bash_completes_what_was_begun(debian: ScratchMachine, line: str, expected: set[str]) -> None:
    words = " ".join(f'"{word}"' for word in line.split(" "))
    ask = f"COMP_WORDS=({words}); COMP_CWORD={line.count(' ')}; _ocigpu ocigpu; echo ${{COMPREPLY[@]}}"
    done = debian("bash", "-c", f". /usr/share/bash-completion/completions/ocigpu; {ask}")
    assert expected <= set(done.stdout.split()), done.stdout


@pytest.mark.parametrize(("name", "command"), VENDOR_NAMES.items())
def test_the_vendors_names_are_a_package_of_their_own(
    debian: ScratchMachine, packages: Path, name: str, command: str
) -> None:
    assert os.readlink(debian.root / "usr/bin" / name) == command
    assert f"/usr/bin/{name}\n" not in debian("dpkg", "--listfiles", "ocigpu").stdout
    conflicts = run(["dpkg-deb", "--field", find(packages, "deb")[1], "Conflicts"]).stdout
    assert {"nvidia-container-toolkit", "libnvidia-container-tools"} <= set(conflicts.replace(",", "").split())


@pytest.mark.engine
@pytest.mark.parametrize(
    "way",
    [
        pytest.param(("--runtime=ocigpu", "--env=NVIDIA_VISIBLE_DEVICES=0,2"), id="our runtime"),
        pytest.param(("--runtime=nvidia", "--env=NVIDIA_VISIBLE_DEVICES=0,2"), id="the vendor's name of the runtime"),
        pytest.param(("--gpus", '"device=0,2"'), id="gpus"),
    ],
)
def test_docker_gives_gpus_with_the_installed_package(
    docker: Docker, simulated_host: SimulatedHost, way: tuple[str, ...]
) -> None:
    nodes = ["nvidia0", "nvidia2", *CONTROL_NODES]
    look = script(["nvidia-smi", "-L"], probe(["list", "/dev"], ["open", *(f"/dev/{name}" for name in nodes)]))
    listing, probed = parts(docker("run", "--rm", "--network=none", *way, IMAGE, *look).stdout)
    assert listed_uuids(listing) == [simulated_host.gpus[0], simulated_host.gpus[2]]
    seen = answers(probed)
    assert gpu_names(seen["list", "/dev"]) == sorted(nodes)
    assert {seen["open", f"/dev/{name}"] for name in nodes} == {"ENXIO"}


@pytest.mark.engine
def test_hooks_of_a_specification_that_names_nvidia_ctk(
    debian: ScratchMachine, docker: Docker, simulated_host: SimulatedHost
) -> None:
    output = "/etc/cdi/nvidia.yaml"
    debian("nvidia-ctk", "cdi", "generate", "--nvidia-ctk-path=/usr/bin/nvidia-ctk", f"--output={output}")
    text = (debian.root / output.lstrip("/")).read_text()
    assert "path: /usr/bin/nvidia-ctk\n" in text
    assert "ocigpu-hook" not in text
    asked = "--env=NVIDIA_VISIBLE_DEVICES=nvidia.com/gpu=1"
    listing = docker("run", "--rm", "--network=none", "--runtime=nvidia", asked, IMAGE, "nvidia-smi", "-L").stdout
    assert listed_uuids(listing) == [simulated_host.gpus[1]]
    shutil.rmtree(debian.root / "etc/cdi")


@pytest.mark.parametrize(
    ("need", "fits"),
    [
        ("nvidia-container-toolkit (>= 1.14)", True),
        ("nvidia-container-toolkit-base (>= 1.18.0-1)", True),
        ("nvidia-container-runtime (>= 3.5)", True),
        ("nvidia-container-toolkit (>= 2)", False),
    ],
)
def test_a_package_that_needs_a_release_of_the_vendors_is_content(
    debian: ScratchMachine, session_directory: Path, need: str, fits: bool
) -> None:
    tree = session_directory / "gate"
    (tree / "DEBIAN").mkdir(parents=True, exist_ok=True)
    control = "Package: gate\nVersion: 1\nArchitecture: all\nMaintainer: x <x@localhost>\nDescription: needs one\n"
    (tree / "DEBIAN/control").write_text(f"{control}Depends: {need}\n")
    run(["dpkg-deb", "--root-owner-group", "--build", tree, session_directory / "gate.deb"])
    done = debian("dpkg", "--install", session_directory / "gate.deb", check=False)
    debian("dpkg", "--purge", "gate")
    assert (done.returncode == 0) == fits, done.stderr


PAGES = (
    "KUBERNETES",
    "DRA",
    "MIG",
    *(f"tenants/{name}" for name in ("TENANTS", "FABRIC", "LEASES", "FIRMWARE", "CAAS")),
)
TYPED = sorted(
    {
        line
        for page in PAGES
        for line in re.findall(
            r"^ {4,}(?:\S+\$ |\$ )?((?:[A-Z_]+=\S+ )?ocigpu .*?)(?: {2,}#.*)?$",
            (REPOSITORY / f"docs/{page}.md").read_text(),
            re.MULTILINE,
        )
        if not line.startswith(
            ("ocigpu sim create", "ocigpu engine configure", "ocigpu vfio")
        )  # they change the machine
    }
)
NAMED = (
    "tenancy list", "doctor --claims", "fabric list --address grpc:tcp:127.0.0.1:9", "lease list", "device-plugin",
    "dra-driver --node-name n", "mig-manager --node-name n", "caas serve --insecure --listen 127.0.0.1:0",
    "exporter --kubernetes --address 127.0.0.1:0", "lease agent --node-name n", "tenancy controller",
)  # fmt: skip
"""What pages and the chart's pods name: all of them need libraries that the package ocigpu does not have."""
MISSING = re.compile(r"No module named|ocigpu-kubernetes|OCIGPU-PART|Traceback|no such (?:command|option)")


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        cluster.apply_manifests(REPOSITORY / "packaging/kubernetes/tenants.yaml")
        yield cluster


def test_with_the_second_package_everything_works_that_the_pages_for_clusters_type(
    debian: ScratchMachine, packages: Path, cluster: Cluster, session_directory: Path
) -> None:
    """Against an API server, as whoever reads docs/tenants/TENANTS.md and docs/KUBERNETES.md types it."""
    config = cluster.write_kubeconfig(session_directory / "kubeconfig-of-the-pages")
    typing = [word for word in debian.enter if word != "--net"]  # the server is on our loopback

    def type_(line: str) -> Completed:
        env = {**ENVIRONMENT, "KUBECONFIG": str(config), "NO_COLOR": "1"}
        return run([*typing, "timeout", "5", "sh", "-c", f"exec 2>&1; {line}"], env=env, check=False, timeout=100)

    before = set(debian.changes(*BOOKS))
    debian("dpkg", "--remove", "ocigpu-kubernetes")
    said = type_("ocigpu tenancy create landon --gpus 8").stdout
    assert "Install the package ocigpu-kubernetes of the same release, from its file." in said
    debian("dpkg", "--install", find(packages, "deb")[2])
    done = type_("ocigpu tenancy create landon --gpus 8")
    assert done.returncode == 0, done.stdout
    assert "8" in str(cluster.get("Tenancy", "landon")["spec"])
    assert len(TYPED) >= 10
    for line in (*TYPED, *(f"ocigpu {words}" for words in NAMED)):
        done = type_(line)
        print(f"$ {line}\n{done.stdout}", end="")
        assert not MISSING.search(done.stdout), line
    assert "landon" in type_("ocigpu tenancy show landon").stdout
    made = set(debian.changes(*BOOKS, "/usr/")) - before
    assert all(path.startswith(("/var/lib/kubelet", "/var/lib/ocigpu", "/etc/ocigpu")) for path in made), made
    debian("rm", "-r", "-f", *made)


def test_a_line_of_a_role_configures_docker_and_engine_remove_takes_it_back(debian: ScratchMachine) -> None:
    file = debian.root / "daemon.json"
    words = ("nvidia-ctk", "runtime", "configure", "--runtime=docker", "--set-as-default", f"--config=/{file.name}")
    done = debian(*words, "--dry-run")
    assert json.loads(done.stdout)["default-runtime"] == "nvidia"
    assert json.loads(done.stdout)["runtimes"] == {"nvidia": {"path": "nvidia-container-runtime"}}
    assert not (debian.root / file.name).exists()
    assert "Wrote updated config to /daemon.json" in debian(*words).stderr
    debian("ocigpu", "engine", "remove", "docker", "--config", "/daemon.json")
    assert not (debian.root / file.name).exists()


def test_an_upgrade_keeps_settings_and_choices_and_forgets_what_was_kept(
    debian: ScratchMachine, packages: Path
) -> None:
    settings = debian.root / "etc/ocigpu/config.toml"
    before = settings.read_bytes()
    debian("systemctl", "disable", "ocigpu-cdi-refresh.path")
    remembered = debian.root / "run/ocigpu/next-0-0"
    remembered.parent.mkdir(mode=0o700, exist_ok=True)
    remembered.touch()
    debian("dpkg", "--install", *find(packages, "deb"))
    assert settings.read_bytes() == before
    assert not remembered.exists()
    assert not os.path.lexists(debian.root / ENABLED[0].lstrip("/"))
    assert os.path.lexists(debian.root / ENABLED[1].lstrip("/"))


EXCHANGES = (NEXT, __version__, __version__)
"""What is installed in turn.  Each manager takes a part: the way there and back, or another copy of what is there."""


@pytest.mark.engine
def test_containers_start_while_dpkg_exchanges_versions(
    debian: ScratchMachine,
    packages: Path,
    next_packages: Callable[[str], Path],
    simulated_host: SimulatedHost,
    make_bundle: MakeBundle,
    runtime_environment: dict[str, str],
    share: Callable[..., list[str]],
) -> None:
    versions = share(EXCHANGES, 2, 0)
    files = {each: find(next_packages("deb") if each == NEXT else packages, "deb") for each in versions}
    with Starts("/usr/bin", simulated_host, make_bundle, runtime_environment, debian.enter) as starts:
        for version in versions:
            debian("dpkg", "--install", *files[version])
            assert debian("ocigpu", "--version").stdout == f"ocigpu {version}\n"
            starts.wait()
    assert debian("dpkg", "--verify", "ocigpu").stdout == ""


@pytest.mark.engine
def test_removing_is_refused_while_containers_need_it_and_takes_the_engines_back(
    debian: ScratchMachine, docker: Docker
) -> None:
    file = docker.socket.with_name("daemon.json")
    remove = ("dpkg", "--remove", "ocigpu-nvidia-names", "ocigpu-kubernetes", "ocigpu")
    done = debian(*remove, check=False)
    assert f'still needed: docker: the runtime "nvidia" of {file} is nvidia-container-runtime' in done.stderr
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | {"runtimes": {"ocigpu": settings["runtimes"]["ocigpu"]}}))
    docker("create", "--runtime=ocigpu", "--name=kept", "--network=none", IMAGE, "true")
    done = debian(*remove, check=False)
    assert "still needed: Docker's container kept, made with the runtime ocigpu" in done.stderr
    assert debian("ocigpu-runtime", "--version").returncode == 0
    docker("rm", "kept")
    done = debian(*remove)
    assert f"docker: removed from {file}" in done.stdout
    assert "ocigpu" not in json.loads(file.read_text()).get("runtimes", {})
    assert [path for path in debian.changes() if path.startswith("/usr/")] == []
    assert (debian.root / "etc/ocigpu/config.toml").exists()


def test_purging_leaves_nothing(debian: ScratchMachine) -> None:
    debian("dpkg", "--purge", "ocigpu-nvidia-names", "ocigpu-kubernetes", "ocigpu")
    assert debian.changes(*BOOKS, *DOCKERS) == []
    assert not (debian.root / "run/ocigpu").exists()
    assert "ocigpu" not in debian("dpkg-query", "--show").stdout


@pytest.mark.engine
def test_the_rpm_is_installed_used_upgraded_and_removed_without_a_trace(
    session_directory: Path,
    packages: Path,
    next_packages: Callable[[str], Path],
    simulated_host: SimulatedHost,
    make_bundle: MakeBundle,
    runtime_environment: dict[str, str],
    share: Callable[..., list[str]],
) -> None:
    requirements.require(requirements.root())
    directory = session_directory / "fedora"
    directory.mkdir()
    with scratch_machine(directory, hidden=REPOSITORY, shared=[session_directory]) as machine:
        rpm = ("rpm", "--nodeps", "--force-debian")  # the rest of this machine is not in rpm's books
        machine(*rpm, "--install", *find(packages, "rpm"))
        configure(machine, simulated_host)
        assert [path for path in machine.changes() if path.startswith(WANTED)] == list(ENABLED)
        assert simulated_host.gpus[0] in machine("ocigpu", "list", "--json").stdout
        assert machine("nvidia-cdi-hook", "--version").stdout.startswith(
            f"NVIDIA CDI Hook CLI version {VENDOR_VERSION}\n"
        )
        versions = share(EXCHANGES, 2, 1)
        files = {each: find(next_packages("rpm") if each == NEXT else packages, "rpm") for each in versions}
        with Starts("/usr/bin", simulated_host, make_bundle, runtime_environment, machine.enter) as starts:
            for version in versions:
                machine(*rpm, "--upgrade", "--force", "--oldpackage", *files[version])
                assert machine("ocigpu", "--version").stdout == f"ocigpu {version}\n"
                starts.wait()
        assert (machine.root / "etc/ocigpu/config.toml").exists()
        assert machine(*rpm, "--verify", "ocigpu", "ocigpu-nvidia-names", "ocigpu-kubernetes").stdout == ""
        machine(*rpm, "--erase", "ocigpu-nvidia-names", "ocigpu-kubernetes", "ocigpu")
        shutil.rmtree(machine.root / "etc/ocigpu")  # the operator's own
        assert machine.changes(*BOOKS) == []
        assert not (machine.root / "run/ocigpu").exists()


def test_the_fixed_versions_are_what_the_project_asks_for() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == [], "the wheel alone needs nothing"
    extras = project["optional-dependencies"]
    lists = {"cli": fixed_versions(""), "kubernetes": fixed_versions("-kubernetes")}
    assert not lists["cli"].keys() & lists["kubernetes"].keys(), "one package has each library"
    wrong = [
        requirement
        for part in ("cli", "kubernetes", "tenants", "postgresql")
        for known in ("cli" if part == "cli" else "kubernetes",)
        for requirement in map(Requirement, extras[part])
        if requirement.name != "ocigpu"
        if lists[known].get(canonicalize_name(requirement.name), "") not in requirement.specifier
    ]
    assert wrong == [], "make packaging/requirements*.txt anew: their first lines say how"
    builds = [
        Requirement(line)
        for line in tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["build-system"]["requires"]
    ]
    assert [each.name for each in builds if fixed_versions("-build").get(each.name, "") in each.specifier] == [
        "setuptools"
    ]


def fixed_versions(which: str) -> dict[str, str]:
    lines = (REPOSITORY / f"packaging/requirements{which}.txt").read_text().splitlines()
    return dict(line.rstrip(" \\").split("==") for line in lines if "==" in line)
