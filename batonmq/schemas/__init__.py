"""Values instead of bytes in the bodies of messages, by Pydantic, Protocol Buffers or Avro.

from batonmq.schemas import PydanticSchema, decoding

orders = PydanticSchema(Order)
await producer.send("orders", orders.encode(order))
await consumer.run(decoding(orders, bill))  # calls bill(order, message)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batonmq.schemas.avro_schema import AvroSchema
    from batonmq.schemas.decoding_handler import decoding
    from batonmq.schemas.protobuf_schema import ProtobufSchema
    from batonmq.schemas.pydantic_schema import PydanticSchema
    from batonmq.schemas.schema import Schema
    from batonmq.schemas.schema_registry import SchemaRegistry

__all__ = [
    "AvroSchema",
    "ProtobufSchema",
    "PydanticSchema",
    "Schema",
    "SchemaRegistry",
    "decoding",
]

_HOMES = {
    "AvroSchema": "batonmq.schemas.avro_schema",
    "ProtobufSchema": "batonmq.schemas.protobuf_schema",
    "PydanticSchema": "batonmq.schemas.pydantic_schema",
    "Schema": "batonmq.schemas.schema",
    "SchemaRegistry": "batonmq.schemas.schema_registry",
    "decoding": "batonmq.schemas.decoding_handler",
}

_EXTRAS = {"fastavro": "avro", "pydantic": "pydantic"}


def __getattr__(name: str) -> object:
    """Load a public name when it is first used: the packages of schemas are optional.

    Raises:
        ImportError: the package of the schema is not installed; it names the extra that brings it.
    """
    if name not in _HOMES:
        raise AttributeError(f"module 'batonmq.schemas' has no attribute {name!r}")
    try:
        home = importlib.import_module(_HOMES[name])
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        remedy = f"pip install 'batonmq[{_EXTRAS[package]}]'"
        raise ImportError(f"{name} needs the package {package}: {remedy}") from error
    return getattr(home, name)
