"""Goal: a child that ends unexpectedly is reported and restarted, up to a limit.

Method: real processes that run a few lines of Python, killed by the test; the reports are
collected.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from batonmq._common.backoff import Backoff
from batonmq_server.local.child_process import ChildProcess, Program
from batonmq_server.local.cluster import to_stderr
from batonmq_server.local.supervisor import DEATHS_MAX, RestartLimitExceeded, Supervisor
from tests.support.conditions import lives, until

SLEEPER = "import time; print('up', flush=True); time.sleep(600)"


def _child(tmp_path: Path, code: str, name: str = "child") -> ChildProcess:
    log_path = tmp_path / f"{name}.log"

    async def is_up() -> bool:
        return bool(child.last_lines(1))

    command = [sys.executable, "-c", code]
    child = ChildProcess(Program(name=name, command=command, log_path=log_path, is_ready=is_up))
    return child


@asynccontextmanager
async def _watched(child: ChildProcess, reports: list[str]) -> AsyncIterator[Supervisor]:
    supervisor = Supervisor(reports.append, auto_restart=True)
    supervisor.add(child)
    async with asyncio.TaskGroup() as tasks:
        await supervisor.ready(child.name)
        watching = tasks.create_task(supervisor.watch(child.name))
        yield supervisor
        watching.cancel()
    await supervisor.stop_all([[child.name]])


async def test_killed_child_is_reported_and_started_again(tmp_path: Path) -> None:
    reports: list[str] = []
    async with _watched(_child(tmp_path, SLEEPER), reports) as supervisor:
        first = supervisor.pid("child")
        await supervisor.kill("child")
        await supervisor.serving("child")
        assert supervisor.pid("child") not in (None, first)
        await until(lambda: len(reports) == 3)
        assert reports[0].startswith("child ended: SIGKILL; the end of ")
        assert reports[0].endswith("\n    up")
        assert reports[1].startswith("child starts again in ")
        assert reports[2] == f"child is ready again: pid {supervisor.pid('child')}"


async def test_without_auto_restart_a_child_is_not_restarted(tmp_path: Path) -> None:
    reports: list[str] = []
    async with _watched(_child(tmp_path, SLEEPER), reports) as supervisor:
        supervisor.auto_restart = False
        await supervisor.kill("child")
        await until(lambda: reports)
        assert supervisor.pid("child") is None
        await supervisor.start("child")
        assert supervisor.pid("child") is not None
        assert len(reports) == 1


async def test_stopped_child_is_not_reported(tmp_path: Path) -> None:
    reports: list[str] = []
    async with _watched(_child(tmp_path, SLEEPER), reports) as supervisor:
        await supervisor.stop("child")
        await supervisor.start("child")
        await supervisor.kill("child")
        await supervisor.serving("child")
        assert [report.split("\n")[0].split(";")[0] for report in reports][:1] == [
            "child ended: SIGKILL"
        ]


async def test_suspended_child_is_alive_and_resumes(tmp_path: Path) -> None:
    counter = "import time\nwhile True: print('tick', flush=True); time.sleep(0.005)"
    reports: list[str] = []
    child = _child(tmp_path, counter)
    async with _watched(child, reports) as supervisor:
        supervisor.send("child", signal.SIGSTOP)
        pid = supervisor.pid("child")
        await until(lambda: Path(f"/proc/{pid}/stat").read_text().split()[2] == "T")
        before = child.program.log_path.stat().st_size
        supervisor.send("child", signal.SIGCONT)
        await until(lambda: child.program.log_path.stat().st_size > before)
        assert supervisor.pid("child") == pid
        assert reports == []


async def test_child_that_keeps_ending_exceeds_the_restart_limit(tmp_path: Path) -> None:
    reports: list[str] = []
    backoff = Backoff(first_ms=2, delay_ms_max=2)
    supervisor = Supervisor(reports.append, auto_restart=True, backoff=backoff)
    supervisor.add(_child(tmp_path, "import sys; print('no disk'); sys.exit(3)"))
    with pytest.raises(RestartLimitExceeded, match=f"ended {DEATHS_MAX + 1} times within 60 s"):
        await supervisor.watch("child")
    ends = [report for report in reports if report.startswith("child ended: exit code 3")]
    assert len(ends) == DEATHS_MAX + 1
    assert all("no disk" in end for end in ends)


async def test_stop_all_stops_wave_by_wave(tmp_path: Path) -> None:
    marker = tmp_path / "order"
    code = f"""
import signal, sys, time
def end(*_):
    with open({str(marker)!r}, "a") as f: f.write('NAME ')
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("up", flush=True)
time.sleep(600)
"""
    supervisor = Supervisor(to_stderr, auto_restart=True)
    for name in ("base", "top"):
        supervisor.add(_child(tmp_path, code.replace("NAME", name), name))
    for name in supervisor:
        await supervisor.ready(name)
    await supervisor.stop_all([["top"], ["base"], ["absent"]])
    assert marker.read_text().split() == ["top", "base"]
    assert [supervisor.pid(name) for name in supervisor] == [None, None]


async def test_cancelled_stop_all_kills_the_rest(tmp_path: Path) -> None:
    code = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEPER}"
    reports: list[str] = []
    supervisor = Supervisor(reports.append, auto_restart=True)
    supervisor.add(_child(tmp_path, code))
    await supervisor.ready("child")
    pid = supervisor.pid("child")
    assert pid is not None
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await supervisor.stop_all([["child"]])
    assert not lives(pid)
    assert reports == ["child was killed"]
