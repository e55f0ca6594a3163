"""`baton fsck`: check the data directory of a stopped storage node."""

from __future__ import annotations

from pathlib import Path

import click
from click.exceptions import Exit

from batonmq.cli.command_classes import argument, command
from batonmq.cli.output import OutputFormat
from batonmq.cli.session import CommandSession, local_session
from batonmq_server.storage import fsck as storage_fsck


@command("fsck")
@argument(
    "folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Data directory of a stopped storage node.",
)
@click.option(
    "--repair", is_flag=True, help="Rebuild the indexes from the log; the log is never changed."
)
@local_session
def fsck(session: CommandSession, folder: Path, repair: bool) -> None:
    """Check every batch of a storage node, and its indexes against the batches.

    Exit status 0 if there are no problems or they were repaired, 1 if there are problems or the
    directory is in use.
    """
    form = "json" if session.output.form is OutputFormat.JSON else "table"
    arguments = [str(folder), "--format", form, *(["--repair"] if repair else [])]
    raise Exit(storage_fsck.main(arguments))
