"""Empty virtual environments, and the wheels of this repository to install into them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from uv import find_uv_bin

ROOT = Path(__file__).parents[2]
PROJECTS = (ROOT, ROOT / "services", ROOT / "spark-jobs")


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment.

    Attributes:
        folder: Where it is; also the working directory of what runs in it, so that nothing of
            the checkout is importable.
    """

    folder: Path

    def program(self, name: str) -> str:
        return str(self.folder / "bin" / name)

    def start(
        self, *command: str | Path, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start a program of the environment; its output is in one pipe."""
        return subprocess.Popen(
            [self.program(str(command[0])), *command[1:]],
            cwd=self.folder,
            env=_clean_environment() | dict(env or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(
        self, *command: str | Path, env: Mapping[str, str] | None = None, timeout_s: float = 120
    ) -> str:
        """Run a program that has to succeed; return its output."""
        process = self.start(*command, env=env)
        output, _ = process.communicate(timeout=timeout_s)
        assert process.returncode == 0, output
        return output

    def packages(self) -> dict[str, str]:
        """Return the version of every installed distribution by name."""
        command = [find_uv_bin(), "pip", "freeze", "--python", self.program("python")]
        lines = _output(command).splitlines()
        return dict(line.replace(" @ ", "==").split("==", 1) for line in lines if line)

    def size_bytes(self) -> int:
        """Return the size of all installed files without compiled bytecode."""
        files = self.site_packages().rglob("*")
        return sum(f.stat().st_size for f in files if f.is_file() and f.suffix != ".pyc")

    def site_packages(self) -> Path:
        (folder,) = (self.folder / "lib").glob("python*/site-packages")
        return folder


def build_wheels(folder: Path, projects: Sequence[Path] = PROJECTS) -> Path:
    """Build distributions, all three by default, as `make wheels` does."""
    for project in projects:
        command = [sys.executable, "-m", "build", "--wheel", "--no-isolation"]
        _output([*command, "--outdir", str(folder), str(project)])
    return folder


def new_environment(folder: Path, wheels: Path, *requirements: str) -> Environment:
    """Install `requirements` and nothing else, other packages in the versions of the lock file."""
    environment = Environment(folder)
    lock = (ROOT / "requirements.lock").read_text().splitlines()
    constraints = folder.with_suffix(".constraints")
    constraints.write_text("\n".join(line.split(" \\")[0] for line in lock if "==" in line))
    venv = [find_uv_bin(), "venv", "--quiet", "--no-python-downloads", "--python", sys.executable]
    _output([*venv, str(folder)])
    pip = [find_uv_bin(), "pip", "install", "--quiet", "--python", environment.program("python")]
    options = ["--find-links", str(wheels), "--constraint", str(constraints)]
    # uv asks the index about all that it has cached. If the index has another date for the sources
    # of pyspark (400 MB), uv downloads and builds them again.
    cached = subprocess.run(
        [*pip, "--offline", *options, *requirements], check=False, capture_output=True
    )
    if cached.returncode != 0:
        _output([*pip, *options, *requirements])
    return environment


def _clean_environment() -> dict[str, str]:
    """Return the environment variables without those that make the checkout importable."""
    hidden = ("PYTHONPATH", "VIRTUAL_ENV")
    inherited = os.environ.items()  # noqa: TID251  handed on as a whole
    return {k: v for k, v in inherited if k not in hidden and not k.startswith("BATON_")}


def _output(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout
