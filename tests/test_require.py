"""Requirement expressions: grammar, comparison, messages, bounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ocigpu.core.errors import RequestError
from ocigpu.core.facts import Gpu, HostFacts
from ocigpu.gpus.nvidia.require import MAX_EXPRESSION, check_requirements, parse_requirement

A100 = Gpu(0, 0, "GPU-a", "00000000:3b:00.0", brand="Tesla", architecture="8.0")
RTX = Gpu(1, 1, "GPU-b", "00000000:5e:00.0", brand="Quadro RTX", architecture="7.5")
UNREAD = Gpu(2, 2, "GPU-c", "00000000:86:00.0")
FACTS = HostFacts(driver_version="550.163.01", cuda_version="12.4", gpus=(A100, RTX))
IMAGE = (
    "cuda>=12.6 brand=unknown,driver>=470,driver<471"
    " brand=grid,driver>=470,driver<471 brand=tesla,driver>=470,driver<471"
    " brand=nvidia,driver>=470,driver<471 brand=quadro,driver>=470,driver<471 brand=tesla,driver>=550,driver<551"
)


def outcome(text: str, gpus: tuple[Gpu, ...], facts: HostFacts) -> str:
    """Return "" or the code of the error, whose message must be one clean line."""
    try:
        check_requirements((("NVIDIA_REQUIRE_CUDA", text),), facts, gpus)
        return ""
    except RequestError as caught:
        error = caught
    assert error.message.isprintable()
    assert len(error.message) < 1000
    return error.code


def holds(text: str, gpus: tuple[Gpu, ...] = (A100,), facts: HostFacts = FACTS) -> bool:
    code = outcome(text, gpus, facts)
    assert code in ("", "OCIGPU-REQ-3")
    return code == ""


def message(text: str, gpus: tuple[Gpu, ...] = (A100,), facts: HostFacts = FACTS) -> str:
    with pytest.raises(RequestError) as caught:
        check_requirements((("NVIDIA_REQUIRE_CUDA", text),), facts, gpus)
    assert caught.value.code == "OCIGPU-REQ-3"
    return caught.value.message


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cuda>=12.4", True),
        ("cuda>=12.5", False),
        ("cuda>12.4", False),
        ("cuda>12.3", True),
        ("cuda<=12.4", True),
        ("cuda<12.4", False),
        ("cuda<12.10", True),
        ("cuda=12.4", True),
        ("cuda=12.4.0.0", True),
        ("cuda=12.04", True),
        ("cuda=12", False),
        ("cuda>=12", True),
        ("cuda!=12.4", False),
        ("cuda!=12.5", True),
        ("CUDA>=12.4", True),
        ("driver>=550.163.1", True),
        ("driver>550.163", True),
        ("driver<551", True),
        ("driver>=1000", False),
        ("driver>=99", True),
        ("driver<" + "9" * 20_000, True),
        ("driver>" + "0" * 20_000 + "5", True),
        ("arch=8.0", True),
        ("arch=8", True),
        ("arch>=9", False),
        ("brand=tesla", True),
        ("BRAND=TESLA", True),
        ("brand!=tesla", False),
        ("brand=geforce", False),
        ("brand!=geforce", True),
        ("cuda>=13 brand=tesla", True),
        ("cuda>=12,brand=geforce", False),
        ("cuda>=13,brand=tesla driver>=550,arch>=8", True),
        ("cuda>=13  driver>=999", False),
        ("", True),
        ("  ", True),
        (",", True),
        ("cuda>=13 ,", False),
        (",cuda>=12,,arch>=8,", True),
        (IMAGE, True),
        (IMAGE.rsplit(" ", 1)[0], False),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else None,
)
def test_expression_is_compared_with_the_host(text: str, expected: bool) -> None:
    assert holds(text) is expected


@pytest.mark.parametrize(
    "rule",
    [
        "cuda==12",
        "cuda=<12",
        "cuda=>12",
        "cuda!12",
        "cuda<>12",
        "cuda>=",
        "cuda",
        ">=12",
        "nvlink>=2",
        "cuda>=12.x",
        "cuda>=v12",
        "cuda>=12.",
        "cuda>=.",
        "cuda>=-1",
        "cuda>=1\u0663",
        "brand>=tesla",
        "brand=",
        "brand=\x1b[31m",
        "cuda>=12\n",
        "driver=5=5",
    ],
)
@pytest.mark.parametrize("around", ["{}", "cuda>=1 {}", "cuda>=1,{}"])
def test_what_cannot_be_understood_is_refused_even_where_it_decides_nothing(rule: str, around: str) -> None:
    with pytest.raises(RequestError) as caught:
        parse_requirement(around.format(rule), "NVIDIA_REQUIRE_X")
    assert caught.value.code == "OCIGPU-REQ-4"
    assert caught.value.message.startswith("NVIDIA_REQUIRE_X: ")
    assert caught.value.message.isprintable()
    assert rule.partition("\x1b")[0].strip() in caught.value.message


def test_spaces_around_an_operator_are_explained() -> None:
    with pytest.raises(RequestError, match="spaces around it"):
        parse_requirement("cuda >= 12.0")


def test_every_gpu_must_satisfy() -> None:
    assert holds("arch>=7.5", (A100, RTX))
    assert "arch 7.5, brand Quadro RTX on GPU 1" in message("arch>=8", (A100, RTX))
    assert holds("brand=quadrortx", (RTX,))


def test_without_a_gpu_arch_and_brand_are_satisfied() -> None:
    assert holds("arch>=99,brand=geforce,cuda>=12", ())
    assert message("arch>=99,cuda>=13", ()) == (
        "NVIDIA_REQUIRE_CUDA: needs arch>=99,cuda>=13; have cuda 12.4, driver 550.163.01"
    )


def test_message_says_what_is_needed_and_what_is_there() -> None:
    assert message("cuda>=12.6 brand=tesla,driver<470") == (
        "NVIDIA_REQUIRE_CUDA: needs cuda>=12.6 or brand=tesla,driver<470;"
        " have cuda 12.4, driver 550.163.01, arch 8.0, brand Tesla on GPU 0"
    )


def test_message_shows_the_first_of_many_alternatives() -> None:
    text = message(" ".join(f"cuda>={number}" for number in range(13, 1013)))
    assert "needs cuda>=13 or cuda>=14 or" in text
    assert "or one of 994 more; have" in text
    assert len(message("driver>" + "9" * 60_000)) < 500
    assert len(message("brand=" + "x" * 60_000 + " cuda>=13")) < 500


@pytest.mark.parametrize(
    ("text", "gpu", "facts", "expected"),
    [
        pytest.param(
            "cuda>=1",
            A100,
            HostFacts(notes=("NVML: not found",)),
            "CUDA version is unknown: NVML: not found",
            id="cuda",
        ),
        pytest.param("driver>=1", A100, HostFacts(), "the host's driver version is unknown", id="driver"),
        pytest.param(
            "driver>=1", A100, HostFacts(driver_version="custom"), "driver version is unknown", id="no version"
        ),
        pytest.param("arch>=1", UNREAD, FACTS, "the compute capability of GPU 2 is unknown", id="arch"),
        pytest.param("brand!=tesla", UNREAD, FACTS, "the brand of GPU 2 is unknown", id="brand"),
        pytest.param("driver>=999 cuda>=12.5,arch<3 arch>=1", UNREAD, FACTS, "GPU 2 is unknown", id="one alternative"),
    ],
)
def test_value_that_the_host_cannot_tell_fails_and_says_so(
    text: str, gpu: Gpu, facts: HostFacts, expected: str
) -> None:
    with pytest.raises(RequestError) as caught:
        check_requirements((("NVIDIA_REQUIRE_X", text),), facts, (gpu,))
    assert caught.value.code == "OCIGPU-REQ-3"
    assert expected in caught.value.message
    assert "NVIDIA_DISABLE_REQUIRE=1" in caught.value.hint


def test_unknown_value_is_not_blamed_for_a_failure_of_its_own() -> None:
    text = message("driver>=999,arch>=1", (UNREAD,))
    assert "unknown:" not in text
    assert "have cuda 12.4, driver 550.163.01, arch unknown, brand unknown on GPU 2" in text


def test_another_alternative_makes_an_unknown_value_unimportant() -> None:
    assert holds("arch>=9 driver>=550", (UNREAD,))


def test_first_failing_variable_is_named() -> None:
    pairs = (("NVIDIA_REQUIRE_A", "cuda>=1"), ("NVIDIA_REQUIRE_B", "cuda>=99"))
    with pytest.raises(RequestError, match=r"^NVIDIA_REQUIRE_B: needs cuda>=99"):
        check_requirements(pairs, FACTS, (A100,))


def test_expression_without_end_is_refused() -> None:
    with pytest.raises(RequestError, match=f"longer than {MAX_EXPRESSION}"):
        parse_requirement("cuda>=1 " * 10_000)


def test_longest_expression_is_evaluated_for_many_gpus_of_one_kind() -> None:
    gpus = tuple(A100._replace(index=index) for index in range(64))
    assert not holds("cuda>99," * (MAX_EXPRESSION // 8), gpus)


VERSIONS = st.lists(st.integers(0, 12), min_size=1, max_size=4)


@given(VERSIONS, VERSIONS)
def test_versions_compare_like_lists_of_numbers(left: list[int], right: list[int]) -> None:
    facts = HostFacts(driver_version=".".join(map(str, left)))
    value = ".".join(f"{number:02}" for number in right)
    longest = max(len(left), len(right))
    a, b = (numbers + [0] * (longest - len(numbers)) for numbers in (left, right))
    assert holds(f"driver<{value}", (), facts) is (a < b)
    assert holds(f"driver<={value}", (), facts) is (a <= b)
    assert holds(f"driver={value}", (), facts) is (a == b)
    assert holds(f"driver!={value}", (), facts) is (a != b)
    assert holds(f"driver>{value}", (), facts) is (a > b)
    assert holds(f"driver>={value}", (), facts) is (a >= b)


@given(st.text(alphabet="cudarivebn<>=!,. 019\n\x1b", max_size=30))
def test_any_text_is_understood_or_refused_cleanly(text: str) -> None:
    assert outcome(text, (A100, RTX), FACTS) in ("", "OCIGPU-REQ-3", "OCIGPU-REQ-4")
