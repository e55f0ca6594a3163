"""Options of `format("baton")`: parsed, checked, and pickled to the executors.

An unknown name is an error, so that a misspelt option is never ignored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal, TypeVar

from batonmq._connection.security import Security
from batonmq.admin.admin import Admin
from batonmq.errors import InvalidArgument

T = TypeVar("T")
View = Literal["messages", "metrics"]
METRICS_TOPIC = "BATON_SYS_METRICS"
FETCH_BYTES_MAX = 4 * 1024 * 1024
FETCH_MESSAGES_MAX = 65_535

_SPARK_OPTIONS = {"path", "checkpointlocation", "queryname"}
_CONNECTION_OPTIONS = {
    "nameserver", "timeoutms", "tls", "tlscafile", "tlscertfile", "tlskeyfile", "tlsservername",
    "tokenfile",
}  # fmt: skip
_READ_OPTIONS = {
    "topic", "view", "startingoffsets", "startingtimestamp", "endingoffsets", "endingtimestamp",
    "queues", "maxrowspertrigger", "failondataloss", "readfrom", "pushdown", "rowsperbatch",
}  # fmt: skip
_WRITE_OPTIONS = {"topic", "writeid", "order", "rowsperbatch", "compression"}


class BadOption(ValueError):
    """An option is missing, unknown, or has an invalid value."""


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """How to connect to a cluster.

    Attributes:
        timeout_ms: How long calls are retried while services are unreachable.
        security: TLS settings; None for no TLS. The files must exist on every node.
    """

    nameserver: str
    timeout_ms: int = 120_000
    security: Security | None = None

    def admin(self) -> Admin:
        """Return a client; call this in the event loop that uses it."""
        return Admin(self.nameserver, timeout_s=self.timeout_ms / 1000, security=self.security)


@dataclass(frozen=True, slots=True)
class FromTime:
    """The first message stored at or after a time."""

    unix_ms: int


OffsetOption = Literal["earliest", "latest"] | int
OffsetsOption = Literal["earliest", "latest"] | FromTime | Mapping[str, OffsetOption]
"""Where to begin or to end reading: in all queues, or by `broker/queue_id`."""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How to read a topic; docs/reference/spark.md describes the options.

    Attributes:
        queues: `broker/queue_id` of the queues to read; None for all.
        rows_max: Maximum messages of a micro-batch; 0 for no limit.
        followers: Whether to read from followers before the leader.
    """

    connection: ConnectionOptions
    topic: str
    view: View
    starting: OffsetsOption
    ending: OffsetsOption
    queues: frozenset[str] | None
    rows_max: int
    fail_on_data_loss: bool
    followers: bool
    push_down: bool
    rows_per_batch: int


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """How to write to a topic.

    Attributes:
        write_id: Identifies a batch write, so that a repeated write stores nothing twice.
        sorted: Whether a task sorts its rows, for plans that may change the order of rows.
    """

    connection: ConnectionOptions
    topic: str
    write_id: str
    sorted: bool
    rows_per_batch: int
    compression: str


def read_options(options: Mapping[str, str]) -> ReadOptions:
    """Parse the options of a read.

    Raises:
        BadOption: an option is missing, unknown or invalid.
    """
    given = _OptionReader(options, _CONNECTION_OPTIONS | _READ_OPTIONS)
    view: View = given.one_of("view", "messages", ("messages", "metrics"))
    topic = given.text("topic", METRICS_TOPIC if view == "metrics" else "")
    if not topic:
        raise BadOption("option topic is missing")
    queues = given.text("queues")
    return ReadOptions(
        connection=_connection(given),
        topic=topic,
        view=view,
        starting=_offsets_option(given, "starting", "earliest"),
        ending=_offsets_option(given, "ending", "latest"),
        queues=frozenset(part.strip() for part in queues.split(",")) if queues else None,
        rows_max=given.number("maxRowsPerTrigger", 0),
        fail_on_data_loss=given.flag("failOnDataLoss", True),
        followers=given.one_of("readFrom", "leader", ("leader", "followers")) == "followers",
        push_down=given.flag("pushDown", False),
        rows_per_batch=given.number("rowsPerBatch", 8_192, least=1),
    )


