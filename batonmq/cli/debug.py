"""`baton debug …`."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Annotated

import click
from click.exceptions import Exit

from batonmq._common.clock import Clock
from batonmq.admin.diagnostics import Diagnostics
from batonmq.cli.output import counted
from batonmq.cli.progress import progress
from batonmq.cli.service_settings import settings_of_services
from batonmq.cli.session import CommandSession, local_session, cluster_session, open_session

app = click.Group(help="Collect what somebody needs who helps from afar.", no_args_is_help=True)


@app.callback()
def debug() -> None:
    """Collect what somebody needs who helps from afar."""


@app.command()
@click.option(
    "--out",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.tar.gz",
    help="File to be made.",
)
@click.option(
    "--data-dir",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="With the ends of the logs of the cluster that `baton up` keeps here.",
)
@cluster_session
def bundle(session: CommandSession, out: Path, data_dir: Path | None) -> None:
    """Put what the cluster says of itself into one file: nothing in it is changed.

    Versions, nodes, topics, groups with progress and why they are stuck, locks, resets, metrics,
    settings; no message, no secret. What does not answer is noted in problems.txt; the status is
    0 then, too: 1 only if there is no file.
    """
    try:
        with out.open("xb") as file:
            found = session.run(_collected(session, data_dir))
            with tarfile.open(fileobj=file, mode="w:gz") as archive:
                _pack(archive, out.name.partition(".")[0], found.files)
    except FileExistsError as error:
        session.output.failure("FILE_EXISTS", f"{out} is there already", "Give another name.")
        raise Exit(1) from error
    except OSError as error:
        session.output.failure("SYSTEM_ERROR", str(error), "")
        raise Exit(1) from error
    except BaseException:
        out.unlink()
        raise
    item = {"file": str(out), "files": sorted(found.files), "problems": found.problems}
    problems = counted(len(found.problems), "problem")
    session.output.line(item, f"{out}: {counted(len(found.files), 'file')}, {problems}")
    for problem in found.problems:
        session.output.note(f"  {problem}")


async def _collected(session: CommandSession, data_dir: Path | None) -> Diagnostics:
    with progress("files") as told:
        found = Diagnostics(session.nameserver, told, security=session.security)
        if data_dir is not None:
            found.add_folder(data_dir)
        try:
            found.add_json("settings-of-this-machine.json", settings_of_services())
        except OSError as error:
            found.problems.append(f"settings: {error}")
        await found.collect()
    return found


def _pack(archive: tarfile.TarFile, folder: str, files: dict[str, bytes]) -> None:
    for name, content in sorted(files.items()):
        entry = tarfile.TarInfo(f"{folder}/{name}")
        entry.size, entry.mtime = len(content), Clock().unix_ms() // 1000
        archive.addfile(entry, io.BytesIO(content))
