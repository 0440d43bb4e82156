"""The interpreter that is kept started does what the ordinary one does: the same answers, files and containers."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest
import yaml
from support import requirements
from support.bundle import base_config
from support.engines import start_containerd, start_docker
from support.fixtures import IMAGE, MakeBundle
from support.podman import make_podman
from support.process import Completed, explain, run
from support.product import (
    REPOSITORY,
    STUBBED,
    PublicCopy,
    SimulatedHost,
    make_public_copy,
    make_simulated_host,
    write_stub,
)
from support.runtimes import container_id

sys.path.insert(0, str(REPOSITORY))

from fuzz.targets import TARGETS

pytestmark = [
    pytest.mark.rest,
    pytest.mark.root,
    pytest.mark.engine,
    pytest.mark.xdist_group("snapshot"),
    pytest.mark.timeout(900),
]

SNAPSHOT = REPOSITORY / "packaging/snapshot"
BUNDLES = sorted(path.parent for path in (REPOSITORY / "tests/bundles").glob("*/config.json"))
FULL = os.environ.get("OCIGPU_SECURITY") == "full"
PLAIN = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
INTERPRETER = os.path.realpath(sys.executable)


class Product(NamedTuple):
    """A copy of the product whose stubs have a snapshot, and what that is made of."""

    copy: PublicCopy
    made: Path

    @property
    def hook(self) -> Path:
        return self.copy.runtime.with_name("ocigpu-hook")

    @property
    def snapshot(self) -> Path:
        return self.copy.runtime.with_name("ocigpu-python")


def take(
    made: Path, target: Path, library: Path, stubs: Path, now: Path | None = None, python: str | Path = INTERPRETER
) -> None:
    """Make a snapshot of a library that will be at a path, and is at another now."""
    where = (library, now or library)
    for name in STUBBED:
        write_stub(stubs / f".{name}.sh", "sh", name, library=library, site=library, interpreter=python)
    done = run([SNAPSHOT / "take.sh", made, target, python, *where, *where, stubs])
    assert done.stderr == ""


@pytest.fixture(scope="session")
def product(session_directory: Path) -> Product:
    requirements.require(requirements.root(), requirements.programs("gcc", "musl-gcc"))
    # three minutes, unless it was built before
    made = Path(run([SNAPSHOT / "build.sh", INTERPRETER], timeout=900).stdout.strip())
    copy = make_public_copy(session_directory / "snapshot")
    programs = copy.runtime.parent
    shutil.copytree(os.path.dirname(yaml.__file__), copy.library / "yaml")
    take(made, programs / "ocigpu-python", copy.library, programs)
    for name in STUBBED:
        write_stub(programs / name, library=copy.library, site=copy.library, snapshot=programs / "ocigpu-python")
    return Product(copy, made)


def executed(product: Product, words: list[str | Path], environment: dict[str, str], trace: Path) -> list[str]:
    """Return the programs that a command executes, in order."""
    run(
        ["strace", "-f", "-qq", "-e", "trace=execve", "-e", "signal=none", "-o", trace, *words],
        env=environment,
        check=False,
    )
    return re.findall(r'execve\("([^"]+)"', trace.read_text())


def test_the_stub_starts_it_and_no_interpreter(product: Product, tmp_path: Path) -> None:
    words: list[str | Path] = [product.hook, "--version"]
    assert executed(product, words, PLAIN, tmp_path / "trace") == [str(product.hook), str(product.snapshot)]


@pytest.mark.parametrize(
    "variables",
    [
        pytest.param({"OCIGPU_NO_IMAGE": "1"}, id="switched off"),
        pytest.param({"LC_ALL": "de_DE.ISO-8859-1"}, id="LC_ALL"),
        pytest.param({"LC_CTYPE": "ja_JP.EUC-JP"}, id="LC_CTYPE"),
        pytest.param({"LANG": "en_US"}, id="LANG"),
    ],
)
def test_the_ordinary_interpreter_does_what_it_does_not(
    product: Product, tmp_path: Path, variables: dict[str, str]
) -> None:
    words: list[str | Path] = [product.hook, "--version"]
    found = executed(product, words, {**PLAIN, **variables}, tmp_path / "trace")
    assert (found[0], found[-1]) == (str(product.hook), INTERPRETER)


SWITCHED_OFF = pytest.mark.parametrize("line", ["no-snapshot = true", '"no-snap\\u0073hot" = true'])
STARTS = pytest.mark.parametrize(
    "start",
    [
        ["ocigpu-hook", "--config", "CONFIG", "prestart"],
        ["ocigpu-hook", "--early", "/nonexistent", "--config=CONFIG", "--bundle", "/", "prestart"],
        ["ocigpu-hook", "--config", "CONFIG", "create-symlinks", "--link", "a::b"],
        ["ocigpu-hook", "--config", "CONFIG", "--version"],
        ["ocigpu-runtime", "create", "--bundle", "BUNDLE", "c1"],
        ["ocigpu-runtime", "--version"],
        ["ocigpu-runtime", "kill", "c1"],
        ["ocigpu-container-cli", "info"],
    ],
    ids=lambda words: " ".join(words[-4:]),
)


@STARTS
@SWITCHED_OFF
def test_a_setting_does_without_it(
    product: Product,
    make_bundle: MakeBundle,
    simulated_host: SimulatedHost,
    tmp_path: Path,
    start: list[str],
    line: str,
) -> None:
    """Before the ordinary interpreter is executed, nothing is written, and nothing is read of standard input."""
    settings = tmp_path / "config.toml"
    runtimes = '[runtime]\nruntimes = ["/bin/true"]\n'
    settings.write_text(f"{simulated_host.settings.read_text()}\n{runtimes}[features]\n{line}\n")
    places = {"CONFIG": str(settings), "BUNDLE": str(make_bundle(["pause"], {"NVIDIA_VISIBLE_DEVICES": "0"}))}
    words = [re.sub("CONFIG|BUNDLE", lambda found: places[found[0]], word) for word in start]
    words[0] = str(product.copy.runtime.with_name(words[0]))
    environment = {**PLAIN, "OCIGPU_CONFIG": str(settings), "OCIGPU_TRACE": str(tmp_path / "start")}
    trace = tmp_path / "trace"
    run(["strace", "-f", "-s", "9999", "-o", trace, *words], env=environment, check=False)
    _, _, text = trace.read_text().partition(f'execve("{product.snapshot}", ')
    calls, executed, after = text.partition(f'execve("{INTERPRETER}", ')
    assert executed
    assert after.partition("], ")[0] == calls.partition("], ")[0], "another line than the snapshot got"
    for call in re.findall(r"^\d+ +(.*)$", calls, re.MULTILINE):
        assert not re.match(r"(p?writev?\d*|(mkdir|unlink|rename|link|symlink|mknod)\w*|fork)\(", call)
        assert not re.match(r"(p?readv?\d*|recv\w*)\(0,", call)
        assert not re.search(r"O_WRONLY|O_RDWR|O_CREAT", call)
    with_setting, ordinary = answers(words, env={"OCIGPU_CONFIG": str(settings)}, input=b"{}")
    assert with_setting == ordinary


@pytest.mark.parametrize("line", ["no-snapshot = false", "no-snapshot = 1", 'other = "\\\\"'])
def test_other_settings_are_no_reason_to_do_without(product: Product, tmp_path: Path, line: str) -> None:
    """Those that nobody can read neither: the snapshot says what is wrong with them."""
    settings = tmp_path / "config.toml"
    settings.write_text(f"[features]\n{line}\n")
    words: list[str | Path] = [product.hook, "--config", settings, "prestart"]
    assert executed(product, words, PLAIN, tmp_path / "trace")[-1] == str(product.snapshot)
    with_snapshot, ordinary = answers(words, input=b"{}")
    assert with_snapshot == ordinary
    assert ordinary[0] != 0


@pytest.mark.parametrize("variables", [{"LC_ALL": "C"}, {"LANG": "de_DE.UTF-8"}, {"LC_ALL": "", "LC_CTYPE": "C.utf8"}])
def test_names_in_utf_8_are_no_reason_to_do_without(
    product: Product, tmp_path: Path, variables: dict[str, str]
) -> None:
    words: list[str | Path] = [product.hook, "--version"]
    assert executed(product, words, {**PLAIN, **variables}, tmp_path / "trace")[-1] == str(product.snapshot)


def test_code_of_another_version_is_executed_by_the_ordinary_interpreter(product: Product) -> None:
    """By the version's directory, which is in the code, snapshot and stub know each other."""
    line = [INTERPRETER, "-I", "-S", "-c", "print('ordinary')", "ocigpu-hook", "--version"]
    done = subprocess.run(line, executable=product.snapshot, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ordinary\n", "")


def test_without_a_snapshot_the_stub_starts_the_interpreter(product: Product, tmp_path: Path) -> None:
    stub = write_stub(
        tmp_path / "ocigpu-hook", library=product.copy.library, site=product.copy.library, snapshot=tmp_path / "none"
    )
    assert run([stub, "--version"], env=PLAIN).stdout.startswith("ocigpu-hook ")


def test_two_snapshots_have_the_same_bytes_and_nothing_of_the_builder(product: Product, tmp_path: Path) -> None:
    """Wherever they are made.  Mappings and stacks are at random places, so no address of theirs is in it either."""
    texts = []
    for name in ("one", "other"):
        place = tmp_path / name / ("x" * 40 if name == "one" else "y")
        shutil.copytree(product.copy.library, place / "lib", ignore=shutil.ignore_patterns("__pycache__"))
        secret = {"HOME": "/home/secret-of-the-builder", "BUILDER": "secret-of-the-builder"}
        os.environ.update(secret)
        try:
            take(product.made, place / "snapshot", Path("/usr/lib/ocigpu/versions/1/library"), place, place / "lib")
        finally:
            del os.environ["BUILDER"]
            os.environ["HOME"] = "/root"
        texts.append((place / "snapshot").read_bytes())
    assert texts[0] == texts[1]
    places = (tmp_path, product.made, REPOSITORY, "/ocigpu/snapshot/")
    for word in (b"secret-of-the-builder", *map(os.fsencode, places)):
        assert word not in texts[0], word


def tree_id(made: Path | str) -> str:
    """Return the name of a package's version that has this snapshot, "" for none."""
    command = [REPOSITORY / "packaging/tree-id.sh", INTERPRETER, REPOSITORY / "packaging/deb", made]
    return run(command).stdout.strip()


def test_versions_with_different_snapshots_have_different_names(product: Product, tmp_path: Path) -> None:
    """A version's directory never changes, and is shared by packages that have the same."""
    other = shutil.copytree(product.made, tmp_path / "made")
    assert tree_id(other) == tree_id(product.made)
    with (other / "snapshot").open("ab") as file:
        file.write(b"\0")
    library = shutil.copytree(product.made, tmp_path / "library")
    (library / "library/json/__init__.py").write_text("")
    assert len({tree_id(made) for made in ("", product.made, other, library)}) == 4


def answers(words: list[str | Path], **options: object) -> list[tuple[int, bytes, bytes]]:
    """Return status, output and errors of a command, with the snapshot and with the ordinary interpreter."""
    found = []
    for switch in ("", "1"):
        environment = {**PLAIN, "OCIGPU_NO_IMAGE": switch, **options.get("env", {})}
        done = subprocess.run(words, capture_output=True, timeout=60, **{**options, "env": environment})
        found.append((done.returncode, done.stdout, done.stderr))
    return found


@pytest.mark.parametrize(
    "words",
    [
        ["--help"], ["--version"], ["help"], [], ["bogus"], ["--config"], ["--config", "/no/such/file", "prestart"],
        ["--config", "\udcff", "prestart"], ["prestart"], ["poststop"], ["create-symlinks", "--bogus"],
    ],
    ids=" ".join,
)  # fmt: skip
@pytest.mark.parametrize("state", [b"", b"{}", b'{"pid": 1, "bundle": "/nowhere"}', b"[" * 100_000])
def test_the_hook_says_the_same(product: Product, words: list[str], state: bytes) -> None:
    with_snapshot, ordinary = answers([product.hook, *words], input=state)
    assert with_snapshot == ordinary


@pytest.mark.parametrize(
    "words",
    [
        ["list"], ["list", "--libraries", "--compat32"], ["list", "--device=0", "--imex-channel=0"], ["info"],
        ["info", "--csv"], ["--root=/nowhere", "info"], ["--load-kmods", "info"],
        ["configure", "--device=all", "--pid=1", "/nowhere"],
        ["--help"], ["list", "--help"], ["-?"], ["--hel"], ["list", "--hel"], ["-V"], ["--vers"], ["-kV"], ["--usage"],
        ["-k", "list"], ["bogus"], [], ["info", "--bogus"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_the_container_cli_says_the_same(
    product: Product, simulated_host: SimulatedHost, words: list[str], tmp_path: Path
) -> None:
    program = product.copy.runtime.with_name("ocigpu-container-cli")
    environment = {"OCIGPU_CONFIG": str(simulated_host.settings), "LANGUAGE": "de"}
    with_snapshot, ordinary = answers([program, *words], env=environment)
    assert with_snapshot == ordinary
    if ordinary[0] == 0 and words[0] in ("list", "info") and "--help" not in words:
        found = executed(product, [program, *words], {**PLAIN, **environment}, tmp_path / "trace")
        assert found[:2] == [str(program), str(product.snapshot)]


@pytest.mark.parametrize("name", ["ELOOP", "ENAMETOOLONG", "ENOTDIR"])
def test_errors_have_the_words_of_the_systems_library(product: Product, tmp_path: Path, name: str) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    path = {"ELOOP": loop, "ENAMETOOLONG": tmp_path / ("x" * 300), "ENOTDIR": "/dev/null/x"}[name]
    with_snapshot, ordinary = answers([product.hook, "--config", path, "prestart"])
    assert with_snapshot == ordinary
    assert ordinary[0] != 0


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_closed_streams_are_no_difference(product: Product, closed: tuple[int, ...]) -> None:
    redirections = " ".join(f"{number}>&-" for number in closed)
    script = f'exec "$0" "$@" {redirections}'
    for words in (["prestart"], ["--version"], ["bogus"]):
        with_snapshot, ordinary = answers(["sh", "-c", script, str(product.hook), *words])
        assert with_snapshot == ordinary


def shown_signals(pid: int) -> dict[str, str]:
    text = Path(f"/proc/{pid}/status").read_text()
    masks = re.findall(r"^(Sig(?:Ign|Cgt|Blk)):\t(\w+)$", text, re.MULTILINE)
    return {name: f"{int(mask, 16) & 0x7FFFFFFF:x}" for name, mask in masks}  # above are those of the C libraries


@pytest.mark.parametrize("ignored", [(), (signal.SIGHUP,), (signal.SIGINT, signal.SIGTERM)])
def test_signals_are_handled_alike(product: Product, tmp_path: Path, ignored: tuple[int, ...]) -> None:
    """What the caller ignores stays ignored; SIGINT ends it as it ends Python."""
    found = []
    for switch in ("", "1"):
        fifo = tmp_path / f"fifo{switch}"
        os.mkfifo(fifo)

        def ignore() -> None:
            for number in ignored:
                signal.signal(number, signal.SIG_IGN)

        process = subprocess.Popen(
            [product.hook, "prestart"], stdin=subprocess.PIPE, stderr=subprocess.PIPE,
            preexec_fn=ignore,  # noqa: PLW1509 - there is one thread
            env={**PLAIN, "OCIGPU_NO_IMAGE": switch},
        )  # fmt: skip
        wait_until_it_reads(process.pid)
        shown = shown_signals(process.pid)
        process.send_signal(signal.SIGINT)
        if signal.SIGINT in ignored:
            process.kill()
        _, errors = process.communicate(timeout=30)
        found.append((shown, process.returncode, errors))
    assert found[0] == found[1]


def wait_until_it_reads(pid: int) -> None:
    """Wait until the process waits for the state on its standard input."""
    for _ in range(600):
        if "pipe_read" in Path(f"/proc/{pid}/wchan").read_text() or _reads(pid):
            return
        threading.Event().wait(0.02)
    raise AssertionError(Path(f"/proc/{pid}/stack").read_text())


def _reads(pid: int) -> bool:
    words = Path(f"/proc/{pid}/syscall").read_text().split()
    return words[:2] in (["0", "0x0"], ["63", "0x0"]) or words[0] in ("7", "73")


def make_root(directory: Path, bundle: Path) -> Path:
    """Copy a bundle's configuration, with a root directory of its own."""
    shutil.copytree(bundle, directory, ignore=shutil.ignore_patterns("case.json", "plan.json", "diff.json"))
    config = json.loads((directory / "config.json").read_text())
    if isinstance(config.get("root"), dict) and not os.path.isabs(config["root"].get("path", "")):
        for name in ("usr/lib/x86_64-linux-gnu", "etc", "dev", "proc", "sys", "bin"):
            (directory / config["root"]["path"] / name).mkdir(parents=True, exist_ok=True)
    return directory


def listing(directory: Path) -> dict[str, str]:
    """Return all that is below a directory, by path: what a link says, or a file has."""
    found = {}
    for path in sorted(directory.rglob("*")):
        name = str(path.relative_to(directory))
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif path.is_file():
            found[name] = path.read_bytes().hex()
        else:
            found[name] = oct(path.lstat().st_mode)
    return found


@pytest.mark.parametrize("mode", ["spec", "hook", "cdi"])
@pytest.mark.parametrize("bundle", BUNDLES, ids=[path.name for path in BUNDLES])
def test_every_bundle_is_edited_alike(
    product: Product, simulated_host: SimulatedHost, tmp_path: Path, bundle: Path, mode: str
) -> None:
    """The same config.json byte for byte, the same files, and the same words on both streams."""
    settings = tmp_path / "config.toml"
    text = simulated_host.settings.read_text()
    settings.write_text(f'mode = "{mode}"\n{text}\n[runtime]\nruntimes = ["/bin/true"]\n')
    found = []
    place = tmp_path / "bundle"
    for switch in ("", "1"):
        make_root(place, bundle)
        environment = {**PLAIN, "OCIGPU_CONFIG": str(settings), "OCIGPU_NO_IMAGE": switch}
        words = [product.copy.runtime, "create", "--bundle", place, "c1"]
        done = subprocess.run(words, env=environment, capture_output=True, timeout=60)
        errors = re.sub(rb'time="[^"]*"', b"", done.stderr)
        found.append((done.returncode, done.stdout, errors, without_path(listing(place))))
        shutil.rmtree(place)
    assert found[0] == found[1]


def without_path(files: dict[str, str]) -> dict[str, str]:
    """Take out the place where the hook waits, which is of one process: ocigpu/entry/prepared.py."""
    text = bytes.fromhex(files["config.json"])
    return {**files, "config.json": re.sub(rb"early-[0-9]+-[0-9a-f]+", b"early", text).hex()}


def test_a_start_with_nothing_kept_asks_nvml_by_the_ordinary_interpreter(
    product: Product, make_bundle: MakeBundle, tmp_path: Path
) -> None:
    """It can load no library: for that alone another process is started, and the container gets its GPUs."""
    host = make_simulated_host(tmp_path / "host", 8)
    settings = tmp_path / "config.toml"
    settings.write_text(f'{host.settings.read_text()}\n[runtime]\nruntimes = ["/bin/true"]\n')
    bundle = make_bundle(["pause"], {"NVIDIA_VISIBLE_DEVICES": "all"})
    environment = {**PLAIN, "OCIGPU_CONFIG": str(settings)}
    words: list[str | Path] = [product.copy.runtime, "create", "--bundle", bundle, "c1"]
    found = executed(product, words, environment, tmp_path / "trace")
    assert found.count(INTERPRETER) == 1
    assert found[-1] == "/bin/true"
    rules = json.loads((bundle / "config.json").read_text())["linux"]["resources"]["devices"]
    assert sum(rule["allow"] for rule in rules) >= 8


@pytest.mark.timeout(7200)
def test_thousands_of_starts_have_one_answer(product: Product) -> None:
    """From several threads at once: no hang, no crash, no other answer; of the hook, and of a shim that refuses."""
    wrong: list[str] = []
    refused = [product.copy.runtime, "create", "--bundle", "/nonexistent", "c1"]
    commands: list[list[str | Path]] = [[product.hook, "--version"], refused]
    expected = [answers(words)[1] for words in commands]
    assert [status for status, _, _ in expected] == [0, 1]

    def start() -> None:
        for number in range(25_000 if FULL else 500):
            words = commands[number % 2]
            done = subprocess.run(words, env=PLAIN, capture_output=True, timeout=60)
            if (done.returncode, done.stdout, done.stderr) != expected[number % 2]:
                wrong.append(f"{done.returncode} {done.stderr!r}")

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("limit", ["-d 16384", "-v 49152"])
def test_where_it_has_no_room_the_ordinary_interpreter_starts(product: Product, tmp_path: Path, limit: str) -> None:
    words: list[str | Path] = ["sh", "-c", f'ulimit {limit}; exec "$0" --version', product.hook]
    assert executed(product, words, PLAIN, tmp_path / "trace")[-1] == INTERPRETER


@pytest.mark.parametrize("kibibytes", [256, 1024, 8192])
def test_a_small_stack_is_enough_for_a_deep_document(product: Product, kibibytes: int) -> None:
    script = f'ulimit -s {kibibytes}; exec "$0" prestart'
    with_snapshot, ordinary = answers(["sh", "-c", script, product.hook], input=b"[" * 100_000)
    assert with_snapshot == ordinary
    assert b"nested too deeply" in ordinary[2]


@pytest.mark.parametrize("words", [[], ["--version"], ["-I", "-S", "-c", "code", "a", "b"]])
def test_called_by_hand_it_is_the_ordinary_interpreter(product: Product, words: list[str]) -> None:
    done = subprocess.run([product.snapshot, *words], capture_output=True, timeout=10, input=b"")
    ordinary = subprocess.run([INTERPRETER, *words], capture_output=True, timeout=10, input=b"")
    assert done.returncode == ordinary.returncode
    assert done.stdout == ordinary.stdout


SPECIFICATION = """\
cdiVersion: "0.6.0"
kind:\tnvidia.com/gpu
devices:
- name: "0"
  containerEdits:
    env:
    - A=1\t# a comment
"""


@pytest.mark.parametrize(
    "change",
    [
        ("", ""), ("A=1", "A=\\ud800"), ("A=1", '"\\U00110000"'), ("devices:", "devices: ["), ("0.6.0", "9.9.9"),
        ("- name", "- &a name"), ("kind:", "kind: &a"),
    ],
)  # fmt: skip
def test_specifications_in_yaml_are_read_alike(
    product: Product, make_bundle: MakeBundle, simulated_host: SimulatedHost, tmp_path: Path, change: tuple[str, str]
) -> None:
    """PyYAML's own reader refuses what libyaml, which the ordinary interpreter has, accepts."""
    (tmp_path / "cdi").mkdir()
    (tmp_path / "cdi/one.yaml").write_text(SPECIFICATION.replace(*change) if change[0] else SPECIFICATION)
    settings = tmp_path / "config.toml"
    text = simulated_host.settings.read_text()
    more = f'[runtime]\nruntimes = ["/bin/true"]\n[cdi]\nspec-dirs = ["{tmp_path}/cdi"]\n'
    settings.write_text(f'mode = "cdi"\n{text}\n{more}')
    found = []
    for _ in range(2):
        bundle = make_bundle(["pause"], {"NVIDIA_VISIBLE_DEVICES": "nvidia.com/gpu=0"})
        words = [product.copy.runtime, "create", "--bundle", bundle, "c1"]
        done = answers(words, env={"OCIGPU_CONFIG": str(settings)})[len(found)]
        errors = re.sub(rb'time="[^"]*"', b"", done[2]).replace(os.fsencode(bundle), b"")
        found.append((done[0], done[1], errors))
    assert found[0] == found[1]
    assert change[0] or found[0][0] == 0


def test_a_specification_in_yaml_needs_the_ordinary_interpreter(
    product: Product, make_bundle: MakeBundle, simulated_host: SimulatedHost, tmp_path: Path
) -> None:
    """Where that is gone, the message says so, and names it."""
    python = tmp_path / "python3"
    python.symlink_to(INTERPRETER)
    programs = tmp_path / "bin"
    programs.mkdir()
    take(product.made, programs / "ocigpu-python", product.copy.library, programs, python=python)
    values = {"library": product.copy.library, "site": product.copy.library, "interpreter": python}
    shim = write_stub(programs / "ocigpu-runtime", **values, snapshot=programs / "ocigpu-python")
    python.unlink()
    specification = tmp_path / "cdi/one.yaml"
    specification.parent.mkdir()
    specification.write_text(SPECIFICATION)
    settings = tmp_path / "config.toml"
    more = f'[runtime]\nruntimes = ["/bin/true"]\n[cdi]\nspec-dirs = ["{tmp_path}/cdi"]\n'
    settings.write_text(f'mode = "cdi"\n{simulated_host.settings.read_text()}\n{more}')
    bundle = make_bundle(["pause"], {"NVIDIA_VISIBLE_DEVICES": "nvidia.com/gpu=0"})
    done = run([shim, "create", "--bundle", bundle, "c1"], env={**PLAIN, "OCIGPU_CONFIG": str(settings)}, check=False)
    assert done.returncode == 1
    cause = f"{specification}: it is YAML, which the ordinary Python reads: {python}: No such file or directory"
    assert cause in done.stderr


Inside = Callable[..., Completed]
"""Runs a command in a container that sees the product's directory; returns how it went."""


@contextmanager
def in_docker(product: Product, directory: Path, image: Path, _rootfs: Path) -> Iterator[Inside]:
    requirements.require(requirements.programs("dockerd", "docker", "containerd", "runc"))
    place = product.copy.library.parent
    options = ["run", "--rm", "--network", "none", "--volume", f"{place}:{place}:ro", IMAGE]
    with start_docker(directory / "snapshot-docker", image, {}, {}) as docker:
        yield lambda *words: docker(*options, *words, check=False)


@contextmanager
def in_containerd(product: Product, directory: Path, image: Path, _rootfs: Path) -> Iterator[Inside]:
    requirements.require(requirements.programs("containerd", "ctr", "runc"))
    place = product.copy.library.parent
    with start_containerd(directory / "snapshot-containerd", image, {}, {}, sandbox_image=IMAGE) as engine:
        options = ["--rm", "--snapshotter", engine.snapshotter, "--fifo-dir", f"{engine.directory}/fifo", "--seccomp"]
        options += ["--mount", f"type=bind,src={place},dst={place},options=rbind:ro", IMAGE]
        yield lambda *words: engine("run", *options, container_id(), *words, check=False)


@contextmanager
def in_podman(product: Product, directory: Path, _image: Path, rootfs: Path) -> Iterator[Inside]:
    podman, place = make_podman(directory / "snapshot-podman", ""), product.copy.library.parent
    yield lambda *words: podman.run_rootfs("runc", [], rootfs, words, f"--volume={place}:{place}:ro")


@pytest.mark.parametrize("enter", [in_docker, in_containerd, in_podman])
def test_it_starts_under_the_seccomp_profile_of_containers(
    product: Product,
    session_directory: Path,
    image: Path,
    rootfs: Callable[[str], Path],
    enter: Callable[[Product, Path, Path, Path], AbstractContextManager[Inside]],
) -> None:
    with enter(product, session_directory, image, rootfs("busybox")) as inside:
        found = inside("sh", "-c", "grep Seccomp: /proc/self/status")
        assert found.stdout.split() == ["Seccomp:", "2"], explain(found)
        for program in (product.hook, product.copy.runtime):
            # no Python is in the image: what answers is the snapshot
            done = inside(str(program), "--version")
            assert done.stdout.startswith(f"{program.name} "), explain(done)
        done = inside("sh", "-c", f"{product.hook} prestart 2>&1 </dev/null")
        assert "OCIGPU-" in done.stdout, explain(done)


class Reader(NamedTuple):
    """What shim and hook read: inputs of a target of fuzz/, as a file below the test's directory."""

    target: str
    file: str
    mode: str = "spec"
    request: str = "all"


READERS = (
    Reader("state", "state", request="void"),
    Reader("config", "bundle/config.json"),
    Reader("config", "bundle/config.json", "hook"),
    Reader("settings", "config.toml", request="void"),
    Reader("cdi-json", "cdi/one.json", "cdi", "nvidia.com/gpu=0"),
    Reader("cdi-yaml", "cdi/one.yaml", "cdi", "nvidia.com/gpu=0"),
    Reader("ld-cache", "bundle/root/etc/ld.so.cache"),
    Reader("loader", "bundle/root/etc/ld.so.conf"),
    Reader("elf", "bundle/root/usr/local/cuda/compat/libcuda.so.575.57.08"),
    Reader("elf", "host/usr/lib/x86_64-linux-gnu/libcuda.so.550.163.01"),
    Reader("host-ld-cache", "host/etc/ld.so.cache"),
    Reader("proc", "host/proc/devices"),
    Reader("proc", "host/proc/driver/nvidia/version"),
    Reader("proc", "host/proc/driver/nvidia/params"),
    Reader("proc", "host/proc/driver/nvidia-caps/mig-minors", "hook"),
    Reader("proc", "host/proc/driver/nvidia/gpus/0000:01:00.0/information", "hook"),
)
CORPUS = REPOSITORY / "fuzz/corpus"
APART = 'mount --bind "$0" "$0" && mount -o remount,bind,ro / && exec "$@"'
"""Settings and configurations name files to write; of those only the test's own can be written."""


LITTLE = (b"", b"0", b"-1", b"a", b" ", b"\n", b'"', b"\0", b"\xff", b"\xc3\xa9", b"\xf0\x9f\x92\xa9")


def damaged(usual: bytes, seeds: list[bytes], words: tuple[str, ...], random: Random) -> bytes:
    """Return a seed with some places overwritten, cut out or repeated, with words put in, or with another's end.

    Of every second one it is the usual input, which is accepted.
    """
    data = bytearray(random.choice([usual, random.choice(seeds)]))
    for _ in range(random.choice([0, 1, 1, 1, 2, 4])):
        at, other = random.randrange(len(data) + 1), random.choice(seeds)
        text = random.choice([random.choice(words).encode(), random.choice(LITTLE), bytes(data[at : at + 40])])
        end = at + random.choice([0, 1, len(text), 40])
        data[at:end] = other[random.randrange(len(other) + 1) :] if random.random() < 0.1 else text
    return bytes(data)


def forget() -> None:
    """Take away what starts have kept for the next one; processes that wait for a hook take theirs away as well."""
    for kept in Path("/run/ocigpu").iterdir():
        if kept.is_dir():
            shutil.rmtree(kept, ignore_errors=True)
        else:
            kept.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def few_gpus(session_directory: Path) -> SimulatedHost:
    """A host whose files a test may damage, and then puts right."""
    return make_simulated_host(session_directory / "damaged-host", 2)


def stays_inside(config: bytes) -> bool:
    """Tell whether a configuration, if it can be read, names a root directory inside of the bundle."""
    try:
        path = json.loads(config)["root"]["path"]
        return not os.path.isabs(path) and ".." not in path
    except (ValueError, LookupError, TypeError):
        return True


@pytest.mark.parametrize(
    "reader", READERS, ids=lambda reader: f"{reader.target}-{reader.file.rpartition('/')[2]}-{reader.mode}"
)
def test_damaged_inputs_are_read_alike(
    product: Product, few_gpus: SimulatedHost, tmp_path: Path, reader: Reader
) -> None:
    """Status, both streams, and every file that is written: whatever engines, images and the host's files say."""
    bundle, template, settings = tmp_path / "bundle", tmp_path / "template", tmp_path / "config.toml"
    for name in ("usr/lib/x86_64-linux-gnu", "usr/local/cuda/compat", "etc", "dev", "proc", "sys", "bin"):
        (template / "root" / name).mkdir(parents=True)
    config = base_config(["true"], {"NVIDIA_VISIBLE_DEVICES": reader.request})
    (template / "config.json").write_text(json.dumps({**config, "root": {"path": "root"}}))
    more = f'[runtime]\nruntimes = ["/bin/true"]\n[cdi]\nspec-dirs = ["{tmp_path}/cdi"]\n'
    usual = f"{few_gpus.settings.read_text()}\n{more}"
    settings.write_text(f'mode = "{reader.mode}"\n{usual}')
    (tmp_path / "host").symlink_to(few_gpus.directory)
    target = tmp_path / reader.file
    accepted = {
        "state": f'{{"ociVersion": "1.0.2", "id": "c1", "pid": 1, "bundle": "{bundle}"}}',
        "config": (template / "config.json").read_text(),
        "settings": 'mode = "spec"\n[features]\nno-procfs-view = true\n',
        "cdi-json": json.dumps(yaml.safe_load(SPECIFICATION.replace("\t", " "))),
        "cdi-yaml": SPECIFICATION,
    }
    state = tmp_path / "state"
    state.write_text(accepted["state"])
    own = target.read_bytes() if target.exists() else accepted.get(reader.target, "").encode()
    seeds = [path.read_bytes() for path in sorted((CORPUS / reader.target).iterdir())]
    words = [product.copy.runtime, "create", "--bundle", bundle, "c1"]
    if reader.request == "void":  # no runtime is executed for it, whatever the settings say
        words = [product.hook, "--config", settings, "prestart"]
    command = ["unshare", "--mount", "sh", "-c", APART, tmp_path, *words]
    random = Random(reader.file + reader.mode)
    for _ in range(400 if FULL else 20):
        data = damaged(own, seeds, TARGETS[reader.target].words, random)
        if reader.target == "config" and not stays_inside(data):
            continue
        found = []
        for switch in ("", "1"):
            shutil.rmtree(bundle, ignore_errors=True)
            shutil.copytree(template, bundle)
            forget()
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(data)
            environment = {**PLAIN, "OCIGPU_CONFIG": str(settings), "OCIGPU_NO_IMAGE": switch}
            done = subprocess.run(command, env=environment, input=state.read_bytes(), capture_output=True, timeout=60)
            errors = re.sub(rb'time="[^"]*"', b"", done.stderr)
            found.append((done.returncode, done.stdout, errors, without_path(listing(bundle))))
        if b"Illegal trailing comma" in found[0][2] and sys.version_info < (3, 13):  # older ones say what is behind it
            found = [(status, output, b"", files) for status, output, _, files in found]
        assert found[0] == found[1], data
    if reader.file.startswith("host/"):
        target.write_bytes(own)


def test_it_needs_little_memory(product: Product) -> None:
    """It starts where a process may have 64 MiB of addresses, and writes to less than half a MiB of them."""
    script = 'ulimit -v 65536; exec "$@"'
    assert run(["sh", "-c", script, "sh", product.hook, "--help"], env=PLAIN).stdout.startswith("usage: ocigpu-hook")
    process = subprocess.Popen([product.hook, "prestart"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, env=PLAIN)
    wait_until_it_reads(process.pid)
    rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    process.communicate(timeout=30)
    written = re.search(r"^Anonymous: +(\d+) kB$", rollup, re.MULTILINE)
    assert written
    assert int(written[1]) < 512
