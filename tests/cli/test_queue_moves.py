"""Goal: `baton cluster remove-broker` goes on until the broker is empty, or its records are gone.

Method: the loop of the command, with scripted answers of the nameserver; a server of an earlier
version.
"""

from __future__ import annotations

from typing import Any, cast

import grpc
import pytest

from batonmq.admin.admin import Admin
from batonmq.admin.queue_moves import BrokerRemovalStep, RemovalObstacle, removal_obstacles
from batonmq.admin.reports import BrokerRemoval
from batonmq.cli import queue_moves
from batonmq.errors import BatonError, InvalidArgument, NoQuorum, NotServing, Unreachable
from tests.support.grpc_server import serving_at

ADMIN = cast("Admin", None)
HELD = RemovalObstacle("unread", "t", "b", "g", 0, 1, 0, 0, "unread")
EMPTY_AND_UP = BrokerRemovalStep((), (), ("b",), BrokerRemoval("b", 1, "ops", 0))
EMPTY_AND_DOWN = BrokerRemovalStep((), (), (), BrokerRemoval("b", 1, "ops", 0))
FORGOTTEN = BrokerRemovalStep((), (), (), BrokerRemoval("b", 1, "ops", 5))
HOLDING = BrokerRemovalStep((), (HELD,), ("b",), BrokerRemoval("b", 1, "ops", 0))


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the command has waited; no time passes."""
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    monkeypatch.setattr("batonmq.cli.queue_moves.asyncio.sleep", sleep)
    return waited


async def run(
    monkeypatch: pytest.MonkeyPatch,
    *answers: BrokerRemovalStep | BatonError,
    by: str = "ops",
    wait_s: float = 600,
) -> BrokerRemovalStep:
    """Return the last step; every answer is asked for."""
    left = list(answers)

    async def remove_broker(*_: Any, **__: Any) -> BrokerRemovalStep:
        answer = left.pop(0)
        if isinstance(answer, BatonError):
            raise answer
        return answer

    monkeypatch.setattr(queue_moves, "remove_broker", remove_broker)
    step = await queue_moves._steps(ADMIN, "b", by, wait_s, [])
    assert not left
    return step


async def test_command_goes_on_until_the_broker_is_empty_and_waits_longer_each_time(
    monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> None:
    assert await run(monkeypatch, *[HOLDING] * 6, EMPTY_AND_UP) == EMPTY_AND_UP
    assert pauses == [0.5, 1, 2, 4, 5, 5]


async def test_command_goes_on_while_no_node_is_up_and_the_records_are_not_removed(
    monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> None:
    answers = EMPTY_AND_DOWN, NotServing("in use"), FORGOTTEN
    assert await run(monkeypatch, *answers) == FORGOTTEN


@pytest.mark.parametrize("error", [NotServing("x"), NoQuorum("x"), Unreachable("x")])
async def test_command_goes_on_after_an_error_to_retry_until_its_time_is_over(
    monkeypatch: pytest.MonkeyPatch, pauses: list[float], error: BatonError
) -> None:
    assert await run(monkeypatch, error, error, EMPTY_AND_UP) == EMPTY_AND_UP
    with pytest.raises(type(error)):
        await run(monkeypatch, error, wait_s=-1)
    with pytest.raises(type(error)):
        await run(monkeypatch, error, by="")


async def test_command_ends_at_an_error_that_a_retry_does_not_mend(
    monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> None:
    with pytest.raises(InvalidArgument):
        await run(monkeypatch, InvalidArgument("x"))
    assert not pauses


async def test_nameserver_of_an_earlier_version_does_not_know_what_queues_wait_for() -> None:
    handler = grpc.method_handlers_generic_handler("baton.nameserver.v1.NameserverService", {})
    async with (
        serving_at(lambda server: server.add_generic_rpc_handlers((handler,))) as address,
        Admin(address) as admin,
    ):
        assert await removal_obstacles(admin, "flights") == ()
