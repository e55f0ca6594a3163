"""The documentation as a site, with search and the API reference.

`make docs`, or `python -m tools.docs.site [FOLDER]`. The exit status is 1 after a warning, for
example about a broken link or a page without a menu entry.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

from tools.docs.pages import ROOT

FOLDER = ROOT / "build" / "site"
API = ROOT / "docs" / "reference" / "api"


def documented_modules() -> dict[str, Path]:
    """Return the page of the API reference of each module."""
    return {
        module: page
        for page in sorted(API.glob("*.md"))
        for module in re.findall(r"^::: ([\w.]+)$", page.read_text(), re.MULTILINE)
    }


def public_names(module: str) -> list[str]:
    """Return the names of `module.__all__`; without it, those of the classes it defines."""
    found = importlib.import_module(module)
    own = [
        name
        for name, value in vars(found).items()
        if isinstance(value, type) and value.__module__ == module and not name.startswith("_")
    ]
    return list(getattr(found, "__all__", own))


def build(folder: Path, config: Path = ROOT / "mkdocs.yml") -> int:
    """Write the site into `folder`; return the exit status."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    env = dict(os.environ) | {"NO_MKDOCS_2_WARNING": "1"}  # noqa: TID251  handed on as a whole
    done = subprocess.run(
        [*command, "--config-file", config, "--site-dir", folder], cwd=ROOT, env=env, check=False
    )
    return done.returncode


if __name__ == "__main__":
    sys.exit(build(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER))
