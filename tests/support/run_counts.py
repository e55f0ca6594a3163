"""A pytest plugin: the events of all simulated runs of a session, judged together.

What is rare in a few runs may be absent from them by chance. In a session of enough runs it has
to occur: otherwise the runs are too quiet to prove anything, and the session fails.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

import pytest

RUNS_MIN = 30
"""A session of fewer runs of a kind is not judged, unless the kind has a number of its own."""
_NAME = "simulated runs"


class RunCounts:
    """Counts of events by kind of run."""

    def __init__(self) -> None:
        self._runs: Counter[str] = Counter()
        self._counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._least: dict[str, Mapping[str, int]] = {}
        self._enough: dict[str, int] = {}

    def add(
        self,
        kind: str,
        runs: int,
        counts: Mapping[str, int],
        least: Mapping[str, int],
        enough: int = RUNS_MIN,
    ) -> None:
        """Add runs.

        Args:
            kind: Kind of the runs.
            counts: Number of events by name.
            least: Minimum number of events in 100 runs, by name.
            enough: Number of runs from which on the kind is judged.
        """
        self._runs[kind] += runs
        self._counts[kind].update(counts)
        self._least[kind] = least
        self._enough[kind] = enough

    def quiet(self) -> list[str]:
        """Return a line for each event that occurred too rarely."""
        return [
            f"{runs} runs of {kind} are too quiet to prove anything: "
            f"{name} {self._counts[kind][name]}, at least {least * runs // 100}"
            for kind, runs in self._runs.items()
            if runs >= self._enough[kind]
            for name, least in self._least[kind].items()
            if self._counts[kind][name] < least * runs // 100
        ]


_COUNTS = pytest.StashKey[RunCounts]()


def note_runs(
    request: pytest.FixtureRequest,
    kind: str,
    runs: int,
    counts: Mapping[str, int],
    least: Mapping[str, int],
    enough: int = RUNS_MIN,
) -> None:
    """Pass the counts of the runs of a test on to the session; arguments as of `RunCounts.add`."""
    request.node.user_properties.append((_NAME, [kind, runs, dict(counts), dict(least), enough]))


def pytest_configure(config: pytest.Config) -> None:
    """Begin to count, unless this process is a worker of xdist."""
    if not hasattr(config, "workerinput"):
        counts = config.stash[_COUNTS] = RunCounts()
        config.pluginmanager.register(_Collector(counts), "collector of simulated runs")


class _Collector:
    """Adds the counts in reports of tests, also of those on workers."""

    def __init__(self, counts: RunCounts) -> None:
        self._counts = counts

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the counts of a test that has ended."""
        if report.when == "call":
            for name, value in report.user_properties:
                if name == _NAME and isinstance(value, list):
                    self._counts.add(*value)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Fail a session whose runs were too quiet."""
    counts = session.config.stash.get(_COUNTS, None)
    if counts is not None and exitstatus == pytest.ExitCode.OK and counts.quiet():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say which runs were too quiet."""
    for line in config.stash[_COUNTS].quiet():
        terminalreporter.write_line(f"ERROR {line}", red=True)
