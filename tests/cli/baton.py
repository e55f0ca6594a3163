"""Run the `baton` command, in this process or in one of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from batonmq.cli.app import baton as baton_command
from batonmq_server.local.ports import keep_ports

BATON = (sys.executable, "-m", "batonmq.cli")


@dataclass(frozen=True)
class CommandResult:
    """The exit status and the output of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Standard output as one JSON document."""
        return json.loads(self.out)

    @property
    def json_lines(self) -> list[Any]:
        """Standard output as one JSON document per line."""
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def rows(self) -> list[dict[str, str]]:
        """Standard output as a table, up to the first empty line."""
        table = self.out.partition("\n\n")[0]
        heading, *lines = [line.split() for line in table.splitlines()]
        return [dict(zip(heading, line, strict=True)) for line in lines]


def baton(*arguments: str) -> CommandResult:
    """Run a command in this process, which saves the start of an interpreter."""
    result = CliRunner().invoke(baton_command, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return CommandResult(result.exit_code, result.stdout, result.stderr)


@dataclass(frozen=True)
class RunningCluster:
    """A `baton up` that has printed its addresses."""

    process: subprocess.Popen[bytes]
    announced: dict[str, Any]
    stderr: Path

    @property
    def nameserver(self) -> str:
        """host:port of its nameserver."""
        return str(self.announced["nameserver"])

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the children at the start."""
        return {e["name"]: int(e["pid"]) for e in self.announced["endpoints"]}

    def running(self, name: str) -> int:
        """Return the process id of the child of this name, which may have been restarted."""
        (pid,) = (
            pid for pid in _descendants(self.process.pid) if _about(pid, "comm").strip() == name
        )
        return pid

    def stderr_text(self) -> str:
        """Return what the process has printed on standard error."""
        return self.stderr.read_text()

    def __call__(self, *arguments: str) -> CommandResult:
        """Run a command against the cluster."""
        return baton("--nameserver", self.nameserver, *arguments)

    @contextmanager
    def started(self, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run a command against the cluster in a process of its own."""
        with subprocess.Popen(
            [*BATON, "--nameserver", self.nameserver, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def interrupt(self) -> int:
        """Press Ctrl-C; return the exit status."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(60)


@contextmanager
def up(data_dir: Path, *options: str, command: Sequence[str] = BATON) -> Iterator[RunningCluster]:
    """Run `baton up` on `data_dir`; it is killed at the end if it is still running.

    The port of its nameserver is chosen in advance, because the preferred port may be used by
    another cluster when this one is started again. Without `--console` there is no console.
    """
    ports = data_dir / "ports.json"
    if not ports.exists():
        keep_ports(ports, ["nameserver"])
    arguments = [*command, "--format", "json", "up", "--data-dir", str(data_dir), *options]
    if "--console" not in options:
        arguments.append("--no-console")
    stderr = data_dir.with_name(f"{data_dir.name}.stderr")
    with (
        stderr.open("wb") as file,
        subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=file) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, stderr.read_text()
            yield RunningCluster(process, json.loads(line), stderr)
        finally:
            process.kill()


def _descendants(pid: int) -> Iterator[int]:
    for child in map(int, _about(pid, f"task/{pid}/children").split()):
        yield child
        yield from _descendants(child)


def _about(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
        return ""