def write_options(options: Mapping[str, str]) -> WriteOptions:
    """Parse the options of a write.

    Raises:
        BadOption: an option is missing, unknown or invalid.
    """
    given = _OptionReader(options, _CONNECTION_OPTIONS | _WRITE_OPTIONS)
    topic = given.text("topic")
    if not topic:
        raise BadOption("option topic is missing")
    return WriteOptions(
        connection=_connection(given),
        topic=topic,
        write_id=given.text("writeId"),
        sorted=given.one_of("order", "rows", ("rows", "content")) == "content",
        rows_per_batch=given.number("rowsPerBatch", 1_000, least=1),
        compression=given.one_of("compression", "none", ("none", "lz4", "zstd")),
    )


class _OptionReader:
    """Reads options by name; names are not case-sensitive."""

    def __init__(self, options: Mapping[str, str], known: set[str]) -> None:
        self._values = {name.lower(): value for name, value in options.items()}
        if unknown := sorted(self._values.keys() - known - _SPARK_OPTIONS):
            raise BadOption(f"unknown option {unknown[0]}; known are {', '.join(sorted(known))}")

    def text(self, name: str, default: str = "") -> str:
        return self._values.get(name.lower(), default).strip()

    def number(self, name: str, default: int, *, least: int = 0) -> int:
        return self._read(name, default, lambda text: _at_least(int(text), least))

    def flag(self, name: str, default: bool) -> bool:
        return self._read(name, default, lambda text: {"true": True, "false": False}[text.lower()])

    def one_of(self, name: str, default: T, choices: tuple[T, ...]) -> T:
        by_name = {str(choice): choice for choice in choices}
        return self._read(name, default, lambda text: by_name[text.lower()])

    def _read(self, name: str, default: T, parse: Callable[[str], T]) -> T:
        text = self.text(name)
        if not text:
            return default
        try:
            return parse(text)
        except (ValueError, KeyError) as error:
            raise BadOption(f"option {name} has an invalid value: {text!r}") from error


def _at_least(value: int, least: int) -> int:
    if value < least:
        raise ValueError(value)
    return value


def _connection(given: _OptionReader) -> ConnectionOptions:
    nameserver = given.text("nameserver")
    if not nameserver:
        raise BadOption("option nameserver is missing: host:port, several separated by commas")
    try:
        security = Security(
            ca_file=given.text("tlsCaFile"),
            cert_file=given.text("tlsCertFile"),
            key_file=given.text("tlsKeyFile"),
            server_name=given.text("tlsServerName"),
            token_file=given.text("tokenFile"),
        )
    except InvalidArgument as error:
        raise BadOption("options tlsCertFile and tlsKeyFile must be given together") from error
    use_tls = given.flag("tls", security != Security())
    if security != Security() and not use_tls:
        raise BadOption("option tls is false, but TLS files or a token file are given")
    timeout_ms = given.number("timeoutMs", 120_000, least=1)
    return ConnectionOptions(nameserver, timeout_ms, security if use_tls else None)


def _offsets_option(
    given: _OptionReader, side: str, default: Literal["earliest", "latest"]
) -> OffsetsOption:
    timestamp, name = given.text(f"{side}Timestamp"), f"{side}Offsets"
    text = given.text(name)
    if timestamp and text.lower() not in ("", "timestamp"):
        raise BadOption(f"options {name} and {side}Timestamp exclude each other")
    if timestamp:
        return FromTime(_unix_ms(timestamp))
    if text.startswith("{"):
        return _by_queue(name, text)
    if text.lower() == "earliest":
        return "earliest"
    if text.lower() == "latest":
        return "latest"
    if text:
        raise BadOption(f"option {name} has an invalid value: {text!r}")
    return default


def _by_queue(name: str, text: str) -> Mapping[str, OffsetOption]:
    try:
        by_queue = json.loads(text)
        offsets = {
            key: _offset_option(value) for key, value in by_queue.items() if key != "topic_id"
        }
    except (ValueError, TypeError, AttributeError) as error:
        raise BadOption(
            f'option {name} must be {{"broker/queue_id": offset}}, got {text}'
        ) from error
    return offsets


def _offset_option(value: object) -> OffsetOption:
    if value == "earliest":
        return "earliest"
    if value == "latest":
        return "latest"
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(value)
    return value


def _unix_ms(text: str) -> int:
    """Return Unix milliseconds, from Unix milliseconds or ISO 8601 (UTC by default)."""
    if text.isdecimal():
        return int(text)
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        raise BadOption(f"{text!r} is not a time: use ISO 8601 or Unix milliseconds") from error
    aware = time if time.tzinfo else time.replace(tzinfo=UTC)
    return int(aware.timestamp() * 1000)
