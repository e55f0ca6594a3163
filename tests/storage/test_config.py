"""Goal: inconsistent settings are rejected; a node without replicas is its own broker.

Method: settings are built directly.
"""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from batonmq_server.storage.config import StorageSettings


def settings(**fields: Any) -> StorageSettings:
    return StorageSettings(**({"node_id": "a-0"} | fields))


def test_node_without_replicas_is_the_broker_of_its_name() -> None:
    alone = settings()
    assert (alone.broker_name, alone.members) == ("a-0", frozenset({"a-0"}))


def test_nodes_of_a_set_share_a_broker() -> None:
    one = settings(broker="broker-a", replicas="a-0,a-1", min_in_sync=2)
    assert (one.broker_name, one.members) == ("broker-a", frozenset({"a-0", "a-1"}))


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"replicas": "a-1,a-2"}, "must include node_id a-0"),
        ({"replicas": "a-0,a-1", "min_in_sync": 3}, "number of replicas, 2, got 3"),
        ({"min_in_sync": 2}, "number of replicas, 1, got 2"),
        ({"replicas": "a-0,,a-1"}, "pattern"),
        ({"replicas": "a-0,b,c,d,e,f"}, "pattern"),
        ({"broker": "No Name"}, "pattern"),
    ],
)
def test_inconsistent_settings_are_rejected(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        settings(**fields)


def test_default_memory_window_is_a_share_of_the_memory() -> None:
    assert settings(memory_window_bytes=7).memory_window == 7
    assert settings().memory_window > 1 << 24
