"""The stored names of what remote clients name."""

from __future__ import annotations

import pytest

from apache.rocketmq.v2 import definition_pb2 as pb
from batonmq_server.gateway.callers import Caller
from batonmq_server.gateway.statuses import Refused


@pytest.mark.parametrize("prefix", ["%RETRY", "%DLQ"])
@pytest.mark.parametrize("own", [True, False])
def test_namespace_does_not_make_a_topic_one_of_a_group(prefix: str, own: bool) -> None:
    caller = Caller("client", "" if own else prefix, "JAVA")
    resource = pb.Resource(name="billing", resource_namespace=prefix if own else "")
    with pytest.raises(Refused, match=f"topic {prefix}%billing belongs to a consumer group"):
        caller.topic(resource)


def test_topic_in_a_namespace_is_stored_under_both_names() -> None:
    resource = pb.Resource(name="orders", resource_namespace="blue")
    assert Caller("client", "green", "JAVA").topic(resource) == "blue%orders"
