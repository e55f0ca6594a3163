"""Bodies in the single-object encoding of Avro: each names the schema that wrote it."""

from __future__ import annotations

import json
from io import BytesIO
from typing import TYPE_CHECKING, Any, Final

import fastavro
from fastavro.schema import SchemaParseException, fingerprint, to_parsing_canonical_form

from batonmq._consumer.handler_results import BadBody
from batonmq.errors import InvalidArgument

if TYPE_CHECKING:
    from batonmq.schemas.schema_registry import SchemaRegistry

MARKER: Final = b"\xc3\x01"
"""Begin of a body. Source: Avro 1.12, single-object encoding."""
FINGERPRINT_BYTES: Final = 8
HEADER_BYTES: Final = len(MARKER) + FINGERPRINT_BYTES

Definition = dict[str, Any] | list[Any] | str
"""A schema as the JSON of Avro says it."""


class ParsedSchema:
    """A schema that is parsed, and its fingerprint.

    Attributes:
        text: Its definition as JSON.
        fingerprint: CRC-64-AVRO of its canonical form, little-endian.

    Raises:
        InvalidArgument: It is no schema.
    """

    def __init__(self, definition: Definition) -> None:
        try:
            self.parsed = fastavro.parse_schema(definition)
            canonical = to_parsing_canonical_form(definition)
            self.fingerprint = bytes.fromhex(fingerprint(canonical, "CRC-64-AVRO"))
            self.text = json.dumps(definition, separators=(",", ":"), sort_keys=True)
        except (SchemaParseException, KeyError, TypeError, ValueError) as error:
            raise InvalidArgument(
                f"it is no schema of Avro: {type(error).__name__}: {error}",
                facts={"field": "definition"},
            ) from error


class AvroSchema:
    """A schema of Avro, in a registry: see `SchemaRegistry.avro`.

    A body has ten bytes before its data: the marker C3 01 and the fingerprint of the schema that
    wrote it. The registry has that schema, so a reader with another version of it can read the
    body by Avro's rules: fields may be added and removed if they have defaults.
    """

    def __init__(self, schema: ParsedSchema, registry: SchemaRegistry) -> None:
        self._schema, self._registry = schema, registry

    @property
    def fingerprint(self) -> bytes:
        """CRC-64-AVRO of the schema, 8 bytes, little-endian."""
        return self._schema.fingerprint

    def encode(self, value: Any) -> bytes:
        """See `Schema.encode`."""
        data = BytesIO()
        data.write(MARKER + self._schema.fingerprint)
        try:
            fastavro.schemaless_writer(data, self._schema.parsed, value, strict=True)
        except Exception as error:  # the kinds of errors are not documented
            raise InvalidArgument(
                f"the value does not fit the schema: {type(error).__name__}: {error}",
                facts={"field": "value"},
            ) from error
        return data.getvalue()

    async def decode(self, body: bytes) -> Any:
        """See `Schema.decode`.

        Raises:
            BadBody: The body has no marker, no schema in the registry fits it, or its data is bad.
            BatonError: The registry can't be read.
        """
        if len(body) < HEADER_BYTES or not body.startswith(MARKER):
            raise BadBody("the body does not begin as a single object of Avro")
        name = body[len(MARKER) : HEADER_BYTES]
        known = name == self._schema.fingerprint
        writer = self._schema if known else await self._registry._find(name)
        if writer is None:
            raise BadBody(f"the registry has no schema {name.hex()}, which the body names")
        data = BytesIO(body)
        data.seek(HEADER_BYTES)
        try:
            value = fastavro.schemaless_reader(data, writer.parsed, self._schema.parsed)
        except Exception as error:  # noqa: BLE001  the kinds of errors are not documented
            text = f"the body does not fit the schema: {type(error).__name__}: {error}"
            raise BadBody(text) from None
        if left := len(body) - data.tell():
            raise BadBody(f"the body has {left} more bytes than its schema says")
        return value
