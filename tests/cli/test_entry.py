"""Goal: `baton` that is interrupted during its imports exits with 130 and prints nothing.

Method: the entry point in a process of its own, which interrupts itself at a chosen import.
"""

from __future__ import annotations

import socket
import socketserver
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import pytest

_INTERRUPTED = """
import os, runpy, signal, sys

module = sys.argv.pop(1)

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
runpy.run_module("batonmq", run_name="__main__")
"""


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.parametrize(
    "module", ["batonmq.cli.app", "click", "grpc.aio", "batonmq.cli.message_trace"]
)
def test_interrupt_during_the_imports_exits_with_130_without_a_traceback(module: str) -> None:
    done = _run("-c", _INTERRUPTED, module, "message", "trace", "id")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


class _Plain(socketserver.BaseRequestHandler):
    """A server without TLS."""

    request: socket.socket

    def handle(self) -> None:
        self.request.sendall(b"220 at your service\r\n")


def test_failed_handshake_is_reported_once() -> None:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Plain) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_address[1]}"
        done = _run("-m", "batonmq", "--tls", "--nameserver", address, "topic", "list")
        server.shutdown()
    error, remedy = done.stderr.splitlines()
    assert error == f"error: UNREACHABLE: {address}: it does not use TLS"
    assert "--no-tls" in remedy


def test_entry_point_is_the_command() -> None:
    done = _run("-m", "batonmq", "--help")
    assert done.returncode == 0
    assert "Usage: baton " in done.stdout
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["project"]["scripts"] == {"baton": "batonmq.__main__:main"}


@pytest.mark.parametrize("redirection", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_stream_is_no_error(redirection: str) -> None:
    command = f'"$1" -m batonmq context list {redirection}'
    done = subprocess.run(
        ["sh", "-c", command, "sh", sys.executable], capture_output=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_confirmation_without_standard_input_is_refused() -> None:
    command = '"$1" -m batonmq topic delete t <&-'
    done = subprocess.run(
        ["sh", "-c", command, "sh", sys.executable], capture_output=True, check=False, timeout=60
    )
    assert done.returncode == 2
    assert b"standard input is not a terminal" in done.stderr


def test_text_that_the_output_can_not_have_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = _run("-c", "import batonmq.__main__ as e; e._prepare_streams(); print('caf\\xe9')")
    assert (done.returncode, done.stdout) == (0, "caf\\xe9\n")
