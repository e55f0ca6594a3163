"""Goal: the promises of requests hold under every schedule, and the runs find a broken one.

Method: `requests` plays requesters and responders that die, and kills the nodes of the reply
inboxes, with faults drawn from a seed. Each mutant leaves one rule out; one of its runs must break
a promise.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from batonmq._consumer.reply_sender import ReplySender
from batonmq._producer.requester import Requester
from batonmq_server.storage.core.reply_inboxes import ReplyInboxes, ReplyStatus
from tests.simulation.mutant_search import assert_found
from tests.simulation.requests import play_requests
from tests.simulation.seeds import SEEDS, each_bunch
from tests.support.run_counts import note_runs

pytestmark = [pytest.mark.sim, pytest.mark.timeout(600)]

BUNCH = 4
REQUEST_SEEDS = SEEDS[: max(1, len(SEEDS) // 50)]
LEAST = {
    "broker kills": 200, "requester deaths": 200, "responder ends": 50, "replied": 2_000,
    "failed": 300, "timed out": 500, "lost inbox": 200,
}  # fmt: skip
"""Minimum number of events of each kind in 100 runs, judged over a whole session."""
MUTANT_SEEDS = 8


@each_bunch(REQUEST_SEEDS, BUNCH)
def test_promises_of_requests_hold(request: pytest.FixtureRequest, seeds: range) -> None:
    counts: Counter[str] = Counter()
    for seed in seeds:
        run = play_requests(f"requests/{seed}")
        assert not run.violations, f"seed {run.seed}: {run.violations[:5]}"
        counts += run.counts
    note_runs(request, "requests", len(seeds), counts, LEAST, BUNCH)


def any_request_takes_the_reply(patch: pytest.MonkeyPatch) -> None:
    """A reply goes to the request that has waited longest."""
    dispatch = Requester._dispatch

    def broken(self: Any, reply: Any) -> None:
        reply.correlation_id = next(iter(self._waiting), reply.correlation_id)
        dispatch(self, reply)

    patch.setattr(Requester, "_dispatch", broken)


def requests_of_a_lost_inbox_wait(patch: pytest.MonkeyPatch) -> None:
    """A requester whose inbox is lost opens another one, and does not fail its open requests."""
    patch.setattr(Requester, "_fail_all", lambda *_: None)


def inboxes_stay_open(patch: pytest.MonkeyPatch) -> None:
    """The inbox of a requester that has ended is not closed."""
    patch.setattr(ReplyInboxes, "close", lambda *_: None)


def a_request_has_no_end(patch: pytest.MonkeyPatch) -> None:
    """A request waits for its reply without a limit."""
    exchange = Requester._exchange

    async def broken(self: Any, *args: Any) -> Any:
        task = asyncio.current_task()
        assert task is not None
        try:
            return await exchange(self, *args)
        except asyncio.CancelledError:
            await asyncio.sleep(1)
            raise

    patch.setattr(Requester, "_exchange", broken)


def replies_are_counted_and_dropped(patch: pytest.MonkeyPatch) -> None:
    """A node says that it has delivered a reply, and drops it."""
    patch.setattr(ReplyInboxes, "put", lambda *_: ReplyStatus.DELIVERED)


def retries_are_replied_to_as_busy(patch: pytest.MonkeyPatch) -> None:
    """The reply to a request that is handled again is an error that no handler returned."""
    send = ReplySender.send

    def broken(self: Any, message: Any, reply: Any) -> bool:
        reply = type(reply)(error="busy") if message.attempts > 1 else reply
        return send(self, message, reply)

    patch.setattr(ReplySender, "send", broken)


MUTANTS: tuple[tuple[Callable[[pytest.MonkeyPatch], None], set[str]], ...] = (
    (any_request_takes_the_reply, {"own reply"}),
    (requests_of_a_lost_inbox_wait, {"failed at once"}),
    (inboxes_stay_open, {"nothing left"}),
    (a_request_has_no_end, {"in time"}),
    (replies_are_counted_and_dropped, {"answered"}),
    (retries_are_replied_to_as_busy, {"own reply"}),
)


@pytest.mark.long
@pytest.mark.parametrize(("break_it", "rules"), MUTANTS, ids=[one.__name__ for one, _ in MUTANTS])
def test_mutant_of_requests_is_found(
    break_it: Callable[[pytest.MonkeyPatch], None],
    rules: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    break_it(monkeypatch)
    name = break_it.__name__
    runs = (play_requests(f"{name}/{number}") for number in range(MUTANT_SEEDS))
    assert_found(rules, runs)
