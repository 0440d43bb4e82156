"""The documentation's site: built as ``make site`` does, every link followed, looked at in a browser."""

import functools
import json
import os
import re
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from markdown_it import MarkdownIt
from support import browser, requirements
from support.process import run, wait_for
from support.product import REPOSITORY

from ocigpu.core.codes import CODES
from ocigpu.doctor.messages import MESSAGES

pytestmark = pytest.mark.rest  # its libraries come from a package index

PARTS = ("docs", "ocigpu", "packaging")


class Page(HTMLParser):
    """What a page leads to, loads and contains.

    ``tags``: how many there are of those that make its structure, in its text only.  ``loose``: paragraphs that are in
    no list.
    """

    STRUCTURE = frozenset({"pre", "ul", "ol", "li", "table", "tr", "th", "td", "h1", "h2", "h3", "h4"})

    def __init__(self, html: str, article: bool = True) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.ids: set[str] = set()
        self.tags: Counter[str] = Counter()
        self.loose = 0
        self.code = ""
        self._inside = not article
        self._lists = self._pre = 0
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        words = dict(attrs)
        self.ids.add(words.get("id") or "")
        if tag == "a" and words.get("href"):
            self.links.append(str(words["href"]))
        self.loads += [str(words[name]) for name in ("src", "href") if tag != "a" and words.get(name)]
        self._inside = self._inside or tag == "article"
        self.tags[tag] += self._inside and tag in self.STRUCTURE
        self._lists += tag in ("li", "dd")
        self.loose += tag == "p" and self._inside and not self._lists
        self._pre += tag == "pre"

    def handle_endtag(self, tag: str) -> None:
        self._inside = self._inside and tag != "article"
        self._lists -= tag in ("li", "dd")
        self._pre -= tag == "pre"

    def handle_data(self, data: str) -> None:
        self.code += data if self._pre and self._inside else ""


@pytest.fixture(scope="module")
def clone(session_directory: Path) -> Path:
    """What the site is built of, in a repository of its own, with the site's virtual environment."""
    clone = session_directory / "site"
    for part in PARTS:
        shutil.copytree(REPOSITORY / part, clone / part, ignore=shutil.ignore_patterns("__pycache__"))
    run(["git", "init", "--quiet", "--initial-branch=main", clone])
    git = ["git", "-C", clone, "-c", "user.name=x", "-c", "user.email=x@localhost"]
    run([*git, "commit", "--quiet", "--allow-empty", "--message=x"])
    return clone


@pytest.fixture(scope="module")
def site(clone: Path) -> Path:
    """The built site; a warning would have failed the build."""
    run([clone / "packaging/site.sh"], timeout=280)
    return clone / "build/site"


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[str, Page]:
    """Its pages by their addresses."""
    files = [path for path in site.rglob("*.html") if path.name != "404.html"]
    return {str(path.relative_to(site)).removesuffix("index.html"): Page(path.read_text()) for path in files}


def test_every_link_and_anchor_leads_to_something(site: Path, pages: dict[str, Page]) -> None:
    broken = []
    for address, page in pages.items():
        for link in page.links:
            target = urlsplit(link)
            if target.scheme or target.netloc:
                continue
            path = os.path.normpath(f"{address or '.'}/{unquote(target.path)}") if target.path else address
            path = "" if path == "." else f"{path.rstrip('/')}/" if path else ""
            file = (site / path.rstrip("/")).is_file()
            if not file and (path not in pages or unquote(target.fragment) not in pages[path].ids | {""}):
                broken.append((address, link))
    assert broken == []
    assert sum(len(page.links) for page in pages.values()) > 10_000


def test_pages_load_nothing_from_elsewhere(pages: dict[str, Page]) -> None:
    assert {source for page in pages.values() for source in page.loads if "//" in source} == set()


def test_every_command_code_and_message_has_its_address_and_title(site: Path, pages: dict[str, Page]) -> None:
    chapters = {"COMMANDS": 100, "ERRORS": len(CODES), "TROUBLESHOOTING": len(MESSAGES)}
    for chapter, number in chapters.items():
        assert len([address for address in pages if re.fullmatch(rf"{chapter}/[^/]+/", address)]) >= number
    for address, title in (
        ("COMMANDS/ocigpu-cdi-generate", "ocigpu cdi generate: Generate"),
        ("ERRORS/OCIGPU-DEV-1", f"OCIGPU-DEV-1: {CODES['OCIGPU-DEV-1'].cause}"),
        ("TROUBLESHOOTING/failed-to-initialize-nvml-unknown-error", "Failed to initialize NVML: Unknown Error ("),
        ("TROUBLESHOOTING", "Troubleshooting, by what the program says - ocigpu"),
    ):
        assert f"<title>{title}" in (site / address / "index.html").read_text()


