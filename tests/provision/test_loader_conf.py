"""An image's loader configuration that was written to confuse whoever reads it."""

import os
from pathlib import Path

import pytest

from ocigpu.provision.loader import COMPAT_CONF, LD_SO_CONF, OWN_CONF, LoaderFacts, read_loader_facts


def read(root: Path, files: dict[str, bytes]) -> LoaderFacts:
    for path, content in files.items():
        file = root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    root_fd = os.open(root, os.O_PATH | os.O_DIRECTORY)
    try:
        return read_loader_facts(root_fd)
    finally:
        os.close(root_fd)


@pytest.mark.parametrize("name", [LD_SO_CONF, OWN_CONF, COMPAT_CONF])
@pytest.mark.parametrize(
    "text", [b"/opt\0/lib\n", b"include /etc/\0x\n", b"\0\n", b"include \0*\n", b"include /\xff\n"]
)
def test_no_path_of_it_has_a_nul(name: str, text: bytes, tmp_path: Path) -> None:
    (tmp_path / "opt/lib").mkdir(parents=True)
    facts = read(tmp_path, {name: text})
    assert not any("\0" in path for path in (*facts.searched, *facts.own_directories, *facts.compat_directories))


def test_a_text_ends_at_a_nul_and_a_line_at_a_newline_only(tmp_path: Path) -> None:
    facts = read(tmp_path, {LD_SO_CONF: b"/opt/a\0b\n/opt/c\x0cd\n /opt/e\r\n/opt/f\xe2\x80\xa8g\n"})
    assert facts.searched[-4:] == ("/opt/a", "/opt/c\x0cd", "/opt/e", "/opt/f\u2028g")


@pytest.mark.parametrize("name", [OWN_CONF, COMPAT_CONF])
def test_what_a_link_in_the_place_of_our_files_leads_to_is_not_copied(name: str, tmp_path: Path) -> None:
    """It may be a file of a volume that only root can read; ours can be read by everybody."""
    (tmp_path / "opt/lib").mkdir(parents=True)
    (tmp_path / "secret").write_text("/opt/lib\n")
    link = tmp_path / name.lstrip("/")
    link.parent.mkdir(parents=True)
    link.symlink_to("/secret")
    facts = read(tmp_path, {})
    assert facts.own_directories == facts.compat_directories == ()
