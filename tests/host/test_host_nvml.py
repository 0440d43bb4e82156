import json
import os
import select
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import machine

from ocigpu.core.errors import UNUSABLE
from ocigpu.gpus.nvidia.nvml import BRANDS, NvmlAnswer, cuda_version, parse_answer, start_nvml
from ocigpu.gpus.tree import Roots

REAL = Roots("", "", "/proc", "/sys", False)


def ask(library: Path, seconds: float = 60.0, roots: Roots = REAL) -> NvmlAnswer:
    return start_nvml(str(library), roots, seconds).collect()


@pytest.fixture
def readable(tmp_path: Path, fake_nvml: Callable[..., Path]) -> Callable[..., Path]:
    """The fake library where an unprivileged child can reach it: pytest's own directories are closed to others."""
    directory = Path(f"/tmp/{machine.NAME}-nvml")
    directory.mkdir(exist_ok=True)
    directory.chmod(0o755)
    made = []

    def place(*macros: str) -> Path:
        target = directory / f"{len(made)}.so"
        target.write_bytes(fake_nvml(*macros).read_bytes())
        target.chmod(0o755)
        made.append(target)
        return target

    yield place
    for path in made:
        path.unlink()
    directory.rmdir()


def test_every_gpu_is_described(readable: Callable[..., Path]) -> None:
    answer = ask(readable())
    assert (answer.problem, answer.driver_version, answer.cuda_version) == ("", "550.163.01", "12.4")
    first, second = answer.gpus
    assert (first.index, first.minor, first.uuid) == (0, 1, "GPU-00000000-0000-0000-0000-000000000000")
    assert (first.bus_id, first.model, first.brand, first.architecture) == (
        "00000000:10:00.0",
        "Fake GPU",
        "Tesla",
        "9.0",
    )
    assert (first.mig_capable, first.mig_enabled, first.error) == (False, False, "")
    assert (second.index, second.minor) == (1, 0)


@pytest.mark.parametrize(
    ("macros", "expected"),
    [((), [False, False]), (("ADDRESSING=2",), [True, False]), (("ADDRESSING=1",), [False, False])],
    ids=["no such function", "ATS and none", "HMM and none"],
)
def test_gpus_with_coherent_memory_are_those_in_the_addressing_mode_ats(
    readable: Callable[..., Path], macros: tuple[str, ...], expected: list[bool]
) -> None:
    assert [gpu.coherent for gpu in ask(readable(*macros)).gpus] == expected


def test_a_lost_gpu_hides_no_other(readable: Callable[..., Path]) -> None:
    answer = ask(readable("GPUS=3", "LOST=1", "HALF=2"))
    assert [gpu.error for gpu in answer.gpus] == ["", "GPU is lost (NVML 15)", "GPU is lost (NVML 15)"]
    assert answer.gpus[2].bus_id == "00000000:12:00.0"


def test_mig_devices_after_a_hole_are_found_and_a_failing_one_is_noted(readable: Callable[..., Path]) -> None:
    answer = ask(readable("MIG=1"))
    assert [gpu.mig_enabled for gpu in answer.gpus] == [False, True]
    assert [(mig.index, mig.gpu_instance, mig.compute_instance, mig.profile) for mig in answer.gpus[1].mig_devices] == [
        (0, 7, 0, "1g.10gb"),
        (2, 9, 0, "1g.10gb"),
    ]
    assert answer.notes == ("GPU 1: MIG device 3: Some error (NVML 999)",)


def test_a_failing_initialisation_is_told_with_its_code(readable: Callable[..., Path]) -> None:
    answer = ask(readable("INIT=18"))
    assert answer.code == 18
    assert answer.problem == "NVML cannot be initialised: Driver/library version mismatch (NVML 18)"


def test_a_crash_of_the_library_is_told(readable: Callable[..., Path]) -> None:
    assert ask(readable("CRASH")).problem == "NVML crashed: the library ended its process by signal 11"


def test_a_library_that_hangs_is_killed_at_the_deadline(readable: Callable[..., Path]) -> None:
    child = start_nvml(str(readable("HANG")), REAL, 0.3)
    assert child.collect().problem == "NVML did not answer within 0.3 s"  # it never does: that this ends is the test
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_a_child_that_is_given_up_leaves_no_process(readable: Callable[..., Path]) -> None:
    start_nvml(str(readable("HANG")), REAL).close()
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_the_child_ends_with_its_parent(readable: Callable[..., Path]) -> None:
    library = readable("HANG")
    reader, writer = os.pipe()
    held, release = os.pipe()
    middle = os.fork()
    if middle == 0:
        try:
            os.close(release)
            child = start_nvml(str(library), REAL)
            os.write(writer, str(child.child.pid).encode())
            os.read(held, 1)  # until the other end is closed
        finally:
            os._exit(0)
    pidfd = os.pidfd_open(int(os.read(reader, 20)))
    os.close(release)
    os.waitpid(middle, 0)
    ready = select.select([pidfd], [], [], 60)[0]
    for descriptor in (reader, writer, held, pidfd):
        os.close(descriptor)
    assert ready


