"""Goal: a forked process equals an executed one, for itself and for its parent.

Method: a real fork server, and a small program that it has imported in advance.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from batonmq_server.local.child_process import ChildProcess, Program
from batonmq_server.local.fork_server import ForkServer
from tests.support.parent import assert_child_is_killed_with_its_parent

PROGRAM = """
import json, os, signal, sys, time

def main():
    about = {
        "pid": os.getpid(), "session": os.getsid(0), "arguments": sys.argv[1:],
        "environment": dict(os.environ), "folder": os.getcwd(), "input": sys.stdin.read(),
        "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "name": __name__, "parent": os.getppid(), "path": sys.path[0],
    }
    print(json.dumps(about), flush=True)
    if "fail" in sys.argv:
        raise ValueError("as it was told")
    if "sleep" in sys.argv:
        time.sleep(600)
    sys.exit(3)

if __name__ == "__main__":
    main()
"""
PARENT = """
import sys, time
from pathlib import Path
from batonmq_server.local.child_process import ChildProcess, Program
from batonmq_server.local.fork_server import ForkServer

folder = Path(sys.argv[1])
command = [sys.executable, "-m", "forked_program", "sleep"]
program = Program(name="it", command=command, log_path=folder / "log", is_ready=None)
child = ChildProcess(program, ForkServer(["forked_program"], folder).start)
child.spawn()
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "forked_program.py").write_text(PROGRAM)
    return tmp_path


@pytest.fixture
def fork_server(folder: Path) -> Iterator[ForkServer]:
    with ForkServer(["forked_program"], folder) as fork_server:
        yield fork_server


def child_of(fork_server: ForkServer, folder: Path, *command: str) -> ChildProcess:
    log_path = folder / "log"

    async def is_up() -> bool:
        return log_path.exists() and "}\n" in log_path.read_text()

    program = Program(
        name="child",
        command=command,
        log_path=log_path,
        is_ready=is_up,
        env={"GIVEN": "yes"},
        drop=("PRIVATE_",),
    )
    return ChildProcess(program, fork_server.start)


def forked(fork_server: ForkServer, folder: Path, *arguments: str) -> ChildProcess:
    return child_of(fork_server, folder, sys.executable, "-m", "forked_program", *arguments)


