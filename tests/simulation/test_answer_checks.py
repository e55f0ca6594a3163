"""Goal: a grant that etcd does not have is found wherever it stands in a response.

Method: the checks of responses alone, with an expected state that has one of two grants.
"""

from __future__ import annotations

import pytest

from baton.common.v1 import queue_pb2
from baton.lockmgr.v1 import lockmgr_service_pb2 as pb
from tests.simulation.answer_checks import AnswerChecks
from tests.simulation.expected_state import ExpectedState, holder_of, key_of
from tests.simulation.trace import Trace

OWNER = queue_pb2.Incarnation(client_id="a", incarnation_id=7)


def granted(queue_id: int, token: int) -> pb.AcquireResponse:
    queue = queue_pb2.QueueRef(topic="t", broker="b", queue_id=queue_id)
    key = queue_pb2.GroupQueue(group="g", queue=queue)
    return pb.AcquireResponse(queue=key, grant=pb.Grant(token=token))


@pytest.mark.parametrize("stored_id", [0, 1])
def test_each_grant_of_a_response_must_be_persisted(stored_id: int) -> None:
    expected = ExpectedState("g", 1_000, Trace(lambda: 0), lambda: 0)
    checks, request = AnswerChecks(expected), pb.AcquireRequest(incarnation=OWNER)
    response = granted(0, 3)
    response.others.append(granted(1, 4))
    stored = granted(stored_id, 3 + stored_id)
    expected.queues[key_of(stored.queue)].persisted[stored.grant.token] = holder_of(OWNER)
    checks.answered("lockmgr", request, response)
    assert expected.violation is not None
    assert f"grants token {4 - stored_id}, not persisted" in str(expected.violation)
