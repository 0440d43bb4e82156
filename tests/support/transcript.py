"""Transcripts in the documentation: lines "$ command" of a page's indented blocks, and below each what it prints."""

import re
from pathlib import Path
from typing import NamedTuple

from support.product import REPOSITORY


class Typed(NamedTuple):
    """A command of a page, and what the page shows of its output: "..." stands for anything, nothing for all of it."""

    command: str
    shown: str

    def fits(self, printed: str) -> bool:
        """Whether a command that printed this did what the page shows."""
        pattern = ".*".join(map(re.escape, self.shown.split("...")))
        return not self.shown or re.fullmatch(pattern, printed.strip("\n"), re.DOTALL) is not None


def read_transcript(page: str, *titles: str) -> list[Typed]:
    """Return what is typed in the sections with these titles of a page in docs/, in their order."""
    sections = re.split(r"^#+ ", Path(REPOSITORY, "docs", page).read_text(), flags=re.MULTILINE)
    texts = {text.partition("\n")[0]: text for text in sections}
    blocks = re.findall(r"(?<=\n\n)(?: {4}.*\n)+", "".join(texts[title] for title in titles))
    typed = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", re.sub(r"^ {4}", "", "".join(blocks), flags=re.MULTILINE), re.M)
    return [Typed(command, shown.strip("\n")) for command, shown in typed]