def test_a_page_looks_as_it_does_in_the_repository(clone: Path, pages: dict[str, Page]) -> None:
    """Python-Markdown reads some lists otherwise than CommonMark: text in a list is indented by four."""
    commonmark = MarkdownIt("commonmark").enable("table")
    source = clone / "build/site-source/docs"
    for path in sorted(source.rglob("*.md")):
        name = str(path.relative_to(source))
        if (clone / "docs" / name).exists():
            address = f"{name.removesuffix('README.md').removesuffix('.md')}/".lstrip("/").replace("//", "/")
            here, there = pages[address], Page(commonmark.render(path.read_text()), article=False)
            assert (here.tags, here.loose) == (there.tags, there.loose), name
            assert here.code.split() == there.code.split(), name


def test_the_search_knows_the_words_of_messages(site: Path) -> None:
    documents = json.loads((site / "search/search_index.json").read_text())["docs"]
    found = {entry["location"] for entry in documents if "no kernel image is available" in entry["text"]}
    assert any(location.startswith("TROUBLESHOOTING/") for location in found)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


LOOKED_AT = (
    "",
    "COMMANDS/ocigpu-cdi-generate/",
    "ERRORS/OCIGPU-DEV-1/",
    "TROUBLESHOOTING/",
    "tenants/TENANTS/",
    "SECURITY/",
)


def test_in_a_browser_it_is_light_or_dark_fits_a_phone_and_finds_a_message(address: str, tmp_path: Path) -> None:
    requirements.require(browser.missing())
    with browser.Browser(tmp_path) as page:

        def go(path: str) -> None:
            page.go(f"{address}/{path}")
            loaded = "document.readyState === 'complete' && location.href !== 'about:blank'"
            wait_for(path, lambda: page.ask(loaded), on_failure=lambda: str(page.complaints))

        colours = []
        for dark in (False, True):
            page.dark(dark)
            go("")
            colours.append(page.ask("getComputedStyle(document.body).backgroundColor"))
        assert colours[0] == "rgb(255, 255, 255)" != colours[1]
        page.call("Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=1, mobile=True)
        for path in LOOKED_AT:
            go(path)
            assert page.ask("document.documentElement.scrollWidth") == 390, path
        page.call("Emulation.clearDeviceMetricsOverride")
        go("?q=Failed+to+initialize+NVML%3A+Unknown+Error")
        results = "[...document.querySelectorAll('.md-search-result__link')].map(link => link.pathname)"
        page.ask("document.querySelector('[data-md-component=search-query]').focus()")
        wait_for("results of a search", lambda: page.ask(results), on_failure=lambda: str(page.complaints))
        assert page.ask(results)[0] == "/TROUBLESHOOTING/failed-to-initialize-nvml-unknown-error/"
        assert page.complaints == []


def test_versions_lie_side_by_side(clone: Path, site: Path, tmp_path: Path) -> None:
    environment = {
        **os.environ, "SITE_URL": "https://docs.example/", "GIT_AUTHOR_NAME": "x", "GIT_AUTHOR_EMAIL": "x@localhost",
        "GIT_COMMITTER_NAME": "x", "GIT_COMMITTER_EMAIL": "x@localhost",
    }  # fmt: skip
    for words in (["deploy", "0.1"], ["deploy", "--update-aliases", "0.2", "latest"], ["set-default", "latest"]):
        run([clone / "packaging/site.sh", "mike", *words], env=environment, cwd=clone, timeout=280)
    published = tmp_path / "published"
    run(["git", "-C", clone, "worktree", "add", "--quiet", published, "gh-pages"])
    try:
        versions = json.loads((published / "versions.json").read_text())
        assert [(entry["version"], entry["aliases"]) for entry in versions] == [("0.2", ["latest"]), ("0.1", [])]
        for name in ("0.1", "0.2", "latest"):
            text = (published / name / "ERRORS/OCIGPU-DEV-1/index.html").read_text()
            assert '<link rel="canonical" href="https://docs.example/latest/ERRORS/OCIGPU-DEV-1/">' in text
            assert re.search(r'"provider": ?"mike"', text)
        assert "url=latest/" in (published / "index.html").read_text()
    finally:
        run(["git", "-C", clone, "worktree", "remove", "--force", published])
