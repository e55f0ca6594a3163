"""Goal: arbitrary requests reach every field, are repeatable, and failures are judged correctly.

Method: the generator with fixed seeds on the real contracts; statuses as a client gets them; one
short run against a real cluster. `make fuzz` is the long run.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import grpc
import pytest
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass

from batonmq._common.rpc import STATUS_TRAILER, status_of
from batonmq.errors import BatonError, Internal, TopicNotFound
from batonmq_server.local.cluster import LocalCluster
from batonmq_server.local.layout import ClusterOptions
from tools.fuzz.requests import RequestGenerator
from tools.fuzz.run import SERVICES, methods_of, random_of, run_fuzz
from tools.fuzz.verdict import TIMED_OUT, outcome_of

NAMES = ("known-topic", "known-group")


@pytest.mark.parametrize("service", SERVICES)
def test_same_seed_gives_the_same_requests(service: str) -> None:
    def drawn(seed: int) -> list[bytes]:
        generator = RequestGenerator(random_of(seed, service), NAMES)
        return [generator.request(method.input_type) for method in methods_of(service) * 3]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


@pytest.mark.parametrize("service", SERVICES)
def test_every_field_of_every_request_is_set_at_times(service: str) -> None:
    generator = RequestGenerator(Random(3), NAMES)
    for method in methods_of(service):
        kind = method.input_type
        drawn = [generator.message(kind, existing=True) for _ in range(60)]
        fields = {field.name for message in drawn for field, _ in message.ListFields()}
        assert fields == {field.name for field in kind.fields}, method.full_name


def test_requests_are_valid_and_damaged_messages_with_and_without_known_names() -> None:
    (pull,) = [each for each in methods_of("storage") if each.name == "Pull"]
    generator = RequestGenerator(Random(4), NAMES)
    drawn = [generator.request(pull.input_type) for _ in range(300)]
    damaged = 0
    for request in drawn:
        try:
            GetMessageClass(pull.input_type).FromString(request)
        except DecodeError:
            damaged += 1
    assert 10 < damaged < 150
    assert any(b"known-topic" in request for request in drawn)


def failure(code: grpc.StatusCode, error: BatonError | None = None) -> grpc.aio.AioRpcError:
    """Return a failed call with or without the details of the error contract."""
    trailer = grpc.aio.Metadata()
    if error is not None:
        trailer.add(STATUS_TRAILER, status_of(error).SerializeToString())
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailer, "details")


def test_failure_with_a_reason_is_allowed_and_others_break_the_contract() -> None:
    code = grpc.StatusCode
    assert outcome_of(failure(code.NOT_FOUND, TopicNotFound("no"))) == ("TOPIC_NOT_FOUND", "")
    assert outcome_of(failure(code.DEADLINE_EXCEEDED)) == (TIMED_OUT, "")
    for broken in (
        failure(code.UNKNOWN),
        failure(code.UNIMPLEMENTED),
        failure(code.UNAVAILABLE),
        failure(code.INTERNAL, Internal("no")),
    ):
        name, problem = outcome_of(broken)
        assert name == broken.code().name
        assert problem.startswith(name)


@pytest.mark.e2e
@pytest.mark.timeout(240)
async def test_services_answer_arbitrary_requests_by_the_contract(tmp_path: Path) -> None:
    options = ClusterOptions(storage_replicas=2, offsets=2, auto_restart=False, log_level="WARNING")
    async with LocalCluster(tmp_path, options) as cluster:
        result = await run_fuzz(cluster, seed=15, calls=150)
    assert result.restarted == []
    assert [problem for each in result.services.values() for problem in each.problems] == []
    assert all(each.outcomes.total() == 150 for each in result.services.values())
    assert len(result.probe_ms) > 1
