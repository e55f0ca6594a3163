"""Goal: an editable installation uses the files of the repository, and no copy of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

REPO = Path(__file__).resolve().parents[2]
BUILD = "import sys; from hatchling.build import build_editable; build_editable(sys.argv[1])"


@pytest.mark.parametrize("project", [".", "services", "spark-jobs"])
def test_editable_wheel_has_no_modules(tmp_path: Path, project: str) -> None:
    subprocess.run([sys.executable, "-c", BUILD, tmp_path], cwd=REPO / project, check=True)
    (wheel,) = tmp_path.iterdir()
    with ZipFile(wheel) as file:
        assert [name for name in file.namelist() if name.endswith(".py")] == []