def parent_of(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    (parent,) = (line.split()[1] for line in status.splitlines() if line.startswith("PPid"))
    return int(parent)


async def test_forked_process_has_its_own_session_output_and_environment(
    fork_server: ForkServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PRIVATE_THING", "no")
    monkeypatch.setenv("INHERITED", "yes")
    child = forked(fork_server, folder, "one", "two words")
    child.spawn()
    pid = child.pid
    assert await child.ended() == 3
    state = json.loads((folder / "log").read_text())
    assert state["pid"] == state["session"] == pid
    assert pid != os.getpid()
    assert state["arguments"] == ["one", "two words"]
    assert state["environment"].items() >= {"GIVEN": "yes", "INHERITED": "yes"}.items()
    assert "PRIVATE_THING" not in state["environment"]
    assert state["folder"] == state["path"] == str(folder)
    assert (state["input"], state["name"], state["interrupt"]) == ("", "__main__", True)


async def test_error_of_a_forked_process_is_in_its_log_and_exit_status(
    fork_server: ForkServer, folder: Path
) -> None:
    child = forked(fork_server, folder, "fail")
    child.spawn()
    assert await child.ended() == 1
    assert child.last_lines(1) == ["ValueError: as it was told"]


async def test_each_forked_process_can_be_stopped_suspended_and_killed(
    fork_server: ForkServer, folder: Path
) -> None:
    children = []
    for number in range(6):
        own = folder / str(number)
        children.append(forked(fork_server, own, "sleep"))
        children[-1].spawn()
    for child in children:
        await child.ready(20)
    assert len({child.pid for child in children}) == 6
    stopped, paused, killed, lost, *rest = children
    assert await stopped.stop(20)
    assert stopped.returncode == -signal.SIGTERM
    paused.send(signal.SIGSTOP)
    assert await paused.stop(20)
    killed.kill_now()
    assert killed.returncode == -signal.SIGKILL
    assert lost.pid is not None
    os.kill(lost.pid, signal.SIGKILL)
    assert await lost.ended() == -signal.SIGKILL
    assert all(child.pid is not None and child.returncode is None for child in rest)
    for child in rest:
        child.kill_now()


async def test_program_that_is_not_a_module_is_executed(
    fork_server: ForkServer, folder: Path
) -> None:
    child = child_of(fork_server, folder, sys.executable, "-c", "raise SystemExit(4)")
    child.spawn()
    assert await child.ended() == 4


async def test_program_with_interpreter_options_is_executed(
    fork_server: ForkServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    child = child_of(fork_server, folder, sys.executable, "-O", "-m", "forked_program")
    child.spawn()
    assert await child.ended() == 3
    assert json.loads((folder / "log").read_text())["parent"] == os.getpid()


async def test_large_environment_is_passed_completely(
    fork_server: ForkServer, folder: Path
) -> None:
    child = forked(fork_server, folder)
    child.program = replace(child.program, env={"LARGE": "\u00e9" * 500_000})
    child.spawn()
    assert await child.ended() == 3
    state = json.loads((folder / "log").read_text())
    assert len(state["environment"]["LARGE"]) == 500_000
    assert state["parent"] != os.getpid()


async def test_program_that_fails_to_import_fails_alone(folder: Path) -> None:
    (folder / "broken_program.py").write_text("import nothing_of_this_name\n")
    with ForkServer(["broken_program", "forked_program"], folder) as fork_server:
        broken = child_of(fork_server, folder / "broken", sys.executable, "-m", "broken_program")
        broken.spawn()
        assert await broken.ended() == 1
        assert "No module named 'nothing_of_this_name'" in broken.last_lines(1)[0]
        sound = forked(fork_server, folder / "sound")
        sound.spawn()
        assert await sound.ended() == 3


async def test_failed_fork_is_an_error_and_other_processes_keep_running(
    fork_server: ForkServer, folder: Path
) -> None:
    child = forked(fork_server, folder / "first", "sleep")
    child.spawn()
    await child.ready(20)
    assert child.pid is not None
    parent = parent_of(child.pid)
    limits = resource.prlimit(parent, resource.RLIMIT_NOFILE)
    resource.prlimit(parent, resource.RLIMIT_NOFILE, (4, limits[1]))
    with pytest.raises(OSError, match="could not be forked"):
        forked(fork_server, folder / "second", "sleep").spawn()
    resource.prlimit(parent, resource.RLIMIT_NOFILE, limits)
    assert child.returncode is None
    third = forked(fork_server, folder / "third")
    third.spawn()
    assert await third.ended() == 3
    child.kill_now()


@pytest.mark.usefixtures("default_sighup")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_signal_to_all_ends_forked_processes_but_not_the_fork_server(
    fork_server: ForkServer, folder: Path, number: signal.Signals
) -> None:
    child = forked(fork_server, folder, "sleep")
    child.spawn()
    await child.ready(20)
    assert child.pid is not None
    parent = parent_of(child.pid)
    assert os.getpgid(parent) == parent
    os.kill(parent, number)
    child.send(number)
    assert await child.ended() == -number
    again = forked(fork_server, folder / "again", "sleep")
    again.spawn()
    await again.ready(20)
    assert again.pid is not None
    assert parent_of(again.pid) == parent
    again.kill_now()


async def test_closed_fork_server_ends_its_children_and_can_start_again(
    fork_server: ForkServer, folder: Path
) -> None:
    child = forked(fork_server, folder, "sleep")
    child.spawn()
    await child.ready(20)
    assert child.pid is not None
    os.kill(parent_of(child.pid), signal.SIGKILL)
    assert await child.ended() == -signal.SIGKILL
    again = forked(fork_server, folder / "again", "sleep")
    again.spawn()
    await again.ready(20)
    again.kill_now()


async def test_forked_processes_end_with_the_block(folder: Path) -> None:
    with ForkServer(["forked_program"], folder) as fork_server:
        child = forked(fork_server, folder, "sleep")
        child.spawn()
        await child.ready(20)
    assert await child.ended() == -signal.SIGKILL


async def test_forked_processes_end_with_a_killed_parent(folder: Path) -> None:
    await assert_child_is_killed_with_its_parent(PARENT, str(folder))
