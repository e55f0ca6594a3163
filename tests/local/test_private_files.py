"""Goal: a key file is never found half written, and only its owner may read it.

Method: a disk without room for the content of a file, by a limit of the kernel.
"""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from batonmq_server.local.layout import _make_sealing_key
from batonmq_server.runtime.access.sealing import read_sealing_keys


@contextmanager
def full_disk() -> Iterator[None]:
    """Let files be created, but not written."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_key_that_could_not_be_written_is_made_at_the_next_start(tmp_path: Path) -> None:
    key = tmp_path / "sealing.key"
    with full_disk(), pytest.raises(OSError, match="too large"):
        _make_sealing_key(key)
    assert not key.exists()
    _make_sealing_key(key)
    read_sealing_keys(str(key))
    assert key.stat().st_mode & 0o777 == 0o600
