"""Goal: the promises to remote clients hold under every schedule, and the runs find a broken one.

Method: `gateways` plays real gateways with clients behind them and faults drawn from a seed; what
the clients saw is checked by `remote_ledger`. Each mutant leaves out one rule of the gateway; one
of its runs must break a promise.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest

from batonmq_server.gateway import message_sender
from batonmq_server.gateway.clients import RemoteClients
from batonmq_server.gateway.core.message_leases import LeaseState, MessageLease, QueueLeases
from batonmq_server.gateway.group_consumer import GroupConsumer
from tests.simulation.gateways import play_gateways
from tests.simulation.mutant_search import assert_found
from tests.simulation.seeds import SEEDS, each_bunch
from tests.support.run_counts import note_runs

pytestmark = [pytest.mark.sim, pytest.mark.timeout(600)]

BUNCH = 4
GATEWAY_SEEDS = SEEDS[: max(1, len(SEEDS) // 25)]
LEAST = {
    "deliveries": 10_000, "repeated deliveries": 1_500, "acks": 8_000, "acks refused": 1_000,
    "changes": 500, "repeated sends": 3_000, "client deaths": 1_000, "gateway killed": 40,
    "gateway frozen": 60, "gateway cut off": 40, "gateway restarted": 30,
    "deliveries in order": 4_000,
}  # fmt: skip
"""Minimum number of events of each kind in 100 runs, judged over a whole session."""
MUTANT_SEEDS = 15


@each_bunch(GATEWAY_SEEDS, BUNCH)
def test_promises_to_remote_clients_hold(request: pytest.FixtureRequest, seeds: range) -> None:
    counts: Counter[str] = Counter()
    for seed in seeds:
        ledger = play_gateways(f"gateways/{seed}")
        assert not ledger.violations, f"seed gateways/{seed}: {ledger.violations[:5]}"
        counts += ledger.counts
    note_runs(request, "gateways", len(seeds), counts, LEAST, BUNCH)


def test_same_seed_is_the_same_run() -> None:
    first, second = (play_gateways("gateways/repeated") for _ in range(2))
    assert first.counts == second.counts
    assert first.deliveries == second.deliveries


def acks_are_answered_before_they_are_durable(patch: pytest.MonkeyPatch) -> None:
    """An acknowledgement is answered at once, and committed 2 s later."""
    end = GroupConsumer._end

    def broken(self: Any, pool: Any, offset: int, serial: int, **more: Any) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()

        def commit() -> None:
            if offset in pool.held and self._held is not None:
                end(self, pool, offset, serial, **more)

        loop.call_later(2, commit)
        done = loop.create_future()
        done.set_result(None)
        return done

    patch.setattr(GroupConsumer, "_end", broken)


def stale_handles_are_honoured(patch: pytest.MonkeyPatch) -> None:
    """Any handle of a message that some client holds counts, whatever its number and its time."""

    def broken(self: Any, offset: int, serial: int, now_ms: int) -> MessageLease | None:
        message: MessageLease | None = self._messages.get(offset)
        held = message is not None and message.state is LeaseState.LEASED
        return message if held else None

    patch.setattr(QueueLeases, "find", broken)


def handles_outlive_their_token(patch: pytest.MonkeyPatch) -> None:
    """A gateway that is fenced and acquires its queue again goes on with what it held."""
    patch.setattr(GroupConsumer, "_give_up", lambda *_: None)


def leases_expire_early(patch: pytest.MonkeyPatch) -> None:
    """A message is leased again 200 ms before its lease expires."""
    expire = QueueLeases.expire
    patch.setattr(
        QueueLeases, "expire", lambda self, now_ms, alive: expire(self, now_ms + 200, alive)
    )


def leases_never_expire(patch: pytest.MonkeyPatch) -> None:
    """A message of a client that died is never leased again."""

    def broken(self: Any, *_: Any) -> list[MessageLease]:
        self._expiries.clear()
        return []

    patch.setattr(QueueLeases, "expire", broken)


def dead_clients_count_as_alive(patch: pytest.MonkeyPatch) -> None:
    """The leases of a client that died are renewed."""
    patch.setattr(RemoteClients, "may_renew", lambda *_: True)


def message_groups_are_ignored(patch: pytest.MonkeyPatch) -> None:
    """Messages of one message group are leased at once."""
    add = QueueLeases.add
    patch.setattr(
        QueueLeases, "add", lambda self, offset, attempts, _: add(self, offset, attempts, "")
    )


def the_next_of_a_group_is_ready_when_its_lease_expires(patch: pytest.MonkeyPatch) -> None:
    """A message of a message group is delivered though the one ahead comes again."""
    make_ready = QueueLeases._make_ready

    def broken(self: Any, message: MessageLease) -> None:
        make_ready(self, message)
        waiting = self._waiting.get(message.message_group)
        if message.attempt and waiting:
            make_ready(self, self._messages[waiting.pop(0)])

    patch.setattr(QueueLeases, "_make_ready", broken)


def redeliveries_are_not_flagged(patch: pytest.MonkeyPatch) -> None:
    """The attempts before the gateway got the message are not counted."""
    add = QueueLeases.add
    patch.setattr(QueueLeases, "add", lambda self, offset, _, group: add(self, offset, 0, group))


def each_send_has_an_id_of_its_own(patch: pytest.MonkeyPatch) -> None:
    """A repeated send is another message."""
    numbers = count(1)
    patch.setattr(message_sender, "once_id", lambda *_: next(numbers))


MUTANTS: tuple[tuple[Callable[[pytest.MonkeyPatch], None], set[str]], ...] = (
    (acks_are_answered_before_they_are_durable, {"acknowledged", "one holder"}),
    (stale_handles_are_honoured, {"replaced", "expired", "one holder"}),
    (handles_outlive_their_token, {"token", "acknowledged", "one holder"}),
    (leases_expire_early, {"one holder"}),
    (leases_never_expire, {"lost"}),
    (dead_clients_count_as_alive, {"lost"}),
    (message_groups_are_ignored, {"order"}),
    (the_next_of_a_group_is_ready_when_its_lease_expires, {"order"}),
    (redeliveries_are_not_flagged, {"flagged"}),
    (each_send_has_an_id_of_its_own, {"once"}),
)


@pytest.mark.long
@pytest.mark.parametrize(("break_it", "rules"), MUTANTS, ids=[one.__name__ for one, _ in MUTANTS])
def test_mutant_of_the_gateway_is_found(
    break_it: Callable[[pytest.MonkeyPatch], None],
    rules: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    break_it(monkeypatch)
    name = break_it.__name__
    runs = (play_gateways(f"{name}/{number}") for number in range(MUTANT_SEEDS))
    assert_found(rules, runs)
