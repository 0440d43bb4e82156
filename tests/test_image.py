"""The modules of the hot path in one file: they come from there, or from their sources where these are others."""

import marshal
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.product import REPOSITORY, STUBS, PublicCopy, make_public_copy, write_stub

SHOW = """
from ocigpu import runtime
from ocigpu.core import settings
print(type(settings.__spec__.loader).__name__, settings.__file__, settings.DEFAULT_PATH)
"""


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> PublicCopy:
    return make_public_copy(tmp_path_factory.mktemp("original") / "product", "sh")


@pytest.fixture(params=["sh"])
def product(original: PublicCopy, tmp_path: Path, request: pytest.FixtureRequest) -> PublicCopy:
    """A copy, with the times of its files, and with stubs that know where it is."""
    library, programs = tmp_path / "product/lib", tmp_path / "product/bin"
    shutil.copytree(original.library, library)
    programs.mkdir()
    for name in ("ocigpu-runtime", "ocigpu-hook"):
        write_stub(programs / name, request.param, library=library, site=library)
    return original._replace(library=library, runtime=programs / "ocigpu-runtime")


def image_of(product: PublicCopy) -> Path:
    (found,) = (product.library / "ocigpu/__pycache__").glob("hot.*")
    return found


def loaded(product: PublicCopy, stub: str = "ocigpu-runtime") -> list[str]:
    """Return by what a module is loaded when a stub's interpreter begins, its file, and a value of it."""
    text = product.runtime.with_name(stub).read_bytes()
    begin = re.search(rb"(import gc.*?)^try: from", text, re.DOTALL | re.MULTILINE)
    assert begin
    command = [sys.executable, "-I", "-S", "-B", "-c", begin[1].decode() + SHOW]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr.splitlines()[-1]
    return done.stdout.split()


@pytest.mark.parametrize("product", STUBS, indirect=True)
@pytest.mark.parametrize("stub", ["ocigpu-runtime", "ocigpu-hook"])
def test_modules_come_from_the_image(product: PublicCopy, stub: str) -> None:
    source = product.library / "ocigpu/core/settings.py"
    assert loaded(product, stub) == ["ModuleImage", str(source), "/etc/ocigpu/config.toml"]


def test_no_module_whose_types_are_read_is_in_the_image(product: PublicCopy) -> None:
    """It has no types: pydantic would take every field for None."""
    with image_of(product).open("rb") as file:
        first, modules = (marshal.loads(file.read(int.from_bytes(file.read(4), "big"))) for _ in range(2))
    assert first
    reading = {path for path in (product.library / "ocigpu").rglob("*.py") if "\nfrom pydantic" in path.read_text()}
    assert product.library / "ocigpu/gpus/nvidia/mig_layout.py" in reading
    assert not reading & {product.library / relative for relative, *_ in modules.values()}


def test_a_source_that_has_changed_counts(product: PublicCopy) -> None:
    source = product.library / "ocigpu/core/settings.py"
    source.write_text(source.read_text().replace('"/etc/ocigpu/config.toml"', '"/etc/another.toml"'))
    assert loaded(product) == ["SourceFileLoader", str(source), "/etc/another.toml"]


def test_a_module_without_its_source_is_not_loaded(product: PublicCopy) -> None:
    (product.library / "ocigpu/core/settings.py").unlink()
    with pytest.raises(AssertionError, match="ModuleNotFoundError"):
        loaded(product)


@pytest.mark.parametrize("content", [None, b"", b"\0" * 100, b"half"])
def test_without_a_readable_image_modules_come_from_their_sources(product: PublicCopy, content: bytes | None) -> None:
    image = image_of(product)
    if content is None:
        image.unlink()
    else:
        image.write_bytes(image.read_bytes()[:5000] if content == b"half" else content)
    assert loaded(product)[0] == "SourceFileLoader"


@pytest.mark.rest
def test_files_of_a_package_manager_have_its_times(product: PublicCopy) -> None:
    command = [sys.executable, "-I", "-S", REPOSITORY / "packaging/byte_code.py", product.library, product.library]
    subprocess.run(command, check=True, timeout=60)
    (product.library / "ocigpu/core/settings.py").touch()
    assert loaded(product)[0] == "ModuleImage"


def test_the_image_never_takes_the_place_of_a_standard_stream(product: PublicCopy) -> None:
    hook = product.runtime.with_name("ocigpu-hook")
    for closed in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-"):
        shown = "" if "2>" in closed else "OCIGPU-SPEC-5"
        done = subprocess.run(["sh", "-c", f'"$0" prestart {closed}', hook], capture_output=True, text=True, timeout=60)
        assert (done.returncode, shown in done.stderr) == (1, True), done.stderr
