"""The contracts and the code that serves them, compared.

Goal: every call of a proto is served, every reason has an error class and every class a reason, and
an error is the same on both ends of the wire.
Method: reflection over all generated modules and all modules of `services`, so that a new proto,
reason or service is checked without a change here.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from types import ModuleType

import grpc
import pytest
from google.protobuf.descriptor import EnumDescriptor, FileDescriptor, ServiceDescriptor
from google.rpc import error_details_pb2

import baton
import batonmq_server
from baton.common.v1 import error_pb2
from batonmq import errors
from batonmq._common.rpc import ERROR_OF, error_from_pb, error_to_pb, status_of
from batonmq.errors import BatonError, Difference, Retry


def modules(package: ModuleType, pattern: str) -> list[ModuleType]:
    """Return the modules below `package` whose file matches `pattern`, without `__main__`."""
    module_list: list[ModuleType] = []
    for root in sorted(set(package.__path__)):
        for file in sorted(Path(root).rglob(pattern)):
            parts = file.relative_to(root).with_suffix("").parts
            if not parts[-1].startswith("__"):
                module_list.append(import_module(".".join((package.__name__, *parts))))
    return module_list


FILES: list[FileDescriptor] = [module.DESCRIPTOR for module in modules(baton, "*_pb2.py")]
SERVICES: list[ServiceDescriptor] = [s for f in FILES for s in f.services_by_name.values()]
SERVED = modules(batonmq_server, "*.py")
REASONS = [name.removeprefix("REASON_") for name in error_pb2.Reason.keys()][1:]  # noqa: SIM118
ERRORS: list[type[BatonError]] = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, BatonError) and cls is not BatonError
]


def enums() -> Iterator[EnumDescriptor]:
    for file in FILES:
        yield from file.enum_types_by_name.values()
        for message in file.message_types_by_name.values():
            yield from message.enum_types


def generated_base(service: ServiceDescriptor) -> type:
    name = service.file.name.removesuffix(".proto").replace("/", ".")
    base = getattr(import_module(f"{name}_pb2_grpc"), f"{service.name}Servicer")
    assert isinstance(base, type)
    return base


def below(cls: type) -> Iterator[type]:
    direct: list[type] = type.__subclasses__(cls)
    for subclass in direct:
        yield subclass
        yield from below(subclass)


# ---- services


def test_contracts_and_services_exist() -> None:
    assert {"StorageService", "OffsetsService", "LockmgrService", "NameserverService"} <= {
        service.name for service in SERVICES
    }
    assert SERVED


@pytest.mark.parametrize("service", SERVICES, ids=lambda service: service.full_name)
def test_every_call_is_served(service: ServiceDescriptor) -> None:
    base = generated_base(service)
    servicers = [c for c in below(base) if c.__module__.startswith("batonmq_server.")]
    # A servicer may be composed of base classes, one for each concern; only the last one counts.
    served_by = list({c for c in servicers if not c.__subclasses__()})
    assert len(served_by) == 1, f"{service.full_name} is served by {served_by}"
    inherited = [m for m in service.methods_by_name if getattr(served_by[0], m) is getattr(base, m)]
    assert not inherited, f"{served_by[0]} does not serve {inherited}"


@pytest.mark.parametrize("service", SERVICES, ids=lambda service: service.full_name)
def test_stream_of_requests_has_responses_and_only_server_streams_are_named_watch(
    service: ServiceDescriptor,
) -> None:
    """The edge of the services relies on both."""
    for name, method in service.methods_by_name.items():
        assert method.server_streaming or not method.client_streaming, name
        assert method.server_streaming or not name.startswith("Watch"), name


@pytest.mark.parametrize("enum", list(enums()), ids=lambda enum: enum.full_name)
def test_zero_of_every_enum_means_unspecified(enum: EnumDescriptor) -> None:
    assert enum.values_by_number[0].name.endswith("_UNSPECIFIED")


# ---- errors


def test_every_reason_has_one_class_and_every_class_a_reason() -> None:
    assert sorted(error.reason for error in ERRORS) == sorted(REASONS)
    assert sorted(ERROR_OF) == sorted(REASONS)
    assert set(ERROR_OF.values()) == set(ERRORS), "an error class without a reason"


def test_every_retry_advice_has_its_value() -> None:
    values = [name.removeprefix("RETRY_") for name in error_pb2.Retry.keys()]  # noqa: SIM118
    assert values[1:] == [retry.value for retry in Retry]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.reason)
def test_error_class_has_kind_advice_and_remedy(error: type[BatonError]) -> None:
    assert error.kind in grpc.StatusCode.__members__
    assert error.kind != "OK"
    assert isinstance(error.retry, Retry)
    assert error.__doc__
    assert error.remedy.endswith("."), "the remedy must be a sentence"


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.reason)
def test_error_is_the_same_on_both_ends(error: type[BatonError]) -> None:
    sent = error(
        "two of three, ü included",
        remedy="Do this instead.",
        retry_after_ms=1_234,
        facts={"limit": 3, "queue": "t/b/0"},
        differences=(Difference("t", "expression", "new", "a", "old", "b"),),
    )
    received = error_from_pb(error_pb2.Error.FromString(error_to_pb(sent).SerializeToString()))
    assert type(received) is error
    assert str(received) == str(sent)
    assert (received.message, received.remedy, received.retry_after_ms) == (
        sent.message,
        "Do this instead.",
        1_234,
    )
    assert received.facts == {"limit": "3", "queue": "t/b/0"}
    assert received.differences == sent.differences


DETAILS: dict[type[BatonError], errors.Detail] = {
    errors.Fenced: errors.FencedDetail(
        token=1, current=2, reset_epoch=3, why=errors.FenceCause.FORCED
    ),
    errors.TokenMismatch: errors.TokenMismatchDetail(expected=1, token=2, attempt="1-2-3"),
    errors.GroupMoved: errors.GroupMovedDetail(group="g", offsets_set="offsets-b", move=7),
    errors.OldEpoch: errors.OldEpochDetail(epoch=6, current=7),
    errors.UnknownQueue: errors.UnknownQueueDetail(token=4, reset_epoch=0),
    errors.TopicNotFound: errors.TopicNotFoundDetail(topic="t"),
    errors.OffsetOutOfRange: errors.OffsetOutOfRangeDetail(offset=1, first_offset=5),
    errors.DataLoss: errors.DataLossDetail(position=0),
}


def test_every_typed_detail_has_an_example() -> None:
    assert {e: type(d) for e, d in DETAILS.items()} == {
        e: e.detail_type for e in ERRORS if e.detail_type is not None
    }


def test_every_message_of_a_detail_has_the_fields_of_its_class() -> None:
    oneof = error_pb2.Error.DESCRIPTOR.oneofs_by_name["detail"]
    messages = [field.message_type for field in oneof.fields if field.message_type is not None]
    assert {message.name: [field.name for field in message.fields] for message in messages} == {
        type(detail).__name__: [field.name for field in fields(detail)]
        for detail in DETAILS.values()
    }


@pytest.mark.parametrize("error", DETAILS, ids=lambda error: error.reason)
def test_typed_detail_is_the_same_on_both_ends_and_part_of_the_facts(
    error: type[BatonError],
) -> None:
    sent = error("why", facts={"more": 1}, detail=DETAILS[error])
    got = error_from_pb(error_pb2.Error.FromString(error_to_pb(sent).SerializeToString()))
    assert got.detail == DETAILS[error]
    assert got.facts == sent.facts == {"more": "1"} | DETAILS[error].facts()


@pytest.mark.parametrize("error", DETAILS, ids=lambda error: error.reason)
def test_absent_detail_reads_as_its_defaults(error: type[BatonError]) -> None:
    got = error_from_pb(error_pb2.Error(reason=error_pb2.Reason.Value(f"REASON_{error.reason}")))
    assert error.detail_type is not None
    assert got.detail == error.detail_type()
    assert got.facts == {}


@pytest.mark.parametrize("error", DETAILS, ids=lambda error: error.reason)
def test_detail_of_an_earlier_version_is_read_from_its_facts(error: type[BatonError]) -> None:
    facts = DETAILS[error].facts()
    reason = error_pb2.Reason.Value(f"REASON_{error.reason}")
    got = error_from_pb(error_pb2.Error(reason=reason, facts=facts))
    assert got.detail == DETAILS[error]
    assert got.facts == facts


def test_malformed_fact_of_an_earlier_version_is_not_in_the_detail() -> None:
    facts = {"token": "unknown", "current": "7", "why": "LATER", "queue": "t/b/0"}
    got = error_from_pb(error_pb2.Error(reason=error_pb2.REASON_FENCED, facts=facts))
    assert got.detail == errors.FencedDetail(current=7)
    assert got.facts == facts


def test_unknown_field_is_not_a_fact() -> None:
    assert errors.FencedDetail(token=1).facts() == {
        "token": "1",
        "current": "0",
        "why": "UNSPECIFIED",
    }
    assert errors.DataLossDetail().facts() == {}


def test_fence_cause_of_a_later_version_becomes_unspecified() -> None:
    packed = error_pb2.Error(reason=error_pb2.REASON_FENCED)
    packed.fenced.why = 99  # type: ignore[assignment]
    got = error_from_pb(packed)
    assert isinstance(got, errors.Fenced)
    assert got.detail.why is errors.FenceCause.UNSPECIFIED


def test_every_fence_cause_has_its_value() -> None:
    names = [name.removeprefix("FENCE_CAUSE_") for name in error_pb2.FenceCause.keys()]  # noqa: SIM118
    assert names == [cause.value for cause in errors.FenceCause]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.reason)
def test_status_carries_code_message_and_the_error(error: type[BatonError]) -> None:
    status = status_of(error("why"))
    assert status.code == grpc.StatusCode[error.kind].value[0]
    assert status.message == "why"
    packed = error_pb2.Error()
    assert status.details[0].Unpack(packed)
    assert packed == error_to_pb(error("why"))
    assert packed.remedy == error.remedy


def test_retry_info_is_left_out_without_advice() -> None:
    status = status_of(errors.TopicNotFound("why"))
    assert [detail.TypeName() for detail in status.details] == [
        "baton.common.v1.Error",
        "google.rpc.ErrorInfo",
    ]


def test_facts_beyond_the_bound_are_left_out_of_the_error_info() -> None:
    facts = {"a": "x" * 1_000, "b": "y" * 21, "c": "z"}
    status = status_of(errors.InvalidArgument("why", facts=facts))
    info, packed = error_details_pb2.ErrorInfo(), error_pb2.Error()
    assert status.details[1].Unpack(info)
    assert info.metadata.keys() == {"a", "b"}
    assert status.details[0].Unpack(packed)
    assert dict(packed.facts) == facts


def test_reason_of_a_later_version_becomes_internal() -> None:
    got = error_from_pb(error_pb2.Error(reason=9_999, message="what is new"))  # type: ignore[arg-type]
    assert type(got) is errors.Internal
    assert got.message == "what is new"


def test_unset_reason_becomes_internal() -> None:
    assert type(error_from_pb(error_pb2.Error(message="?"))) is errors.Internal
