"""The environment of child processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def with_absolute_python_path(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for a child process that has another working directory."""
    path = env.get("PYTHONPATH")
    if not path:
        return dict(env)
    folders = (str(Path(folder).absolute()) for folder in path.split(os.pathsep))
    return {**env, "PYTHONPATH": os.pathsep.join(folders)}
