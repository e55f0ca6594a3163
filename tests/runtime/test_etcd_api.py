"""Goal: the contract of etcd's v3 API has the names, numbers and types of etcd itself.

Method: a table of etcd 3.5's interface, written down once, against the generated descriptors; the
other tests call a real etcd.
"""

from __future__ import annotations

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor

from batonmq_server.etcd_api import kv_pb2, rpc_pb2

FIELDS = """
mvccpb.KeyValue key 1 bytes
mvccpb.KeyValue create_revision 2 int64
mvccpb.KeyValue mod_revision 3 int64
mvccpb.KeyValue value 5 bytes
mvccpb.KeyValue lease 6 int64
mvccpb.Event type 1 mvccpb.Event.EventType
mvccpb.Event kv 2 mvccpb.KeyValue
etcdserverpb.ResponseHeader revision 3 int64
etcdserverpb.RangeRequest key 1 bytes
etcdserverpb.RangeRequest range_end 2 bytes
etcdserverpb.RangeRequest limit 3 int64
etcdserverpb.RangeRequest revision 4 int64
etcdserverpb.RangeRequest serializable 7 bool
etcdserverpb.RangeRequest count_only 9 bool
etcdserverpb.RangeResponse header 1 etcdserverpb.ResponseHeader
etcdserverpb.RangeResponse kvs 2 repeated mvccpb.KeyValue
etcdserverpb.RangeResponse more 3 bool
etcdserverpb.PutRequest key 1 bytes
etcdserverpb.PutRequest value 2 bytes
etcdserverpb.PutRequest lease 3 int64
etcdserverpb.DeleteRangeRequest key 1 bytes
etcdserverpb.DeleteRangeResponse deleted 2 int64
etcdserverpb.RequestOp request_range 1 etcdserverpb.RangeRequest
etcdserverpb.RequestOp request_put 2 etcdserverpb.PutRequest
etcdserverpb.RequestOp request_delete_range 3 etcdserverpb.DeleteRangeRequest
etcdserverpb.RequestOp request_txn 4 etcdserverpb.TxnRequest
etcdserverpb.ResponseOp response_range 1 etcdserverpb.RangeResponse
etcdserverpb.Compare result 1 etcdserverpb.Compare.CompareResult
etcdserverpb.Compare target 2 etcdserverpb.Compare.CompareTarget
etcdserverpb.Compare key 3 bytes
etcdserverpb.Compare create_revision 5 int64
etcdserverpb.Compare mod_revision 6 int64
etcdserverpb.TxnRequest compare 1 repeated etcdserverpb.Compare
etcdserverpb.TxnRequest success 2 repeated etcdserverpb.RequestOp
etcdserverpb.TxnResponse header 1 etcdserverpb.ResponseHeader
etcdserverpb.TxnResponse succeeded 2 bool
etcdserverpb.TxnResponse responses 3 repeated etcdserverpb.ResponseOp
etcdserverpb.CompactionRequest revision 1 int64
etcdserverpb.CompactionRequest physical 2 bool
etcdserverpb.WatchRequest create_request 1 etcdserverpb.WatchCreateRequest
etcdserverpb.WatchCreateRequest key 1 bytes
etcdserverpb.WatchCreateRequest range_end 2 bytes
etcdserverpb.WatchCreateRequest start_revision 3 int64
etcdserverpb.WatchCreateRequest progress_notify 4 bool
etcdserverpb.WatchCreateRequest fragment 8 bool
etcdserverpb.WatchResponse header 1 etcdserverpb.ResponseHeader
etcdserverpb.WatchResponse created 3 bool
etcdserverpb.WatchResponse canceled 4 bool
etcdserverpb.WatchResponse compact_revision 5 int64
etcdserverpb.WatchResponse fragment 7 bool
etcdserverpb.WatchResponse events 11 repeated mvccpb.Event
etcdserverpb.LeaseGrantRequest TTL 1 int64
etcdserverpb.LeaseGrantRequest ID 2 int64
etcdserverpb.LeaseGrantResponse ID 2 int64
etcdserverpb.LeaseRevokeRequest ID 1 int64
etcdserverpb.LeaseKeepAliveRequest ID 1 int64
etcdserverpb.LeaseKeepAliveResponse TTL 3 int64
etcdserverpb.LeaseTimeToLiveRequest ID 1 int64
etcdserverpb.LeaseTimeToLiveResponse TTL 3 int64
etcdserverpb.LeaseTimeToLiveResponse grantedTTL 4 int64
etcdserverpb.AlarmRequest action 1 etcdserverpb.AlarmRequest.AlarmAction
etcdserverpb.AlarmRequest memberID 2 uint64
etcdserverpb.AlarmRequest alarm 3 etcdserverpb.AlarmType
etcdserverpb.AlarmMember memberID 1 uint64
etcdserverpb.AlarmMember alarm 2 etcdserverpb.AlarmType
etcdserverpb.AlarmResponse alarms 2 repeated etcdserverpb.AlarmMember
etcdserverpb.StatusResponse dbSize 3 int64
etcdserverpb.StatusResponse dbSizeInUse 9 int64
"""
VALUES = """
mvccpb.Event.EventType PUT 0
mvccpb.Event.EventType DELETE 1
etcdserverpb.Compare.CompareResult EQUAL 0
etcdserverpb.Compare.CompareTarget VERSION 0
etcdserverpb.Compare.CompareTarget CREATE 1
etcdserverpb.Compare.CompareTarget MOD 2
etcdserverpb.AlarmRequest.AlarmAction GET 0
etcdserverpb.AlarmRequest.AlarmAction ACTIVATE 1
etcdserverpb.AlarmRequest.AlarmAction DEACTIVATE 2
etcdserverpb.AlarmType NONE 0
etcdserverpb.AlarmType NOSPACE 1
etcdserverpb.AlarmType CORRUPT 2
"""
METHODS = """
etcdserverpb.KV.Range etcdserverpb.RangeRequest etcdserverpb.RangeResponse
etcdserverpb.KV.DeleteRange etcdserverpb.DeleteRangeRequest etcdserverpb.DeleteRangeResponse
etcdserverpb.KV.Txn etcdserverpb.TxnRequest etcdserverpb.TxnResponse
etcdserverpb.KV.Compact etcdserverpb.CompactionRequest etcdserverpb.CompactionResponse
etcdserverpb.Watch.Watch stream etcdserverpb.WatchRequest stream etcdserverpb.WatchResponse
etcdserverpb.Lease.LeaseGrant etcdserverpb.LeaseGrantRequest etcdserverpb.LeaseGrantResponse
etcdserverpb.Lease.LeaseRevoke etcdserverpb.LeaseRevokeRequest etcdserverpb.LeaseRevokeResponse
etcdserverpb.Lease.LeaseKeepAlive stream etcdserverpb.LeaseKeepAliveRequest \
stream etcdserverpb.LeaseKeepAliveResponse
etcdserverpb.Lease.LeaseTimeToLive etcdserverpb.LeaseTimeToLiveRequest \
etcdserverpb.LeaseTimeToLiveResponse
etcdserverpb.Maintenance.Alarm etcdserverpb.AlarmRequest etcdserverpb.AlarmResponse
etcdserverpb.Maintenance.Status etcdserverpb.StatusRequest etcdserverpb.StatusResponse
etcdserverpb.Maintenance.Defragment etcdserverpb.DefragmentRequest etcdserverpb.DefragmentResponse
"""
FILES = (kv_pb2.DESCRIPTOR, rpc_pb2.DESCRIPTOR)
MESSAGES: list[Descriptor] = [m for f in FILES for m in f.message_types_by_name.values()]
ENUMS: list[EnumDescriptor] = [
    *(e for m in MESSAGES for e in m.enum_types),
    *(e for f in FILES for e in f.enum_types_by_name.values()),
]
TYPES = {
    FieldDescriptor.TYPE_BYTES: "bytes",
    FieldDescriptor.TYPE_INT64: "int64",
    FieldDescriptor.TYPE_BOOL: "bool",
    FieldDescriptor.TYPE_UINT64: "uint64",
}


def line(field: FieldDescriptor) -> str:
    named = field.message_type or field.enum_type
    kind = named.full_name if named is not None else TYPES[field.type]
    many = ["repeated"] if field.is_repeated else []
    message = field.full_name.rpartition(".")[0]
    return " ".join([message, field.name, str(field.number), *many, kind])


def test_fields_have_the_names_numbers_and_types_of_etcd() -> None:
    fields = [line(field) for message in MESSAGES for field in message.fields]
    assert fields == FIELDS.split("\n")[1:-1]


def test_enum_values_have_the_names_and_numbers_of_etcd() -> None:
    values = [f"{enum.full_name} {v.name} {v.number}" for enum in ENUMS for v in enum.values]
    assert values == VALUES.split("\n")[1:-1]


def test_methods_have_the_names_and_messages_of_etcd() -> None:
    methods = [
        " ".join(
            [
                method.full_name,
                *(["stream"] if method.client_streaming else []),
                method.input_type.full_name,
                *(["stream"] if method.server_streaming else []),
                method.output_type.full_name,
            ]
        )
        for service in rpc_pb2.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ]
    assert methods == METHODS.split("\n")[1:-1]
