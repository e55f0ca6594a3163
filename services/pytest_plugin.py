"""The fixture `baton` of pytest: a broker in memory, in virtual time.

pytest loads it wherever `batonmq-server` is installed; `-p no:batonmq` leaves it out. It imports
the broker only when a test uses the fixture.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

if TYPE_CHECKING:
    from batonmq_server.testing import MemoryBroker

T = TypeVar("T")
Scenario = Callable[["MemoryBroker"], Coroutine[Any, Any, T]]


def pytest_configure(config: pytest.Config) -> None:
    """Add the marker `baton`."""
    config.addinivalue_line(
        "markers", "baton(**options): options of the MemoryBroker of the fixture `baton`"
    )


@pytest.fixture
def baton(request: pytest.FixtureRequest) -> Callable[[Scenario[Any]], Any]:
    """Return a function that runs a coroutine function with a broker, in virtual time.

    Each call starts a broker of its own, with the options of the marker `baton` if there is one,
    and returns what the coroutine returns.
    """
    from batonmq_server.testing import MemoryBroker, run_virtual  # noqa: PLC0415

    marker = request.node.get_closest_marker("baton")
    options = dict(marker.kwargs) if marker else {}

    def run(scenario: Scenario[T]) -> T:
        async def play() -> T:
            async with MemoryBroker(**options) as broker:
                return await scenario(broker)

        return run_virtual(play())

    return run
