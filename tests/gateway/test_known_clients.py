"""What a gateway remembers of its clients is bounded, whatever ids and groups they name."""

from __future__ import annotations

from batonmq_server.gateway import clients
from batonmq_server.gateway.callers import Caller
from batonmq_server.gateway.clients import CLIENTS_MAX, GROUPS_MAX, RemoteClients
from batonmq_server.gateway.core.client_connections import Reception
from batonmq_server.gateway.core.message_leases import LeaseTerms
from tests.support.clock import MovableClock

TIMEOUT_MS = 30_000


def caller(client_id: str, peer: str = "") -> Caller:
    return Caller(client_id, "", "JAVA", peer=peer)


async def test_clients_beyond_the_limit_are_served_and_not_remembered() -> None:
    clock = MovableClock()
    known = RemoteClients(clock, TIMEOUT_MS)
    for number in range(CLIENTS_MAX + 5_000):  # a search of all for each would take a minute
        known.note(caller(f"client-{number}"))
    assert len(known) == CLIENTS_MAX
    further = known.note(caller("one-more"), "billing")
    assert further.groups == {"billing"}
    assert not known.is_alive("one-more")
    assert known.is_alive("client-0")
    clock.ahead_ms += clients._FORGET_AFTER * TIMEOUT_MS + 1
    known.note(caller("client-0"))
    known.forget_silent()
    assert list(known) == ["client-0"]
    known.note(caller("one-more"))
    assert known.is_alive("one-more")


async def test_groups_of_a_client_beyond_the_limit_are_not_remembered() -> None:
    known = RemoteClients(MovableClock(), TIMEOUT_MS)
    for number in range(GROUPS_MAX + 10):
        client = known.note(caller("client"), f"group-{number}")
    assert len(client.groups) == GROUPS_MAX
    assert len(known.remove("client")) == GROUPS_MAX


async def test_group_has_a_consumer_while_one_of_its_clients_lives() -> None:
    clock = MovableClock()
    known = RemoteClients(clock, TIMEOUT_MS)
    client = known.note(caller("client"), "billing")
    known.note(caller("other"), "auditing")
    assert known.consumes("billing")
    clock.ahead_ms += TIMEOUT_MS
    known.note(caller("other"))
    assert not known.consumes("billing")
    with client.calling(caller("client")):
        assert known.consumes("billing")
    known.remove("client")
    assert not known.consumes("billing")
    assert known.consumes("auditing")


async def test_lease_is_renewed_while_its_client_lives_and_has_its_answer() -> None:
    clock = MovableClock()
    known = RemoteClients(clock, TIMEOUT_MS)
    terms = LeaseTerms(
        "client", 1_000, renewed=True, reception=Reception("a", clock.monotonic_ms())
    )
    assert not known.may_renew(terms)
    known.note(caller("client", "a"))
    assert known.may_renew(terms)
    known.broke(caller("client", "a"))
    assert not known.may_renew(terms)
    assert known.may_renew(LeaseTerms("client", 1_000, renewed=True))
    assert terms.reception is not None
    terms.reception.arrived = True
    assert known.may_renew(terms)
    clock.ahead_ms += TIMEOUT_MS
    assert not known.may_renew(terms)
