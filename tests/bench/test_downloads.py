"""Goal: only files with the expected checksums are used, and a failure names its reason.

Method: folders with hand-made files, and small programs instead of Maven and Go.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import pytest

from bench.peers import downloads
from bench.peers.downloads import HERE, PeerFailed, check, checksums, command, jars


def test_files_with_their_checksums_are_accepted(tmp_path: Path) -> None:
    (tmp_path / "a.jar").write_bytes(b"a")
    digest = hashlib.sha256(b"a").hexdigest()
    check(tmp_path, checksums(f"{digest}  a.jar\n"))


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"a.jar": b"b"}, "a.jar has the SHA-256 3e23e816"),
        ({}, "a.jar was not downloaded"),
        ({"a.jar": b"a", "b.jar": b"b"}, "b.jar was downloaded but has no checksum"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, files: dict[str, bytes], reason: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(PeerFailed, match=reason):
        check(tmp_path, {"a.jar": hashlib.sha256(b"a").hexdigest()})


@pytest.mark.parametrize("peer", ["kafka", "rocketmq"])
def test_every_peer_with_jars_has_pinned_versions_and_checksums(peer: str) -> None:
    assert "<version>LATEST" not in (HERE / peer / "pom.xml").read_text()
    expected = checksums((HERE / peer / "jars.sha256").read_text())
    assert any(name.startswith(peer) for name in expected)
    assert {len(digest) for digest in expected.values()} == {64}


async def test_program_that_is_not_installed_is_reported_with_the_remedy() -> None:
    with pytest.raises(PeerFailed, match=r"no-such-program is not installed\. Install it\."):
        await command("no-such-program", remedy="Install it.")


async def test_program_that_fails_is_reported_with_the_end_of_its_output() -> None:
    with pytest.raises(PeerFailed, match=r"failed \(1\): no network"):
        await command(sys.executable, "-c", "raise SystemExit('no network')")


async def test_program_that_takes_too_long_is_ended() -> None:
    with pytest.raises(PeerFailed, match=r"did not end within 0.2 s"):
        await command(sys.executable, "-c", "import signal; "
                      "signal.pause()", timeout_s=0.2)  # fmt: skip


async def test_download_that_fails_leaves_nothing_that_is_used_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloads, "CACHE", tmp_path)
    calls: list[str] = []

    async def maven(*arguments: str, **_: object) -> str:
        (output,) = [a for a in arguments if a.startswith("-DoutputDirectory=")]
        folder = Path(output.partition("=")[2])
        calls.append(folder.name)
        (folder / "half.jar").write_bytes(b"")
        raise PeerFailed("mvn failed (1): no network")

    monkeypatch.setattr(downloads, "command", maven)
    for _ in range(2):
        with pytest.raises(PeerFailed, match="no network"):
            await jars("kafka")
    assert len(calls) == 2
