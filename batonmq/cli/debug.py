"""`baton debug …`: data for support."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from click.exceptions import Exit

from batonmq._common.clock import Clock
from batonmq.admin.diagnostics import Diagnostics
from batonmq.cli.command_classes import LazyGroup
from batonmq.cli.output import counted
from batonmq.cli.progress import progress
from batonmq.cli.service_settings import settings_of_services
from batonmq.cli.session import CommandSession, cluster_session

commands = LazyGroup("debug", help="Collect data for remote support.", no_args_is_help=True)


@commands.command()
@click.option(
    "--out",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.tar.gz",
    help="File to create.",
)
@click.option(
    "--data-dir",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Data directory of `baton up`; its last log lines are included.",
)
@cluster_session
def bundle(session: CommandSession, out: Path, data_dir: Path | None) -> None:
    """Write the state of the cluster into one archive, without changing anything.

    It has versions, nodes, topics, groups with progress and diagnoses, locks, resets, metrics and
    settings, but no message and no secret. A service that does not answer is noted in
    problems.txt, with exit status 0; the status is 1 only if the file can't be written.
    """
    try:
        with out.open("xb") as file, _unlinked_on_failure(out):
            diagnostics = session.run(_collect(session, data_dir))
            with tarfile.open(fileobj=file, mode="w:gz") as archive:
                _pack(archive, out.name.partition(".")[0], diagnostics.files)
            file.flush()
    except FileExistsError as error:
        session.output.failure("FILE_EXISTS", f"{out} exists already", "Give another name.")
        raise Exit(1) from error
    except OSError as error:
        session.output.failure("SYSTEM_ERROR", str(error), "")
        raise Exit(1) from error
    item = {"file": str(out), "files": sorted(diagnostics.files), "problems": diagnostics.problems}
    problems = counted(len(diagnostics.problems), "problem")
    session.output.line(item, f"{out}: {counted(len(diagnostics.files), 'file')}, {problems}")
    for problem in diagnostics.problems:
        session.output.note(f"  {problem}")


async def _collect(session: CommandSession, data_dir: Path | None) -> Diagnostics:
    with progress("files") as report:
        diagnostics = Diagnostics(session.nameserver, report, security=session.security)
        if data_dir is not None:
            diagnostics.add_folder(data_dir)
        try:
            diagnostics.add_json("settings-of-this-machine.json", settings_of_services())
        except OSError as error:
            diagnostics.problems.append(f"settings: {error}")
        await diagnostics.collect()
    return diagnostics


@contextmanager
def _unlinked_on_failure(file: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        file.unlink()
        raise


def _pack(archive: tarfile.TarFile, folder: str, files: dict[str, bytes]) -> None:
    for name, content in sorted(files.items()):
        entry = tarfile.TarInfo(f"{folder}/{name}")
        entry.size, entry.mtime = len(content), Clock().unix_ms() // 1000
        archive.addfile(entry, io.BytesIO(content))