def test_a_missing_library_is_told(tmp_path: Path) -> None:
    problem = ask(tmp_path / "none.so").problem
    assert problem.startswith(f"NVML cannot be loaded: {tmp_path}/none.so: cannot open shared object file")


def test_what_the_library_prints_goes_nowhere(readable: Callable[..., Path], capfd: pytest.CaptureFixture[str]) -> None:
    assert ask(readable("NOISE")).problem == ""
    assert capfd.readouterr() == ("", "")


def test_no_descriptor_is_left_open(readable: Callable[..., Path]) -> None:
    library = readable()
    ask(library)
    before = os.listdir("/proc/self/fd")
    ask(library)
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.root
@pytest.mark.parametrize("mode", [0o666, 0o660, 0o600])
def test_the_library_runs_without_privileges(
    readable: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: int
) -> None:
    from ocigpu.gpus.nvidia import nvml_child

    node = tmp_path / "nvidiactl"
    node.touch()
    node.chmod(mode)
    os.chown(node, 1234, 5678)
    stat = os.stat
    monkeypatch.setattr(
        nvml_child.os, "stat", lambda path, **options: stat(node if path == "/dev/nvidiactl" else path, **options)
    )
    monkeypatch.setenv("HOME", "/root")
    monkeypatch.setattr("ocigpu.gpus.nvidia.nvml.is_version", lambda _: True)
    user, group = {0o666: (65534, 65534), 0o660: (65534, 5678), 0o600: (1234, 5678)}[mode]
    assert ask(readable("WHO")).driver_version == f"{user},{group},0000000000000000,1,0"


@pytest.mark.root
def test_a_driver_root_with_nodes_is_entered(fake_nvml: Callable[..., Path]) -> None:
    """The child must find the library by its path below the driver root, links meant for it included."""
    root = Path(f"/tmp/{machine.NAME}-root")
    (root / "opt").mkdir(parents=True)
    (root / "opt/nvml.so").write_bytes(fake_nvml().read_bytes())
    (root / "nvml.so").symlink_to("/opt/nvml.so")  # only right after chroot
    try:
        answer = ask(Path("/nvml.so"), roots=Roots(str(root), str(root), "/proc", "/sys", False))
        assert (answer.problem, len(answer.gpus)) == ("", 2)
        outside = ask(Path("/nvml.so"), roots=Roots(str(root), "", "/proc", "/sys", False))
        assert outside.problem.startswith("NVML cannot be loaded")
    finally:
        shutil.rmtree(root)


@pytest.mark.parametrize(("number", "text"), [(12040, "12.4"), (13000, "13.0"), (12100, "12.10"), (0, ""), (-1, "")])
def test_cuda_versions_are_written_with_whole_minors(number: int, text: str) -> None:
    assert cuda_version(number) == text


def test_brands_are_numbered_as_in_nvml_h() -> None:
    import pynvml

    assert BRANDS.index("Tesla") == pynvml.NVML_BRAND_TESLA
    assert BRANDS.index("GeForce") == pynvml.NVML_BRAND_GEFORCE
    assert BRANDS.index("Nvidia") == pynvml.NVML_BRAND_NVIDIA
    assert BRANDS.index("TitanRTX") == pynvml.NVML_BRAND_TITAN_RTX


def test_control_characters_of_the_library_are_escaped() -> None:
    data = {"init": 0, "driver": "550.1", "cuda": -1, "gpus": [{"index": 0, "name": "a\x1b[2J", "error": "x\ny"}]}
    gpu = parse_answer(data).gpus[0]
    assert (gpu.model, gpu.error) == ("a\\x1b[2J", "x\\ny")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["init", "gpus", "driver", "cuda", "index", "mig", "migs", "arch"]), inner)
    ),
    max_leaves=12,
)


@given(json_values)
def test_nonsense_from_the_child_is_an_error_that_is_caught(value: object) -> None:
    try:
        parse_answer(json.loads(json.dumps(value)))
    except UNUSABLE:
        return
