"""`baton fsck`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import click
from click.exceptions import Exit

from batonmq.cli.output import OutputFormat
from batonmq.cli.session import local_session, open_session


@click.command("fsck")
@argument(
    "folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Data directory of a storage node that is stopped.",
)
@click.option("--repair", is_flag=True, help="Make the indexes anew; the log is never changed.")
@local_session
def fsck(session: CommandSession, folder: Path, repair: bool) -> None:
    """Check every batch a storage node has, and its indexes against them.

    Status 0 if everything is right or was repaired, 1 if there are problems or the directory is in
    use.
    """
    chosen = open_session(context, None, form).output.form
    command = [
        sys.executable,
        "-m",
        "batonmq_server.storage.fsck",
        str(folder),
        "--format",
        "json" if chosen is OutputFormat.JSON else "table",
    ]
    # Not an import: the command is installed where services are not. -P: a folder called
    # `services` where the command was given is not ours.
    done = subprocess.run([*command, *(["--repair"] if repair else [])], check=False)
    raise Exit(done.returncode)
