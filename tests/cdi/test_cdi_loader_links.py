"""Which libraries of a specification get their SONAME links from the hook program alone."""

from typing import Any

import pytest

from ocigpu.cdi.loader_links import describe_left, left_to_ldconfig

LIB = "/usr/lib/x86_64-linux-gnu"
SONAMES = {
    f"{LIB}/libcuda.so.550.1": "libcuda.so.1",
    f"{LIB}/libnvidia-glcore.so.550.1": "libnvidia-glcore.so.550.1",
    f"{LIB}/libnvidia-egl-gbm.so.1.1.1": "libnvidia-egl-gbm.so.1",
}


def spec(*hooks: list[str], mounts: tuple[str, ...] = tuple(SONAMES)) -> dict[str, Any]:
    entries = [{"hookName": "createContainer", "path": "/usr/bin/hook", "args": words} for words in hooks]
    return {
        "containerEdits": {
            "mounts": [{"hostPath": path, "containerPath": path} for path in mounts],
            "hooks": entries,
        }
    }


def left(data: dict[str, Any], sonames: dict[str, str] = SONAMES) -> tuple[str, ...]:
    return left_to_ldconfig(data, lambda path: sonames.get(path, ""))


CACHE = ["nvidia-cdi-hook", "update-ldcache", "--folder", LIB]
UNVERSIONED = ["nvidia-ctk", "hook", "create-symlinks", "--link", f"libcuda.so.1::{LIB}/libcuda.so"]
LINKED = ["nvidia-cdi-hook", "create-symlinks", "--link", f"libcuda.so.550.1::{LIB}/libcuda.so.1"]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        pytest.param(spec(UNVERSIONED, CACHE), ("libcuda.so.1", "libnvidia-egl-gbm.so.1"), id="up to 1.17"),
        pytest.param(spec(LINKED, UNVERSIONED, CACHE), ("libnvidia-egl-gbm.so.1",), id="later"),
        pytest.param(
            spec(["ocigpu-hook", "--config", "/c", *LINKED[1:], "+", *CACHE[1:]]),
            ("libnvidia-egl-gbm.so.1",),
            id="in one process",
        ),
        pytest.param(spec(UNVERSIONED), (), id="nobody is to make them"),
        pytest.param(spec([*CACHE, "--folder", "relative"]), (), id="hook with a mistake"),
        pytest.param(spec(CACHE, mounts=(f"{LIB}/libnvidia-glcore.so.550.1",)), (), id="its name is its SONAME"),
        pytest.param(spec(CACHE, mounts=("/opt/libcuda.so.550.1",)), (), id="elsewhere"),
        pytest.param({}, (), id="empty"),
    ],
)
def test_links_that_no_other_part_makes_are_found(data: dict[str, Any], expected: tuple[str, ...]) -> None:
    assert left(data) == expected


def test_libcuda_is_known_without_the_file() -> None:
    assert left(spec(CACHE), {}) == ("libcuda.so.1",)
    assert describe_left(("a", "b", "c", "d")) == (
        "the links a, b, c and 1 more are left to the program of the hook update-ldcache"
    )
