"""The words of CDI hooks: the vendor's and ours, read and written."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ocigpu.cdi.edits import HookOptions, edits_from_actions
from ocigpu.cdi.hook_words import (
    COMPAT_ROOT,
    HOOK_NAMES,
    OPTIONS,
    Chmod,
    CreateSymlinks,
    DisableDeviceNodeModification,
    EnableCudaCompat,
    HookCall,
    UpdateApplicationProfile,
    UpdateLdCache,
    parse_hook,
    render_hook,
)
from ocigpu.core.actions import Link, RefreshLdCache, Tmpfs
from ocigpu.core.errors import CdiError, OcigpuError
from ocigpu.gpus.nvidia.views import PROC_DRIVER, PROFILE_DIRECTORY


def typed(commands: Any) -> list[tuple[type, Any]]:
    return [(type(command), command) for command in commands]


LIBS = "/usr/lib/x86_64-linux-gnu"


@pytest.mark.parametrize(
    ("line", "commands"),
    [
        pytest.param(
            f"create-symlinks --link libcuda.so.1::{LIBS}/libcuda.so --link ../a::/x/y",
            [CreateSymlinks((("libcuda.so.1", f"{LIBS}/libcuda.so"), ("../a", "/x/y")))],
            id="links",
        ),
        pytest.param("create-symlinks --link=a::/b", [CreateSymlinks((("a", "/b"),))], id="link with ="),
        pytest.param("create-symlinks -link a::/b", [CreateSymlinks((("a", "/b"),))], id="one dash"),
        pytest.param(
            "create-symlinks --link a::/b,c::/d", [CreateSymlinks((("a", "/b"), ("c", "/d")))], id="the vendor's list"
        ),
        pytest.param("create-symlinks --link a,b::/c,d", [CreateSymlinks((("a,b", "/c,d"),))], id="commas in names"),
        pytest.param(
            "create-symlinks --device-link ../card0::/dev/dri/by-path/c",
            [CreateSymlinks((), (("../card0", "/dev/dri/by-path/c"),))],
            id="link to a device",
        ),
        pytest.param("create-symlinks", [CreateSymlinks()], id="no links"),
        pytest.param(
            "enable-cuda-compat --host-driver-version=550.163.01", [EnableCudaCompat("550.163.01")], id="compat"
        ),
        pytest.param(
            "enable-cuda-compat --host-cuda-version 12.9 --cuda-compat-container-root=/usr/local/cuda/compat_orin",
            [EnableCudaCompat("", "12.9", "/usr/local/cuda/compat_orin")],
            id="compat of Tegra",
        ),
        pytest.param(
            "update-ldcache --folder /a --folder=/b,c --folder /d,/e",
            [UpdateLdCache(("/a", "/b,c", "/d", "/e"))],
            id="folders",
        ),
        pytest.param(
            "update-ldcache --ldconfig-path @/sbin/ldconfig --folder /a",
            [UpdateLdCache(("/a",), "/sbin/ldconfig")],
            id="ldconfig",
        ),
        pytest.param("disable-device-node-modification", [DisableDeviceNodeModification()], id="proc view"),
        pytest.param(
            "disable-device-node-modification --driver-proc /s/proc/driver/nvidia --simulated",
            [DisableDeviceNodeModification("/s/proc/driver/nvidia", True)],
            id="simulated",
        ),
        pytest.param("update-application-profile", [UpdateApplicationProfile()], id="profile"),
        pytest.param(
            "chmod --mode 755 --path /dev/dri --path /dev/nvidia-caps",
            [Chmod(0o755, ("/dev/dri", "/dev/nvidia-caps"))],
            id="chmod",
        ),
        pytest.param("chmod --mode=0o755 --path=/a,/b", [Chmod(0o755, ("/a", "/b"))], id="chmod list"),
        pytest.param("chmod", [Chmod()], id="chmod of nothing"),
        pytest.param("chmod --mode 755", [Chmod(0o755)], id="chmod without paths, as enabled by hand"),
        pytest.param("hook update-application-profile", [UpdateApplicationProfile()], id="nvidia-ctk hook"),
        pytest.param(
            "-d --quiet update-ldcache --debug --folder /a -d",
            [UpdateLdCache(("/a",))],
            id="switches of what the vendor's program says",
        ),
        pytest.param(
            "create-symlinks --link a::/b + enable-cuda-compat + update-ldcache --folder /c + "
            "disable-device-node-modification + update-application-profile",
            [
                CreateSymlinks((("a", "/b"),)),
                EnableCudaCompat(),
                UpdateLdCache(("/c",)),
                DisableDeviceNodeModification(),
                UpdateApplicationProfile(),
            ],
            id="several",
        ),
        pytest.param(
            "create-symlinks --link + + update-application-profile",
            None,
            id="a plus sign as a value",
        ),
    ],
)
def test_words_are_read(line: str, commands: list[Any] | None) -> None:
    if commands is None:
        with pytest.raises(OcigpuError, match='link "\\+" is not written TARGET::PATH'):
            parse_hook(line.split())
        return
    call = parse_hook(line.split())
    assert typed(call.commands) == typed(commands)
    assert call.unknown == ()
    assert call.state_file == "-"


@pytest.mark.parametrize("name", HOOK_NAMES)
def test_every_hook_takes_the_state_from_a_file(name: str) -> None:
    assert parse_hook([name, "--container-spec", "/state.json"]).state_file == "/state.json"
    assert parse_hook([name, "--container-spec=-"]).state_file == "-"


def test_every_hook_that_is_generated_can_be_read() -> None:
    assert set(OPTIONS) == set(HOOK_NAMES)


@pytest.mark.parametrize(
    ("line", "known", "unknown"),
    [
        ("make-coffee", [], ("make-coffee",)),
        ("make-coffee --cup 1 x + update-application-profile", [UpdateApplicationProfile()], ("make-coffee",)),
        ("update-application-profile + make-coffee --cup 1", [UpdateApplicationProfile()], ("make-coffee",)),
        ("--new-switch update-application-profile", [], ("--new-switch",)),
        ("", [], ()),
    ],
)
def test_hooks_of_newer_specifications_are_left_out(line: str, known: list[Any], unknown: tuple[str, ...]) -> None:
    assert parse_hook(line.split()) == HookCall(tuple(known), unknown)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["create-symlinks", "--link"], "create-symlinks: option --link needs a value"),
        (["create-symlinks", "--link", "a"], 'create-symlinks: link "a" is not written TARGET::PATH'),
        (["create-symlinks", "--link", "::/a"], 'create-symlinks: link "::/a" is not written TARGET::PATH'),
        (["create-symlinks", "--link", "a::b::/c"], 'create-symlinks: link "a::b::/c" is not written TARGET::PATH'),
        (["create-symlinks", "--link", "a::/b,c"], None),
        (["create-symlinks", "--link", "a::/b,c,d::/e"], 'create-symlinks: link "c" is not written TARGET::PATH'),
        (["create-symlinks", "--link", "a::b"], 'create-symlinks: --link "b" is not an absolute path'),
        (
            ["create-symlinks", "--link", "a::/"],
            'create-symlinks: --link "/" is not the path of a file in the containe',
        ),
        (["create-symlinks", "--link", "a::/b/../c"], 'create-symlinks: --link "/b/../c" is not the path of a file'),
        (["create-symlinks", "--link", "a\n::/b"], r'create-symlinks: --link "a\n" contains a control character'),
        (["create-symlinks", "a::/b"], 'create-symlinks: unexpected argument "a::/b"'),
        (["create-symlinks", "--folder", "/b"], 'create-symlinks: unknown option "--folder"'),
        (["update-ldcache", "--folder", "lib"], 'update-ldcache: --folder "lib" is not an absolute path'),
        (["update-ldcache", "--folder", "/a\n/b"], r'update-ldcache: --folder "/a\n/b" contains a control character'),
        (["update-ldcache", "--ldconfig-path", "ldconfig"], 'update-ldcache: --ldconfig-path "ldconfig" is not an'),
        (["enable-cuda-compat", "--cuda-compat-container-root=x"], "enable-cuda-compat: --cuda-compat-container-root"),
        (["disable-device-node-modification", "--driver-proc", ""], "disable-device-node-modification: --driver-proc"),
        (["chmod", "--path", "/a"], "chmod: option --mode is missing"),
        (["chmod", "--mode", "", "--path", "/a"], "chmod: option --mode is missing"),
        (["chmod", "--mode", "789", "--path", "/a"], 'chmod: --mode "789" is not an octal mode'),
        (["chmod", "--mode", "77777", "--path", "/a"], 'chmod: --mode "77777" is not an octal mode'),
        (["chmod", "--mode", "755", "--path", "/a/../b"], 'chmod: --path "/a/../b" is not the path of a file'),
        (["update-application-profile", "+"], 'no sub-command after "+"'),
    ],
)
def test_what_cannot_be_understood_is_told_in_one_line(words: list[str], message: str | None) -> None:
    if message is None:
        assert parse_hook(words).commands == (CreateSymlinks((("a", "/b,c"),)),)
        return
    with pytest.raises(OcigpuError) as caught:
        parse_hook(words)
    assert caught.value.code == "OCIGPU-ARG-1"
    assert caught.value.exit_code == 1
    assert caught.value.message.startswith(message)
    assert len(caught.value.render("ocigpu-hook").splitlines()) == 1


NAMES = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cc"], exclude_characters="/:"), min_size=1, max_size=8
)
PARTS = NAMES.filter(lambda name: name not in (".", "..") and not name.endswith(","))
PATHS = st.lists(PARTS, min_size=1, max_size=3).map(lambda parts: "/" + "/".join(parts))
TARGETS = st.builds(lambda up, path: path.lstrip("/") if up else path, st.booleans(), PATHS)
LINKS = st.lists(st.tuples(TARGETS, PATHS), max_size=3).map(tuple)
VERSIONS = st.text(st.sampled_from("0123456789.x"), max_size=8)
COMMANDS = st.one_of(
    st.builds(CreateSymlinks, LINKS, LINKS),
    st.builds(EnableCudaCompat, VERSIONS, VERSIONS, PATHS),
    st.builds(UpdateLdCache, st.lists(PATHS, max_size=3).map(tuple), st.just("") | PATHS),
    st.builds(DisableDeviceNodeModification, PATHS, st.booleans()),
    st.just(UpdateApplicationProfile()),
    st.builds(Chmod, st.integers(0, 0o7777), st.lists(PATHS, max_size=3).map(tuple)),
)


@given(st.lists(COMMANDS, max_size=4))
def test_commands_that_are_written_are_read_as_the_same(commands: list[Any]) -> None:
    words = render_hook(commands)
    assert typed(parse_hook(words).commands) == typed(commands)
    assert words.count("+") >= len(commands) - 1


@pytest.mark.parametrize(
    "command",
    [
        UpdateLdCache(("/a,/b",)),
        UpdateLdCache(("a",)),
        CreateSymlinks((("a::b", "/c"),)),
        CreateSymlinks((("a", "/b/../c"),)),
        Chmod(0o755, ("/a,/b",)),
        Chmod(-1),
        EnableCudaCompat("", "", ""),
    ],
)
def test_what_would_be_read_as_something_else_is_not_written(command: Any) -> None:
    with pytest.raises(CdiError) as caught:
        render_hook([command])
    assert caught.value.code == "OCIGPU-CDI-7"


@given(
    st.lists(
        st.text(max_size=12)
        | st.sampled_from(
            [*HOOK_NAMES, "+", "--link", "a::/b", "--folder", "/a", "--mode=755", "--path", "--simulated"]
        )
    )
)
def test_no_words_break_the_reader(words: list[str]) -> None:
    code = "OCIGPU-ARG-1"
    try:
        call = parse_hook(words)
    except OcigpuError as error:
        call, code = HookCall(()), error.code
    assert code == "OCIGPU-ARG-1"
    assert typed(parse_hook(render_hook(call.commands)).commands) == typed(call.commands)


def test_generated_hooks_are_the_words_of_the_grammar() -> None:
    """What the generator of specifications writes is read here, word for word."""
    actions = [
        Link("/usr/lib64/libcuda.so.1", "libcuda.so.550.1", "r"),
        Link("/dev/dri/by-path/pci-0000:01:00.0-card", "../card0", "r"),
        Tmpfs(PROC_DRIVER, 0o555, (), (), "r"),
        Tmpfs(PROFILE_DIRECTORY, 0o555, (), (), "r"),
        RefreshLdCache("/sbin/ldconfig", ("/usr/lib64", "/usr/lib64/vdpau"), "r"),
    ]
    hook = HookOptions(
        "/usr/bin/ocigpu-hook",
        compat=EnableCudaCompat("550.1"),
        proc_driver="/proc/driver/nvidia",
    )
    (entry,) = edits_from_actions(actions, hook)["hooks"]
    assert typed(parse_hook(entry["args"][1:]).commands) == typed(
        [
            CreateSymlinks(
                (("libcuda.so.550.1", "/usr/lib64/libcuda.so.1"),),
                (("../card0", "/dev/dri/by-path/pci-0000:01:00.0-card"),),
            ),
            EnableCudaCompat("550.1", "", COMPAT_ROOT),
            UpdateLdCache(("/usr/lib64", "/usr/lib64/vdpau"), "/sbin/ldconfig"),
            DisableDeviceNodeModification(),
            UpdateApplicationProfile(),
        ]
    )
