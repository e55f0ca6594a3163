"""Goal: checksums are those of the package crc32c, without the time that its import takes.

Method: values of RFC 3720 and of the package; a fresh interpreter; a package without an extension.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import crc32c as package
import pytest

from batonmq._core import checksum

VALUES = [
    (b"123456789", 0xE3069283),
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
]


@pytest.mark.parametrize(("data", "expected"), VALUES)
def test_the_values_of_rfc_3720(data: bytes, expected: int) -> None:
    assert checksum.crc32c(data) == expected
    assert checksum.crc32c(data[5:], checksum.crc32c(memoryview(data)[:5])) == expected


def test_the_extension_is_found_where_the_package_is_installed() -> None:
    alone = checksum.extension_alone()
    assert alone is not None
    assert alone(b"123456789") == package.crc32c(b"123456789")


def test_the_package_is_not_imported() -> None:
    imports = "import sys, batonmq._core.checksum; print('crc32c' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", imports], check=True, capture_output=True)
    assert done.stdout.split() == [b"False"]


def test_without_an_extension_to_load_the_package_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "crc32c").mkdir()
    (tmp_path / "crc32c" / "__init__.py").write_text("def crc32c(data, value=0): return 7")
    program = "from batonmq._core.checksum import crc32c; print(crc32c(b''))"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    assert done.stdout.split() == [b"7"]


def test_without_the_package_the_import_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    assert checksum.extension_alone() is None
