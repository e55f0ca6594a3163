"""Goal: options of the transport are checked, listed in the reference, and hide the token.

Method: the functions themselves, and the table of the page.
"""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from batonmq._kombu.link_options import LinkOptions, options_from_json, options_of
from batonmq._kombu.queue_names import names_of
from batonmq.errors import InvalidArgument, InvalidName

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "api" / "kombu.md"


def test_options_of_the_url_and_of_the_transport_are_joined() -> None:
    options = options_of(
        "host:9876", {"ca_file": "ca.pem", "max_retries": 3}, password="secret", connect_timeout_s=2
    )
    assert (options.nameserver, options.connect_timeout_ms) == ("host:9876", 2_000)
    security = options.security
    assert security is not None and security.token is not None
    assert (security.ca_file, security.token.reveal()) == ("ca.pem", "secret")
    assert "secret" not in repr(options)
    assert options_from_json(options.to_json()) == options


def test_connections_have_no_tls_unless_an_option_asks_for_it() -> None:
    assert options_of("host:9876", {}).security is None
    assert options_of("host:9876", {"tls": True}).security is not None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"colour": "red"}, "transport option colour is unknown"),
        ({"span_max": "many"}, "span_max must be int of at least 1, got 'many'"),
        ({"unacked_max": 0}, "unacked_max must be int of at least 1, got 0"),
        ({"queue_count": True}, "queue_count must be int of at least 0, got True"),
        ({"tls": 1}, "tls must be bool, got 1"),
        ({"durability": "SOME"}, "durability must be one of MEMORY, FSYNCED, REPLICATED"),
        ({"cert_file": "cert.pem"}, "key_file is missing"),
        ({"token": "a", "token_file": "b"}, "both token and token_file"),
    ],
)
def test_options_that_are_not_possible_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        options_of("host:9876", given)


def test_two_tokens_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="the URL has a password"):
        options_of("host:9876", {"token_file": "token"}, password="secret")


def test_reference_lists_every_option() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)
    assert rows == [field.name for field in fields(LinkOptions)]


def test_requeues_are_delayed_more_and_more() -> None:
    options = LinkOptions(nameserver="host:1", requeue_ms=1_000, requeue_ms_max=5_000)
    delays = [options.requeue_delay_ms(attempts) for attempts in range(1, 7)]
    assert delays == [0, 1_000, 2_000, 4_000, 5_000, 5_000]
    assert options.requeue_delay_ms(10_000) == 5_000


def test_a_queue_is_a_topic_and_a_group_of_its_name() -> None:
    names = names_of("mail.urgent ü", "shop-")
    assert (names.queue, names.topic) == ("mail.urgent ü", "shop-mail%2Eurgent%20%C3%BC")
    assert names.group == names.topic


def test_different_queues_have_different_topics() -> None:
    queues = ["a.b", "a%2Eb", "a_b", "a-b", "A.b"]
    assert len({names_of(queue).topic for queue in queues}) == len(queues)


@pytest.mark.parametrize("queue", ["", "q" * 121, "BATON_SYS_x"])
def test_a_queue_without_a_possible_topic_is_refused(queue: str) -> None:
    with pytest.raises(InvalidName):
        names_of(queue)
