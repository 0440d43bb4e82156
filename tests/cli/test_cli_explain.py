"""Error codes: each is explained, and raised somewhere."""

import ast
import functools
import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from support.fixtures import Run

import ocigpu
from ocigpu.cli.containers.explain import find_code, read_examples, render_markdown
from ocigpu.core.codes import AREAS, CODES
from ocigpu.core.errors import UsageError, as_own_error
from ocigpu.core.facts import HostFacts

PACKAGE = Path(ocigpu.__file__).parent
PATH = PACKAGE / "core/codes.toml"


def codes_in_sources() -> set[str]:
    """Return every code in a string of a module, but for the table itself, and those of the stubs."""
    stubs = (PACKAGE.parent / "packaging").glob("*.sh")
    found = {code for path in stubs for code in re.findall(r"OCIGPU-[A-Z]+-[0-9]+", path.read_text())}
    for path in PACKAGE.rglob("*.py"):
        for item in ast.walk(ast.parse(path.read_text())):
            if (
                path.name != "codes.py"
                and isinstance(item, ast.Constant)
                and isinstance(item.value, str)
                and re.fullmatch(r"OCIGPU-[A-Z]+-[0-9]+", item.value)
            ):
                found.add(item.value)
    return found


def test_every_code_that_is_raised_is_in_the_table() -> None:
    named = {code for path in PACKAGE.rglob("*.py") for code in re.findall(r"OCIGPU-[A-Z]+-[0-9]+", path.read_text())}
    assert named - set(CODES) == set()


def test_every_code_of_the_table_is_raised_somewhere() -> None:
    assert set(CODES) - codes_in_sources() == set()


def test_codes_are_numbered_without_gaps_in_known_areas() -> None:
    numbers: dict[str, list[int]] = {}
    for code in CODES:
        _, area, number = code.split("-")
        numbers.setdefault(area, []).append(int(number))
    assert set(numbers) == set(AREAS)
    for area, found in numbers.items():
        assert found == list(range(1, len(found) + 1)), area


def test_codes_are_read_as_a_parser_of_toml_reads_them() -> None:
    with PATH.open("rb") as file:
        table = tomllib.load(file)
    assert table.pop("areas") == AREAS
    assert {name: (entry["cause"], entry["fix"]) for name, entry in table.items()} == CODES


def test_causes_and_fixes_are_sentences() -> None:
    for code, entry in CODES.items():
        assert entry.cause.endswith("."), code
        assert entry.fix, code
        assert "|" not in entry.cause + entry.fix, code  # a table cell


EXAMPLES = read_examples()
STUBS = " ".join(path.read_text() for path in sorted((PACKAGE.parent / "packaging").glob("*.sh")))


def templates(tree: ast.AST) -> list[str]:
    """Return the texts of a piece of a program as regular expressions: what is put into them may be anything."""
    inner = {id(part) for item in ast.walk(tree) if isinstance(item, ast.JoinedStr) for part in item.values}
    found = []
    for item in ast.walk(tree):
        parts = item.values if isinstance(item, ast.JoinedStr) else [item]
        texts = [part.value if isinstance(part, ast.Constant) else None for part in parts]
        if id(item) not in inner and any(isinstance(text, str) for text in texts):
            found.append("".join(".*" if text is None else re.escape(str(text)) for text in texts))
    return found


ELSEWHERE = {"SIM": "sim/", "KUBE": "kubernetes/", "NS": "provision/", "MNT": "provision/operations", "MIG": "mig"}
"""Where messages of an area are put together, when not beside its codes."""


