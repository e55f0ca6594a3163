"""Goal: a power cut loses everything that was not synced, and nothing else.

Method: a mounted image in a namespace of its own; the mounts of the machine stay as they are.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cluster import REPO
from tools.faults.power import can_cut_power

SCRIPT = """
import os, sys
from pathlib import Path
from tools.faults.power import PowerDisks

folder = Path(sys.argv[1])
folders = {name: folder / name for name in "ab"}
with PowerDisks(folder / "images", folders) as disks:
    for one in folders.values():
        with (one / "synced").open("wb") as file:
            file.write(b"synced")
            file.flush()
            os.fsync(file.fileno())
            file.write(b" unsynced")
        (one / "unsynced file").write_bytes(b"x")
    disks.cut("a")
    try:
        (folders["a"] / "late").write_bytes(b"x")
        print("written after the cut")
    except OSError:
        pass
    print(disks.restore("a"))
    for one in folders.values():
        print((one / "synced").read_bytes(), (one / "unsynced file").exists())
"""


@pytest.mark.e2e
def test_power_cut_loses_only_what_was_not_synced(tmp_path: Path) -> None:
    if not can_cut_power():
        pytest.skip("NOT TESTED: no file system may be mounted here")
    before = Path("/proc/mounts").read_text()
    command = ["unshare", "--mount", "/usr/bin/env", f"PYTHONPATH={REPO}", sys.executable]
    done = subprocess.run(
        [*command, "-W", "ignore", "-c", SCRIPT, str(tmp_path)],
        cwd=REPO, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "[]", "b'synced' False", "b'synced unsynced' True"
    ]  # fmt: skip
    assert Path("/proc/mounts").read_text() == before
