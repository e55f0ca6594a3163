"""Goal: damage removes the end, or flips one bit, of one file with content.

Method: folders like those of the services, many draws.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from tools.faults.file_damage import KINDS, flip, tear

SEGMENT_BYTES = 65_536


@pytest.fixture
def broker(tmp_path: Path) -> Path:
    files = {
        "log/00000000000000000000": b"x" * 1_000 + bytes(SEGMENT_BYTES - 1_000),
        "log/00000000000000065536": bytes(SEGMENT_BYTES),
        "consumequeue/faults-1/0/00000000000000000000": b"i" * 200,
        "keyindex/00000000000000000000.open": b"k" * 18,
        "checkpoint": b"c" * 100,
        "synced": b"s" * 12,
        "epochs": b"e" * 32,
        "lock": b"123",
    }
    return made(tmp_path, files)


def made(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_flip_changes_one_bit_of_one_file(broker: Path) -> None:
    hit, random = set(), Random(1)
    for _ in range(200):
        before = contents(broker)
        flip(broker, random)
        [(name, now)] = contents(broker).items() - before.items()
        [bits] = {a ^ b for a, b in zip(before[name], now, strict=True)} - {0}
        assert bits.bit_count() == 1
        hit.add(name)
    assert hit == contents(broker).keys() - {"lock", "log/00000000000000065536"}


def test_tear_removes_the_end_of_one_file(broker: Path) -> None:
    hit, random, before = set(), Random(2), contents(broker)
    for _ in range(200):
        tear(broker, random)
        [(name, now)] = contents(broker).items() - before.items()
        kept = now.rstrip(b"\0") if name.startswith("log") else now
        assert before[name].startswith(kept)
        assert kept != before[name].rstrip(b"\0")
        assert len(now) == (SEGMENT_BYTES if name.startswith("log") else len(kept))
        (broker / name).write_bytes(before[name])
        hit.add(name)
    assert hit == before.keys() - {"lock", "log/00000000000000065536"}


OFFSETS = {
    "progress/data.mdb": b"m" * 9_000,
    "progress/newest": b"n" * 44,
    "progress/lock.mdb": b"l",
}


def test_damage_to_offsets_affects_the_files_that_it_reads(tmp_path: Path) -> None:
    for damage in (flip, tear):
        damaged = set()
        for seed in range(40):
            before = contents(made(tmp_path, OFFSETS))
            damage(tmp_path, Random(seed))
            damaged |= {name for name, _ in before.items() - contents(tmp_path).items()}
        assert damaged == {"progress/data.mdb", "progress/newest"}


@pytest.mark.parametrize("kind", [*KINDS["storage"]])
def test_flip_affects_the_given_kind_of_file(broker: Path, kind: str) -> None:
    made(broker, {"floors": b"f" * 20})
    before = contents(broker)
    assert flip(broker, Random(1), kind)
    [(name, _)] = contents(broker).items() - before.items()
    assert name in {
        str(one.relative_to(broker)) for one in broker.glob(KINDS["storage"][kind].pattern)
    }


def test_flip_of_meta_pages_spares_the_other_pages(tmp_path: Path) -> None:
    made(tmp_path, {"progress/data.mdb": b"m" * 20_000})
    for kind, wanted in (("meta pages", range(8_192)), ("pages", range(8_192, 20_000))):
        for seed in range(50):
            before = contents(tmp_path)["progress/data.mdb"]
            flip(tmp_path, Random(seed), kind)
            now = contents(tmp_path)["progress/data.mdb"]
            [at] = [at for at, (a, b) in enumerate(zip(before, now, strict=True)) if a != b]
            assert at in wanted


def test_flip_of_a_kind_without_a_file_changes_nothing(broker: Path) -> None:
    before = contents(broker)
    assert flip(broker, Random(1), "floors") == ""
    assert contents(broker) == before