@functools.cache
def said_by_the_program() -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Return the templates beside each code in the calls that name it, and those of the modules that name it."""
    beside: dict[str, list[str]] = {}
    around: dict[str, list[str]] = {}
    codes = set(CODES)
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        if path.name == "codes.py":
            continue
        tree = ast.parse(text)
        every = templates(tree)
        for call in (item for item in ast.walk(tree) if isinstance(item, ast.Call)):
            for code in {arg.value for arg in call.args if isinstance(arg, ast.Constant)} & codes:
                beside.setdefault(code, []).extend(
                    one for arg in call.args for one in templates(arg) if one != re.escape(code)
                )
        for code in CODES:
            if code in text or re.search(ELSEWHERE.get(code.split("-")[1], "$^"), str(path.relative_to(PACKAGE))):
                around.setdefault(code, []).extend(every)
    return beside, around


def words_of(template: str) -> int:
    """Return how many characters of a template are its own."""
    return len(re.sub(r"\\\\(.)", r"\\1", template.replace(".*", "")).strip())


BELOW = {"OCIGPU-ARG-1", "OCIGPU-CDI-3", "OCIGPU-ENG-1", "OCIGPU-INT-1", "OCIGPU-INT-3"}
"""Others say the words, see below."""


@pytest.mark.parametrize("code", CODES)
def test_every_code_has_a_paragraph_and_an_example_that_the_product_prints(code: str) -> None:
    assert len(EXAMPLES[code]["text"].split(". ")) >= 1
    assert EXAMPLES[code]["text"].endswith((".", ")"))
    example = EXAMPLES[code]["example"]
    beside, around = said_by_the_program()
    if any(re.fullmatch(one, example) and words_of(one) >= 4 for one in beside.get(code, ())):
        return
    assert any(re.search(one, example) and words_of(one) >= 10 for one in around.get(code, ())) or code in BELOW


PLAN = "plan --facts {facts} --devices"
RUN = {
    "ARG-1": "plna",
    "SET-1": "list --config /etc/ocigpu/gpus.toml",
    "SET-2": "list --config {tmp}/etc/ocigpu/config.toml",
    "SPEC-2": "plan --bundle {tmp}/run/bundle",
    "REQ-1": f"{PLAN} gpu0",
    "REQ-2": f"{PLAN} 0 --capabilities computer",
    "REQ-3": f"{PLAN} 0 -e NVIDIA_REQUIRE_CUDA=cuda>=12.6",
    "REQ-4": f"{PLAN} 0 -e NVIDIA_REQUIRE_CUDA=cuda>>12",
    "REQ-5": f"{PLAN} 0 -e NVIDIA_MIG_CONFIG_DEVICES=all",
    "REQ-6": f"{PLAN} 0 -e NVIDIA_IMEX_CHANNELS=x",
    "HOST-3": "plan --devices 0 --facts host.json",
    "DEV-1": f"{PLAN} 9",
    "CDI-1": "cdi show gpu0",
    "CDI-3": "cdi show {tmp}/etc/cdi/nvidia.json",
    "CDI-4": "plan --devices nvidia.com/gpu=4",
    "ENG-1": "engine configure docker --root {tmp}",
    "KUBE-4": "exporter --collectors {tmp}/etc/exporter/metrics.csv",
    "TRC-1": "trace /run/trace.jsonl",
}
"""Commands that fail with the example."""


@pytest.mark.parametrize("code", RUN)
def test_an_example_is_what_a_command_says(
    run: Run,
    record: Callable[[HostFacts], str],
    facts: HostFacts,
    code: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for path, text in {
        "host.json": "{}",
        "etc/ocigpu/config.toml": 'mdoe = "spec"',
        "etc/docker/daemon.json": '{\n "a": 1,\n oops\n}',
        "etc/exporter/metrics.csv": "DCGM_FI_DEV_GPU_TMP, gauge, x",
        "etc/cdi/nvidia.json": '{"cdiVersion":"0.5.0","kind":"nvidia.com/gpu","devices":'
        '[{"name":"0/1","containerEdits":{"env":["A=1"]}}],"x":1}',
        "run/bundle/config.json": '{"root":{"path":"rootfs"},"linux":{"Devices":[]}}',
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
        (tmp_path / path).chmod(0o644)
    monkeypatch.chdir(tmp_path)
    words = RUN[code].format(facts=record(facts), tmp=tmp_path).split()
    error = run(*words)[2].splitlines()[0].replace(str(tmp_path), "")
    assert error == f"ocigpu: OCIGPU-{code}: {EXAMPLES[f'OCIGPU-{code}']['example']}"


def test_examples_in_others_words_are_said() -> None:
    defect = EXAMPLES["OCIGPU-INT-1"]["example"]
    assert as_own_error(ZeroDivisionError("division by zero")).render("x").startswith(f"x: OCIGPU-INT-1: {defect}")
    assert "OCIGPU-INT-3: @interpreter@ or its library is missing" in STUBS
    assert EXAMPLES["OCIGPU-INT-3"]["example"].endswith(" or its library is missing")


@pytest.mark.parametrize("text", ["OCIGPU-DEV-1", "ocigpu-dev-1", "dev-1", " DEV-1 "])
def test_a_code_is_found_in_any_spelling(text: str) -> None:
    assert find_code(text) == "OCIGPU-DEV-1"


@pytest.mark.parametrize(
    ("text", "hint"),
    [("DEV-11", "OCIGPU-DEV-1"), ("OCIGPU-DVE-1", "OCIGPU-DEV-1"), ("hello", "all codes: ocigpu explain")],
)
def test_a_wrong_code_brings_near_ones(text: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        find_code(text)
    assert hint in str(caught.value.hint)


def test_explain_prints_cause_and_fix(run: Run) -> None:
    status, out, _ = run("explain", "SET-2")
    assert status == 0
    shown = " ".join(out.split())
    assert CODES["OCIGPU-SET-2"].cause in shown
    assert CODES["OCIGPU-SET-2"].fix in shown
    assert EXAMPLES["OCIGPU-SET-2"]["example"] in shown
    assert json.loads(run("explain", "SET-2", "--json")[1])["codes"][0]["code"] == "OCIGPU-SET-2"


def test_explain_without_a_code_lists_all(run: Run) -> None:
    out = run("explain")[1]
    assert [line.split()[0] for line in out.splitlines()[1:]] == list(CODES)
    assert [item["code"] for item in json.loads(run("explain", "--json")[1])["codes"]] == list(CODES)


def test_explain_prints_the_page(run: Run) -> None:
    assert run("explain", "--markdown") == (0, render_markdown(), "")
    assert re.findall(r"^### (.*)$", render_markdown(), re.MULTILINE) == list(CODES)
    assert run("explain", "--markdown", "DEV-1")[0] == 2
