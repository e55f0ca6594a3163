"""Goal: a broker that fails is reported with the reason, and the others are measured.

Method: brokers without servers, whose clients are real processes that send nothing.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.peers.__main__ import exit_status
from bench.peers.brokers import Broker, Servers, running
from bench.peers.downloads import PeerFailed
from bench.peers.figures import Report
from bench.peers.runner import Sizes, run
from bench.peers.steps import MEMORY

_SIZES = Sizes(seconds=0.02, rounds=1, fsync=False)


class FakeBroker(Broker):
    """A broker that fails where `fails` says: prepare, serve, or a failure of `fake_client`."""

    library = "none"
    settings = "none"
    client = "tests.bench.fake_client"

    def __init__(self, name: str, fails: str = "") -> None:
        self.name, self._fails = name, fails

    async def prepare(self) -> None:
        if self._fails == "prepare":
            raise PeerFailed("java is not installed")

    def version(self) -> str:
        return "1"

    @asynccontextmanager
    async def serve(self, folder: Path, *, fsync: bool) -> AsyncIterator[Servers]:
        if self._fails == "serve":
            raise PeerFailed("port 1 is in use")
        yield Servers(self._fails, (os.getpid(),))


@dataclass(frozen=True)
class Run:
    """What one short round of several brokers has left."""

    report: Report
    folders_left: list[Path]

    def failures(self, broker: str) -> list[str]:
        """Return the failures of a broker."""
        return [text for text in self.report.failures if text.startswith(f"{broker}: ")]

    def speeds(self, broker: str) -> list[str]:
        """Return the figures of a broker that are neither CPU time nor memory."""
        rows = self.report.columns[broker].figures
        return [row for row in rows if not row.startswith(("CPU ", "RSS "))]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Measure four brokers that fail, each in its way, before one that does not."""
    brokers = [
        FakeBroker("Missing", "prepare"),
        FakeBroker("Dead", "serve"),
        FakeBroker("Babbling", "babble:create"),
        FakeBroker("Mute", "raise:produce"),
        FakeBroker("Whole"),
    ]
    folder = tmp_path_factory.mktemp("peers")
    report = asyncio.run(run(brokers, _SIZES, folder, lambda _: None))
    return Run(report, list(folder.iterdir()))


@pytest.mark.parametrize(
    ("broker", "reason"),
    [
        ("Missing", "java is not installed"),
        ("Dead", "port 1 is in use"),
        ("Babbling", "create client printed b'hello\\n' instead of 'ready'"),
    ],
)
def test_broker_that_does_not_start_is_reported_and_has_no_column(
    measured: Run, broker: str, reason: str
) -> None:
    assert measured.failures(broker) == [f"{broker}: {reason}"]
    assert broker not in measured.report.columns


def test_broker_after_those_that_fail_has_all_figures(measured: Run) -> None:
    assert measured.failures("Whole") == []
    assert len(measured.speeds("Whole")) == len(MEMORY) + 1  # the last step has two figures
    figures = measured.report.columns["Whole"].figures
    assert all(len(one.values) == 1 for one in figures.values())
    assert "CPU per million at 2,000 msg/s, clients" in figures


def test_step_that_fails_is_reported_and_other_steps_are_measured(measured: Run) -> None:
    failures = measured.failures("Mute")
    raised = [text for text in failures if text.endswith("RuntimeError: no produce today")]
    assert len(raised) == 3  # the warm-up and two sizes
    assert "one send at a time, p50" in measured.speeds("Mute")


def test_consumers_are_not_started_without_messages(measured: Run) -> None:
    failures = measured.failures("Mute")
    assert sum(text.endswith("no messages were produced before") for text in failures) == 4


def test_folders_of_all_servers_are_removed(measured: Run) -> None:
    assert measured.folders_left == []


def test_exit_status_tells_only_if_batonmq_failed() -> None:
    assert exit_status(Report(failures=["Kafka: no Java"])) == 0
    assert exit_status(Report(failures=["Kafka: no Java", "BatonMQ: produce: lost"])) == 1
    assert exit_status(Report()) == 0


async def test_server_that_ends_early_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    program = (sys.executable, "-c", "raise SystemExit('disk is full')")
    with pytest.raises(PeerFailed, match=r"ended .*its log ends with: disk is full"):
        async with running("server", tmp_path, program, "127.0.0.1:1"):
            pytest.fail("the server was ready")


async def test_server_whose_program_is_not_installed_is_reported(tmp_path: Path) -> None:
    with pytest.raises(PeerFailed, match="no-such-program is not installed"):
        async with running("server", tmp_path, ("no-such-program",), "127.0.0.1:1"):
            pytest.fail("the server was ready")
