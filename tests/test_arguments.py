"""Command lines of OCI runtimes, as engines and people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ocigpu.core.errors import UsageError
from ocigpu.entry.arguments import Arguments, find_container_id, parse_arguments


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        pytest.param("", Arguments(), id="nothing"),
        pytest.param("--version", Arguments(version=True), id="version"),
        pytest.param("-v", Arguments(version=True), id="version by its letter"),
        pytest.param("--root /r -version", Arguments(version=True), id="version with one dash"),
        pytest.param("exec c1 python --version", Arguments("exec"), id="version of a container's program"),
        pytest.param("--help create", Arguments("create"), id="help before create"),
        pytest.param("state x", Arguments("state"), id="state"),
        pytest.param("create x", Arguments("create"), id="bundle is the current directory"),
        pytest.param("create --bundle /b x", Arguments("create", "/b"), id="bundle"),
        pytest.param("create --bundle=/b x", Arguments("create", "/b"), id="bundle with ="),
        pytest.param("create -bundle /b x", Arguments("create", "/b"), id="one dash"),
        pytest.param("create -bundle=/b x", Arguments("create", "/b"), id="one dash with ="),
        pytest.param("create -b /b x", Arguments("create", "/b"), id="short"),
        pytest.param("create -b=/b x", Arguments("create", "/b"), id="short with ="),
        pytest.param("create -b/b x", Arguments("create", "/b"), id="short and value in one word"),
        pytest.param("run -db /b x", Arguments("run", "/b"), id="letters together"),
        pytest.param("run -kdb/b x", Arguments("run", "/b"), id="letters and value together"),
        pytest.param("run -d -b /b x", Arguments("run", "/b"), id="letters apart"),
        pytest.param("run --detach --keep --bundle /b x", Arguments("run", "/b"), id="flags before"),
        pytest.param("create x --bundle /b", Arguments("create", "/b"), id="after the name"),
        pytest.param("create --bundle /a --bundle /b x", Arguments("create", "/b"), id="last one counts"),
        pytest.param("create --bundle= x", Arguments("create", ""), id="empty bundle"),
        pytest.param("create --bundle --pid-file x", Arguments("create", "--pid-file"), id="value like an option"),
        pytest.param("create --pid-file --bundle x", Arguments("create"), id="option that is a value"),
        pytest.param("create --pid-file=/p --no-pivot --bundle /b x", Arguments("create", "/b"), id="after others"),
        pytest.param("create --console-socket /s -b /b x", Arguments("create", "/b"), id="after a socket"),
        pytest.param("create --preserve-fds 3 -b /b x", Arguments("create", "/b"), id="after descriptors"),
        pytest.param("create -- --bundle /b", Arguments("create"), id="nothing is an option after --"),
        pytest.param("create - --bundle /b", Arguments("create", "/b"), id="a dash is a name"),
        pytest.param("create create", Arguments("create"), id="container named create"),
        pytest.param("create -b create run", Arguments("create", "create"), id="bundle named create"),
        pytest.param("create --config /c -b /b x", Arguments("create", "/b", "/c"), id="crun's config"),
        pytest.param("create -f c.json x", Arguments("create", "", "c.json"), id="crun's config, short"),
        pytest.param("create -fc.json x", Arguments("create", "", "c.json"), id="crun's config, one word"),
        pytest.param("delete create", Arguments("delete"), id="deleting a container named create"),
        pytest.param("delete --force run --bundle /b", Arguments("delete"), id="options of others are not read"),
        pytest.param("exec x create --bundle /b", Arguments("exec"), id="exec of a program named create"),
        pytest.param("kill create KILL", Arguments("kill"), id="kill"),
        pytest.param("start run", Arguments("start"), id="start"),
        pytest.param("Create x", Arguments("Create"), id="case counts"),
        pytest.param("--root create state x", Arguments("state"), id="root named create"),
        pytest.param("--root /r create x", Arguments("create"), id="root"),
        pytest.param("--root=/r create x", Arguments("create"), id="root with ="),
        pytest.param("-root /r create x", Arguments("create"), id="root with one dash"),
        pytest.param("--root= create x", Arguments("create"), id="empty root"),
        pytest.param("--log /l create x", Arguments("create", log="/l"), id="log"),
        pytest.param(
            "--log create --log-format json run x", Arguments("run", log="create", log_format="json"), id="json"
        ),
        pytest.param("--log-format=json state", Arguments("state", log_format="json"), id="json with ="),
        pytest.param("--log-format yaml state", Arguments("state"), id="unknown format is text"),
        pytest.param("--log-level create state", Arguments("state"), id="crun's log level"),
        pytest.param("--criu create state", Arguments("state"), id="criu"),
        pytest.param("--rootless create state", Arguments("state"), id="rootless"),
        pytest.param("--debug --systemd-cgroup create x", Arguments("create"), id="systemd"),
        pytest.param("--cgroup-manager systemd create", Arguments("create"), id="crun's systemd"),
        pytest.param("--cgroup-manager=cgroupfs create", Arguments("create"), id="crun's cgroupfs"),
        pytest.param("--debug -- create -b /b x", Arguments("create", "/b"), id="-- before the subcommand"),
        pytest.param("--new value create -b /b x", Arguments("create", "/b"), id="unknown option with a value"),
        pytest.param("--new=value create -b /b x", Arguments("create", "/b"), id="unknown option with ="),
        pytest.param("--new create -b /b x", Arguments("create", "/b"), id="unknown option without a value"),
        pytest.param("--new state create", Arguments("state"), id="unknown option before a subcommand"),
        pytest.param("--root", Arguments(), id="value missing, not our business"),
        pytest.param("-", Arguments("-"), id="dash"),
        pytest.param("--", Arguments(), id="two dashes"),
    ],
)
def test_arguments_are_understood(line: str, expected: Arguments) -> None:
    assert parse_arguments(line.split()) == expected


DOCKER = (
    "--root /var/run/docker/runtime-runc/moby --log /run/containerd/log.json --log-format json --systemd-cgroup create"
    " --bundle /run/containerd/bundle --pid-file /run/containerd/init.pid 0154ace00b61"
)
PODMAN = (
    "--log-level error --systemd-cgroup create --bundle /var/lib/containers/userdata --pid-file /run/pidfile --no-pivot"
    " 395aee7b6310"
)


def test_arguments_of_containerd_are_understood() -> None:
    assert parse_arguments(DOCKER.split()) == Arguments(
        "create",
        "/run/containerd/bundle",
        log="/run/containerd/log.json",
        log_format="json",
    )


def test_arguments_of_podman_are_understood() -> None:
    assert parse_arguments(PODMAN.split()) == Arguments("create", "/var/lib/containers/userdata")


@pytest.mark.parametrize(
    ("line", "name"),
    [
        pytest.param("create --bundle /b x", "x", id="at the end"),
        pytest.param("create x --bundle /b", "x", id="before an option"),
        pytest.param("--root /r run -d x -b /b", "x", id="between"),
        pytest.param("run --new value x", "x", id="after the value of an unknown option"),
        pytest.param("run -b /b -- -x", "-x", id="after --"),
        pytest.param("run x --", "x", id="before --"),
        pytest.param("run --detach --bundle /b", "", id="none"),
        pytest.param("create create", "create", id="named create"),
    ],
)
def test_the_container_of_create_and_run_is_found(line: str, name: str) -> None:
    assert find_container_id(line.split()) == name


def test_engines_name_their_container_last() -> None:
    assert find_container_id(DOCKER.split()) == "0154ace00b61"
    assert find_container_id(PODMAN.split()) == "395aee7b6310"


@pytest.mark.parametrize("word", ["--bundle", "-b", "-bundle", "--pid-file", "--config", "-f", "-db"])
@pytest.mark.parametrize("subcommand", ["create", "run"])
def test_option_without_its_value_is_refused(subcommand: str, word: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_arguments([subcommand, "x", word])
    assert caught.value.code == "OCIGPU-ARG-1"
    assert caught.value.message == f"option {word} needs a value"
    assert caught.value.exit_code == 2


def test_words_with_spaces_and_newlines_stay_one_word() -> None:
    assert parse_arguments(["create", "-b", " /b\n--bundle /c", ""]).bundle == " /b\n--bundle /c"


@given(st.lists(st.text(max_size=12) | st.sampled_from(["-b", "--bundle", "--log", "create", "run", "--", "-", "="])))
def test_no_command_line_breaks_the_parser(words: list[str]) -> None:
    try:
        arguments = parse_arguments(words)
    except UsageError:
        return
    assert arguments.subcommand == "" or arguments.subcommand in words


@given(st.lists(st.text(max_size=12)))
def test_what_follows_another_subcommand_is_never_read(words: list[str]) -> None:
    assert parse_arguments(["--root", "/r", "state", *words]) == Arguments("state")
