"""Official clients of RocketMQ 5, installed from their registries as locked, run as programs.

Each program takes a task as JSON and prints its result. Installations are kept in build/clients and
shared by all tests and workers. A test is skipped if the toolchain is missing.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[2]
SOURCES = Path(__file__).with_name("clients")
INSTALLED = REPO / "build" / "clients"
LOCKS = {
    "python": "requirements.lock",
    "node": "package-lock.json",
    "java": "pom.xml",
    "rust": "Cargo.lock",
    "go": "go.sum",
}
TOOLS = {"node": ("node", "npm"), "java": ("mvn", "javac"), "rust": ("cargo",), "go": ("go",)}
SOURCE_ENDS = (".java", ".rs", ".go")
LANGUAGES = ("python", "node")
"""Languages of every run; `make clients` adds more."""
_CHOSEN = tuple(os.environ.get("BATON_CLIENTS", "").split())  # noqa: TID251  a run by hand
MORE = tuple(language for language in _CHOSEN if language in LOCKS)
FEATURES = (*LANGUAGES, *MORE)
LACKS: Mapping[str, frozenset[str]] = {
    "rust": frozenset({"push", "give back", "recall", "namespaces", "tls"}),
}
"""What a language's client has no function for; that of Rust is the crate `rocketmq` 5.0.0."""
STUBS = ("node", *(language for language in _CHOSEN if language == "go"))
"""Languages of the plain stubs in examples/stubs."""
COMPILE_S = 1_500 if MORE else 0
"""Time that the first test needs beyond its own: it compiles the further clients."""
_INSTALL_S = 1_200
_PATH = "/usr/local/bin:/usr/bin:/bin"


class OfficialClient:
    """One language's client.

    Attributes:
        folder: Where it is installed.
    """

    def __init__(self, language: str, folder: Path) -> None:
        self.language, self.folder = language, folder

    async def run(self, task: Mapping[str, Any], **environment: str) -> dict[str, Any]:
        """Run a task to its end and return its result; the test's time limit holds.

        Args:
            environment: Further variables of its environment.
        """
        process = await asyncio.create_subprocess_exec(
            *self.command,
            json.dumps(task),
            env={**self.environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        try:
            out, err = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode == 0, f"{self.language}: {err.decode()[-2_000:]}"
        result: dict[str, Any] = json.loads(out.decode().splitlines()[-1])
        return result

    @property
    def command(self) -> Sequence[str]:
        """The program and its fixed arguments."""
        if self.language == "python":
            program = str(self.folder / "bin" / "python")
            return program, str(SOURCES / "python" / "client.py")
        if self.language == "java":
            paths = f"{self.folder / 'lib'}/*:{self.folder}"
            return shutil.which("java") or "java", "-cp", paths, "Client"
        if self.language in ("rust", "go"):
            return (str(self.folder / "client"),)
        return "node", str(SOURCES / "node" / "client.js")

    @property
    def environment(self) -> Mapping[str, str]:
        """Its whole environment: the clients write logs into their home."""
        paths = f"{Path(shutil.which('node') or '/usr/bin/node').parent}:{_PATH}"
        return {
            "PATH": paths,
            "LC_ALL": "C.UTF-8",  # Java reads its arguments by it
            "HOME": str(self.folder),
            "NODE_PATH": str(self.folder / "node_modules"),
        }


def official_client(language: str) -> OfficialClient:
    """Return the client of a language, installed; skip the test if its toolchain is missing."""
    lock = SOURCES / language / LOCKS[language]
    missing = [tool for tool in TOOLS.get(language, ()) if not shutil.which(tool)]
    if missing:
        pytest.skip(f"NO {missing} ON PATH: the official client of {language} is not tested")
    compiled = sorted(path for path in lock.parent.rglob("*") if path.suffix in SOURCE_ENDS)
    contents = b"".join(path.read_bytes() for path in (lock, *compiled))
    digest = hashlib.sha256(contents).hexdigest()[:12]
    folder = INSTALLED / f"{language}-{digest}"
    INSTALLED.mkdir(parents=True, exist_ok=True)
    with (INSTALLED / f"{folder.name}.lock").open("w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            _install(language, lock, folder)
            (folder / "complete").touch()
    return OfficialClient(language, folder)


def _install(language: str, lock: Path, folder: Path) -> None:
    if language == "python":
        _call([sys.executable, "-m", "venv", str(folder)])
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        _call([*pip, "--disable-pip-version-check", "--require-hashes", "-r", str(lock)])
        return
    if language == "java":
        copy = ["mvn", "-q", "-B", "dependency:copy-dependencies", "-f", str(lock)]
        _call([*copy, f"-DoutputDirectory={folder / 'lib'}"])
        source = str(lock.with_name("Client.java"))
        _call(["javac", "-cp", f"{folder / 'lib'}/*", "-d", str(folder), source])
        return
    if language == "rust":
        manifest, target = str(lock.with_name("Cargo.toml")), INSTALLED / "rust-target"
        build = ["cargo", "build", "--quiet", "--release", "--locked", "--manifest-path", manifest]
        _call([*build, "--target-dir", str(target)])  # shared: the crates are compiled once
        shutil.copy(target / "release" / "client", folder / "client")
        return
    if language == "go":
        _call(["go", "vet", "-C", str(lock.parent), "."])
        _call(["go", "build", "-C", str(lock.parent), "-o", str(folder / "client"), "."])
        return
    for name in ("package.json", "package-lock.json"):
        shutil.copy(lock.with_name(name), folder)
    _call(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(folder)])


def _call(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_S, check=False)
    if done.returncode:
        pytest.skip(f"NO OFFICIAL CLIENT: {command[:4]} failed: {done.stderr[-500:]}")
