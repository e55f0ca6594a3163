"""A hook of MkDocs: links that leave docs/ become plain file names.

Pages link to source files of the repository, which the site does not contain.
"""

from __future__ import annotations

import os
import re
from typing import Any

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?!\w+:|#|/)[^)\s]+)\)")


def on_page_markdown(markdown: str, page: Any, **_: object) -> str:
    """Return the page with `[text](../../file.py)` written as text and file name."""
    folder = os.path.dirname(page.file.src_uri)  # noqa: PTH120  a URI, not a path

    def rewrite(link: re.Match[str]) -> str:
        text, target = link.groups()
        path = os.path.normpath(os.path.join(folder, target.partition("#")[0]))  # noqa: PTH118
        if not path.startswith(".."):
            return link[0]
        name = path.replace("../", "")
        return text if name in text else f"{text} (`{name}`)"

    return _LINK.sub(rewrite, markdown)
