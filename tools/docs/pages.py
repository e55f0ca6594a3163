"""Reads the Markdown pages of the repository: their links, headings and code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`([^`\n]+)`")
_HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Page:
    """One page; `path` is relative to the repository."""

    path: Path
    text: str

    @property
    def name(self) -> str:
        """The path, as messages name the page."""
        return self.path.as_posix()

    def links(self) -> Iterator[str]:
        """Yield the targets of links outside of code."""
        yield from _LINK.findall(_INLINE.sub("", _FENCE.sub("", self.text)))

    def blocks(self, language: str) -> list[str]:
        """Return the code blocks of a language; "" selects those without a language."""
        return [body for kind, body in _FENCE.findall(self.text) if kind == language]

    def code(self) -> Iterator[str]:
        """All code: inline pieces, and the lines of blocks."""
        yield from _INLINE.findall(_FENCE.sub("", self.text))
        for _, body in _FENCE.findall(self.text):
            yield from body.splitlines()

    def inline(self) -> Iterator[str]:
        """Inline pieces of code."""
        yield from _INLINE.findall(_FENCE.sub("", self.text))

    def anchors(self) -> set[str]:
        """Anchors of the headings: what follows the `#` in a link."""
        return {_slug(heading) for heading in _HEADING.findall(_FENCE.sub("", self.text))}


def pages() -> list[Page]:
    """Every page that people read."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    return [Page(path.relative_to(ROOT), path.read_text()) for path in sorted(found)]


def broken_links(page: Page) -> list[str]:
    """Relative links of the page that lead nowhere."""
    broken = []
    for link in page.links():
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        path = (ROOT / page.path.parent / target) if target else ROOT / page.path
        if not path.exists() or (
            anchor and anchor not in Page(page.path, path.read_text()).anchors()
        ):
            broken.append(link)
    return broken


def _slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
