"""The previous commit's wheels, unpacked, for tests with nodes and clients of two versions."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from uv import find_uv_bin

from batonmq._process.config import Settings, load
from tests.packaging.environments import ROOT, build_wheels


class UpgradeSettings(Settings):
    """Settings of tests with two versions, read from the environment."""

    revision: str = "HEAD~1"
    """Commit of the earlier version."""
    services: str = "storage"
    """Services that start with the earlier version; all: `nameserver,lockmgr,offsets,storage`."""


UPGRADE = load(UpgradeSettings, "BATON_UPGRADE")
_FOLDER = ROOT / "build" / "earlier"


def earlier_version() -> Path:
    """Return a folder for PYTHONPATH with client and services of the earlier version.

    It is built once for each commit. Without git history the test is skipped.
    """
    commit = _commit()
    site = _FOLDER / commit / "site"
    if site.exists():
        return site
    shutil.rmtree(_FOLDER, ignore_errors=True)
    source = _FOLDER / commit / "source"
    source.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True)
    subprocess.run(["tar", "-x"], cwd=source, input=archive.stdout, check=True)
    wheels = build_wheels(source.parent / "wheels", (source, source / "services"))
    unpacked = source.parent / "unpacked"
    command = [find_uv_bin(), "pip", "install", "--quiet", "--no-deps", "--target", str(unpacked)]
    subprocess.run([*command, *map(str, wheels.glob("*.whl"))], check=True)
    shutil.rmtree(source)
    return unpacked.rename(site)


def _commit() -> str:
    command = ["git", "rev-parse", "--verify", "--quiet", f"{UPGRADE.revision}^{{commit}}"]
    try:
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("git was not found: the earlier version can't be built")
    if found.returncode:
        pytest.skip(f"no git history with {UPGRADE.revision}: the earlier version can't be built")
    return found.stdout.strip()
