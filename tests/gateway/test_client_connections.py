"""Which answers may not have arrived, by what becomes of the connections of a client."""

from __future__ import annotations

from batonmq_server.gateway.core.client_connections import (
    CONNECTIONS_MAX,
    ClientConnections,
    Reception,
)

DOUBT_MS = 40


def lacks(connections: ClientConnections, connection: str, sent_ms: int) -> bool:
    return connections.may_lack(Reception(connection, sent_ms), DOUBT_MS)


def test_answer_may_be_lost_if_its_connection_breaks_soon_after() -> None:
    connections = ClientConnections()
    connections.note("a", 10)
    assert not lacks(connections, "a", 100)
    connections.broke("a", 120)
    assert lacks(connections, "a", 100)
    assert lacks(connections, "a", 80)
    assert not lacks(connections, "a", 79), "the connection has answered a ping since"
    assert not lacks(connections, "b", 100)
    connections.note("a", 130)
    assert not lacks(connections, "a", 130), "a proxy goes on to use its connection"


def test_connection_is_not_broken_while_an_earlier_call_is_open_there() -> None:
    """A client that ends one call by itself has lost no other answer."""
    connections = ClientConnections()
    connections.open("a", 10)
    connections.open("a", 110)
    connections.broke("a", 120)
    connections.open("a", 120)
    assert not lacks(connections, "a", 100)
    connections.close("a", 10)
    assert not lacks(connections, "a", 100)
    connections.close("a", 110)
    assert lacks(connections, "a", 100), "a proxy goes on to use its connection"


def test_answer_has_arrived_if_its_client_has_used_a_handle_of_it() -> None:
    connections = ClientConnections()
    connections.broke("a", 120)
    assert not connections.may_lack(Reception("a", 100, arrived=True), DOUBT_MS)


def test_answer_may_be_lost_if_its_client_goes_on_by_another_connection() -> None:
    connections = ClientConnections()
    connections.note("a", 100)
    assert not lacks(connections, "a", 105)
    connections.note("b", 5_000)
    assert lacks(connections, "a", 105)
    assert lacks(connections, "a", 60)
    assert not lacks(connections, "a", 59)
    assert not lacks(connections, "b", 5_000)


def test_client_of_a_proxy_that_uses_several_connections_has_left_none_of_them() -> None:
    connections = ClientConnections()
    connections.note("stream", 10)
    connections.open("stream", 10)
    for number in range(2):
        connections.note(f"call-{number}", 100)
    assert not lacks(connections, "call-0", 100)
    connections.open("call-1", 100)
    connections.close("stream", 10)
    assert connections.open_calls == 1
    assert lacks(connections, "call-0", 100)


def test_connections_beyond_the_limit_are_forgotten_and_their_answers_have_arrived() -> None:
    connections = ClientConnections()
    for number in range(CONNECTIONS_MAX + 1):
        connections.note(f"call-{number}", 100)
        connections.broke(f"call-{number}", 100)
    assert not lacks(connections, "call-0", 100)
    assert lacks(connections, "call-1", 100)
