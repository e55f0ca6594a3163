"""What CI runs can't be green by skipping.

Goal: every program without which tests of this folder are skipped is there before they run, or CI
fails and says which package is missing. Method: the script with a PATH on which there is only what
a test puts there.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

SCRIPT = ROOT / ".ci" / "run"
PROGRAMS = ("prometheus", "promtool", "openssl", "shellcheck", "kubectl")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A machine that has no more than the script itself needs, and a `make` that says its verb."""
    for name in ("bash", "dirname", "env", "sort"):
        found = shutil.which(name)
        assert found is not None
        (tmp_path / name).symlink_to(found)
    _program(tmp_path / "make", 'echo "make $1 CI=$CI"')
    return tmp_path


def _program(at: Path, text: str) -> None:
    at.write_text(f"#!/usr/bin/env bash\n{text}\n")
    at.chmod(0o755)


def run(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [SCRIPT], env={"PATH": str(path)}, check=False, capture_output=True, text=True
    )


def test_what_is_missing_and_not_to_be_had_is_named_and_nothing_runs(path: Path) -> None:
    _program(path / "apt-get", "exit 100")
    done = run(path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "could not install them: kubectl openssl prometheus shellcheck\n" in done.stderr


def test_what_is_missing_is_installed_first(path: Path) -> None:
    _program(path / "kubectl", "")
    installed = "".join(
        f"printf '#!/bin/sh\\n' >{path}/{name}; /bin/chmod +x {path}/{name}\n"
        for name in PROGRAMS
        if name != "kubectl"
    )
    _program(path / "apt-get", f'echo "$*"\n[ "$1" = update ] && exit 0\n{installed}')
    done = run(path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "update",
        "install --yes --no-install-recommends openssl prometheus shellcheck",
        *(f"make {verb} CI=true" for verb in ("lint", "k8s", "test")),
    ]


def test_a_verb_that_fails_fails_it(path: Path) -> None:
    for name in PROGRAMS:
        _program(path / name, "")
    _program(path / "make", '[ "$1" != k8s ] && echo "$1"')
    done = run(path)
    assert (done.returncode, done.stdout) == (1, "lint\n")


def test_programs_that_tests_ask_for_are_those_that_it_brings() -> None:
    files = [*(ROOT / "tests" / "deploy").glob("*.py"), *(ROOT / "tests" / "local").glob("*.py")]
    asked = {
        name
        for file in files
        if file.name != Path(__file__).name
        for name in re.findall(r'shutil\.which\("([\w-]+)"\)', file.read_text())
    }
    assert asked <= set(PROGRAMS)
    assert {name for name in PROGRAMS if f"{name}:" in SCRIPT.read_text()} == set(PROGRAMS)
