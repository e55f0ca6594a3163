"""Goal: child processes are started, watched and stopped, and end with their parent.

Method: real processes that run a few lines of Python; conditions are waited for, never times.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from batonmq_server.local import child_process
from batonmq_server.local.child_process import ChildProcess, NotReady, Program
from tests.support.conditions import lives, until
from tests.support.parent import assert_child_is_killed_with_its_parent

SLEEPER = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEPER}"


def _child(tmp_path: Path, code: str, **env: str) -> ChildProcess:
    log_path = tmp_path / "logs" / "child.log"

    async def is_up() -> bool:
        return log_path.exists() and "up" in log_path.read_text()

    command = [sys.executable, "-c", code]
    return ChildProcess(
        Program(
            name="child",
            command=command,
            log_path=log_path,
            is_ready=is_up,
            env=env,
            drop=("PRIVATE_",),
        )
    )


async def test_stop_sends_sigterm(tmp_path: Path) -> None:
    child = _child(tmp_path, SLEEPER)
    child.spawn()
    await child.ready(20)
    assert child.should_run
    assert await child.stop(20)
    assert (child.returncode, child.pid, child.should_run) == (-signal.SIGTERM, None, False)


async def test_stop_ends_a_suspended_process(tmp_path: Path) -> None:
    child = _child(tmp_path, SLEEPER)
    child.spawn()
    await child.ready(20)
    child.send(signal.SIGSTOP)
    assert await child.stop(20)


async def test_stop_kills_a_process_that_ignores_sigterm(tmp_path: Path) -> None:
    child = _child(tmp_path, STUBBORN)
    child.spawn()
    await child.ready(20)
    assert not await child.stop(0.1)
    assert child.returncode == -signal.SIGKILL


async def test_kill_reaches_grandchildren(tmp_path: Path) -> None:
    code = f"""
import subprocess, sys
inner = subprocess.Popen([sys.executable, "-c", {SLEEPER!r}])
print("pid", inner.pid, flush=True)
inner.wait()
"""
    child = _child(tmp_path, code)
    child.spawn()
    await child.ready(20)
    await until(lambda: len(child.last_lines(5)) == 2)
    inner = int(next(line for line in child.last_lines(5) if line.startswith("pid")).split()[1])
    child.kill_now()
    await until(lambda: not lives(inner))


async def test_process_that_ends_before_it_is_ready_is_reported_with_its_exit_status(
    tmp_path: Path,
) -> None:
    child = _child(tmp_path, "import sys; print('no such disk'); sys.exit(7)")
    child.spawn()
    with pytest.raises(NotReady, match=r"child ended \(exit code 7\) before it was ready"):
        await child.ready(20)
    assert child.last_lines(3) == ["no such disk"]


async def test_process_that_is_never_ready_times_out(tmp_path: Path) -> None:
    child = _child(tmp_path, "import time; time.sleep(600)")
    child.spawn()
    with pytest.raises(NotReady, match="was not ready after"):
        await child.ready(0.1)
    child.kill_now()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the end is found by polling")
async def test_end_is_noticed_without_polling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = _child(tmp_path, SLEEPER)
    child.spawn()
    await child.ready(20)
    monkeypatch.setattr(child_process, "_POLL_S", 1_000.0)
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(child.ended())
        await asyncio.sleep(0)
        child.send(signal.SIGKILL)
    assert waiting.result() == -signal.SIGKILL


@pytest.mark.skipif(sys.platform != "linux", reason="descriptors are listed in /proc")
async def test_cancelled_wait_for_the_end_leaves_no_descriptor(tmp_path: Path) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    child = _child(tmp_path, SLEEPER)
    child.spawn()
    await child.ready(20)
    before = descriptors()
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(child.ended())
        await asyncio.sleep(0)
        assert descriptors() == before + 1
        waiting.cancel()
    assert descriptors() == before
    assert await child.stop(20)


async def test_unexpected_end_keeps_should_run(tmp_path: Path) -> None:
    child = _child(tmp_path, SLEEPER)
    child.spawn()
    child.send(signal.SIGKILL)
    assert await child.ended() == -signal.SIGKILL
    assert child.should_run


async def test_environment_is_inherited_without_dropped_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIVATE_KEY", "inherited")
    monkeypatch.setenv("SHARED_KEY", "inherited")
    names = ("PRIVATE_KEY", "SHARED_KEY", "OWN_KEY")
    child = _child(
        tmp_path, f"import os; print([os.environ.get(n) for n in {names}])", OWN_KEY="added"
    )
    child.spawn()
    assert await child.ended() == 0
    assert child.last_lines(1) == ["[None, 'inherited', 'added']"]


async def test_log_is_appended_after_a_restart_and_last_lines_are_of_the_last_run(
    tmp_path: Path,
) -> None:
    child = _child(tmp_path, "import os; print(os.getpid())")
    for _ in range(2):
        child.spawn()
        await child.ended()
    lines = child.program.log_path.read_text().splitlines()
    assert len(set(lines)) == 2
    assert child.last_lines(10) == lines[1:]


async def test_child_is_killed_with_its_parent(tmp_path: Path) -> None:
    parent_code = f"""
import pathlib, sys, time
from batonmq_server.local import child_process
from batonmq_server.local.child_process import ChildProcess, Program
async def never(): return False
child = ChildProcess(Program(name="c", command=[sys.executable, "-c", {STUBBORN!r}],
    log_path=pathlib.Path({str(tmp_path / "log")!r}), is_ready=never))
child.spawn()
print(child.pid, flush=True)
time.sleep(600)
"""
    await assert_child_is_killed_with_its_parent(parent_code, is_ready=(tmp_path / "log").read_text)
