"""`python -m batonmq_server.offsets.verify FOLDER`: exit status 0 if stored progress is undamaged.

Runs as a process of its own: LMDB trusts the offsets in its file, so a damaged file can make it
read outside of the file, which kills the process (SIGBUS, SIGSEGV). Nothing is written.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import lmdb

from batonmq.errors import DataLoss
from batonmq_server.offsets.codec import unseal
from batonmq_server.offsets.newest_position import (
    check_not_rolled_back,
    read_position,
    recorded_position,
)
from batonmq_server.offsets.persistence import FORMAT


def verify(folder: Path) -> None:
    """Read every entry, and every used or free page.

    Raises:
        DataLoss, lmdb.Error: the stored progress is damaged, or confirmed writes are missing.
    """
    newest = recorded_position(folder)
    with (
        lmdb.open(str(folder), readonly=True, create=False, readahead=True) as environment,
        Path(os.devnull).open("wb") as sink,
    ):
        check_not_rolled_back(folder, read_position(environment), newest)
        with environment.begin() as transaction:
            for key, value in transaction.cursor():
                if key != FORMAT:
                    unseal(key, value)
        environment.copyfd(sink.fileno(), compact=True)


if __name__ == "__main__":
    try:
        verify(Path(sys.argv[1]))
    except (DataLoss, lmdb.Error) as error:
        sys.exit(f"{error}")
