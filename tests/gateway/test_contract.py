"""Our protos are the contract: every name, number and type is that of the official packages."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2 as pb

from apache.rocketmq.v2 import admin_pb2, definition_pb2, service_pb2
from tests.gateway.official_clients import MORE, official_client

DUMP = """
import sys
from google.protobuf import descriptor_pb2
from rocketmq.grpc_protocol import admin_pb2, definition_pb2, service_pb2
files = descriptor_pb2.FileDescriptorSet()
for module in (definition_pb2, service_pb2, admin_pb2):
    module.DESCRIPTOR.CopyToProto(files.file.add())
sys.stdout.buffer.write(files.SerializeToString())
"""


def ours() -> pb.FileDescriptorSet:
    files = pb.FileDescriptorSet()
    for module in (definition_pb2, service_pb2, admin_pb2):
        module.DESCRIPTOR.CopyToProto(files.file.add())
    return files


def python_package() -> pb.FileDescriptorSet:
    """Read the descriptors in a process of their own: both contracts can't be in one."""
    client = official_client("python")
    dumped = subprocess.run(
        [client.command[0], "-c", DUMP], env=client.environment, capture_output=True, check=True
    )
    return pb.FileDescriptorSet.FromString(dumped.stdout)


def node_package(folder: Path) -> pb.FileDescriptorSet:
    """Compile the protos that the Node.js package contains."""
    modules = official_client("node").folder / "node_modules" / "rocketmq-client-nodejs"
    names = [f"apache/rocketmq/v2/{name}.proto" for name in ("definition", "service", "admin")]
    out = folder / "descriptors"
    options = [f"-I{modules / 'proto'}", f"--descriptor_set_out={out}"]
    command = [sys.executable, "-m", "grpc_tools.protoc", *options, *names]
    subprocess.run(command, check=True)
    return pb.FileDescriptorSet.FromString(out.read_bytes())


def facts(files: pb.FileDescriptorSet) -> dict[str, str]:
    """Return one line for each enum value, field and method, by its full name."""
    return dict(line for file in files.file for line in _facts_of(file))


def _facts_of(file: pb.FileDescriptorProto) -> Iterator[tuple[str, str]]:
    for service in file.service:
        for method in service.method:
            yield (
                f"{file.package}.{service.name}.{method.name}",
                f"{method.client_streaming} {method.input_type} -> "
                f"{method.server_streaming} {method.output_type}",
            )
    for enum in file.enum_type:
        yield from _facts_of_enum(file.package, enum)
    for message in file.message_type:
        yield from _facts_of_message(file.package, message)
    options = file.options
    yield (
        file.package + "/" + Path(file.name).name,
        f"{options.java_package} {options.java_outer_classname} {options.csharp_namespace}",
    )


def _facts_of_enum(scope: str, enum: pb.EnumDescriptorProto) -> Iterator[tuple[str, str]]:
    for value in enum.value:
        yield f"{scope}.{enum.name}.{value.name}", str(value.number)


def _facts_of_message(scope: str, message: pb.DescriptorProto) -> Iterator[tuple[str, str]]:
    name = f"{scope}.{message.name}"
    yield name, "message"
    for field in message.field:
        oneof = (
            message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else "none"
        )
        yield (
            f"{name}.{field.name}",
            f"{field.number} label={field.label} type={field.type} {field.type_name} oneof={oneof}",
        )
    for enum in message.enum_type:
        yield from _facts_of_enum(name, enum)
    for nested in message.nested_type:
        yield from _facts_of_message(name, nested)


def java_package() -> pb.FileDescriptorSet:
    """Read the descriptors from the classes of the package."""
    command = [*official_client("java").command, '{"op": "contract"}']
    dumped = subprocess.run(command, capture_output=True, check=True).stdout
    files = pb.FileDescriptorSet()
    for encoded in json.loads(dumped)["files"]:
        files.file.add().MergeFromString(base64.b64decode(encoded))
    return files


@pytest.mark.timeout(300)
def test_contract_is_that_of_the_official_python_package() -> None:
    official = facts(python_package())
    assert len(official) > 300
    assert facts(ours()) == official


@pytest.mark.timeout(300)
def test_contract_is_that_of_the_official_node_package(tmp_path: Path) -> None:
    official = facts(node_package(tmp_path))
    assert len(official) > 300
    assert facts(ours()) == official


if "java" in MORE:

    @pytest.mark.timeout(300)
    def test_contract_is_that_of_the_official_java_package() -> None:
        """Java 5.2.0 is older than two fields of one request."""
        official, newer = facts(java_package()), facts(ours())
        assert len(official) > 300
        request = "apache.rocketmq.v2.ChangeInvisibleDurationRequest"
        assert newer.keys() - official.keys() == {f"{request}.lite_topic", f"{request}.suspend"}
        assert {name: newer.get(name) for name in official} == official


def test_comparison_finds_a_changed_number_and_a_missing_method() -> None:
    changed = ours()
    changed.file[0].message_type[0].field[0].number += 1
    del changed.file[1].service[0].method[0]
    differing = dict(facts(ours()).items() ^ facts(changed).items())
    assert len(differing) == 2, differing
