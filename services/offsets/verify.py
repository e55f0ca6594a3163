"""`python -m batonmq_server.offsets.verify FOLDER`: exit status 0 if the stored progress is whole.

A process of its own: LMDB follows what stands in its file, and a damaged file can lead it outside
of it, which ends the process (SIGBUS, SIGSEGV). Nothing is written.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import lmdb

from batonmq.errors import DataLoss
from batonmq_server.offsets.codec import unseal
from batonmq_server.offsets.persistence import FORMAT


def verify(folder: Path) -> None:
    """Read everything, and walk over all that is used or free.

    Raises:
        DataLoss, lmdb.Error: something is not as it was written.
    """
    with (
        lmdb.open(str(folder), readonly=True, create=False, readahead=True) as environment,
        Path(os.devnull).open("wb") as nowhere,
    ):
        with environment.begin() as transaction:
            for key, value in transaction.cursor():
                if key != FORMAT:
                    unseal(key, value)
        environment.copyfd(nowhere.fileno(), compact=True)


if __name__ == "__main__":
    try:
        verify(Path(sys.argv[1]))
    except (DataLoss, lmdb.Error) as error:
        sys.exit(f"{error}")
