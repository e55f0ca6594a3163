"""Options of `format("baton")`: read once, checked, and small enough to travel to executors.

A name that is not known is an error: a misspelt option never silently does nothing.
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

_SPARKS_OWN = {"path", "checkpointlocation", "queryname"}
_REACHING = {
    "nameserver", "timeoutms", "tls", "tlscafile", "tlscertfile", "tlskeyfile", "tlsservername",
    "tokenfile",
}  # fmt: skip
_READING = {
    "topic", "view", "startingoffsets", "startingtimestamp", "endingoffsets", "endingtimestamp",
    "queues", "maxrowspertrigger", "failondataloss", "readfrom", "pushdown", "rowsperbatch",
}  # fmt: skip
_WRITING = {"topic", "writeid", "order", "rowsperbatch", "compression"}


class BadOption(ValueError):
    """An option is missing, unknown, or has a value that it can't have."""


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """What it takes to talk to a cluster.

    Attributes:
        timeout_ms: How long an answer is waited for while services are away.
        security: How to use TLS; None for none. Its files have to be on every node.
    """

    nameserver: str
    timeout_ms: int = 120_000
    security: Security | None = None

    def admin(self) -> Admin:
        """A client; to be made in the event loop that it is used in."""
        return Admin(self.nameserver, timeout_s=self.timeout_ms / 1000, security=self.security)


@dataclass(frozen=True, slots=True)
class FromTime:
    """The first message that was stored at or after a time."""

    unix_ms: int


OffsetOption = Literal["earliest", "latest"] | int
OffsetsOption = Literal["earliest", "latest"] | FromTime | Mapping[str, OffsetOption]
"""Where to begin or to end: of all queues, or by `broker/queue_id`."""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How to read a topic; docs/reference/spark.md says what the options mean.

    Attributes:
        queues: `broker/queue_id` of those to read; None for all.
        rows_max: Messages of one micro-batch; 0 for no bound.
        followers: Whether followers are asked before the leader.
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
        write_id: Names a batch write, so that its repetition stores nothing twice.
        sorted: Whether a task sorts its rows, for plans that do not repeat their order.
    """

    connection: ConnectionOptions
    topic: str
    write_id: str
    sorted: bool
    rows_per_batch: int
    compression: str


def read_options(options: Mapping[str, str]) -> ReadOptions:
    """What the options of a read mean.

    Raises:
        BadOption: see there.
    """
    given = _OptionReader(options, _REACHING | _READING)
    view: View = given.one_of("view", "messages", ("messages", "metrics"))
    topic = given.text("topic", METRICS_TOPIC if view == "metrics" else "")
    if not topic:
        raise BadOption("option topic is missing")
    queues = given.text("queues")
    return ReadOptions(
        connection=_connection(given),
        topic=topic,
        view=view,
        starting=_places(given, "starting", "earliest"),
        ending=_places(given, "ending", "latest"),
        queues=frozenset(part.strip() for part in queues.split(",")) if queues else None,
        rows_max=given.number("maxRowsPerTrigger", 0),
        fail_on_data_loss=given.flag("failOnDataLoss", True),
        followers=given.one_of("readFrom", "leader", ("leader", "followers")) == "followers",
        push_down=given.flag("pushDown", False),
        rows_per_batch=given.number("rowsPerBatch", 8_192, least=1),
    )


def write_options(options: Mapping[str, str]) -> WriteOptions:
    """What the options of a write mean.

    Raises:
        BadOption: see there.
    """
    given = _OptionReader(options, _REACHING | _WRITING)
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
    """Options as they were given, names in any case."""

    def __init__(self, options: Mapping[str, str], known: set[str]) -> None:
        self._values = {name.lower(): value for name, value in options.items()}
        if unknown := sorted(self._values.keys() - known - _SPARKS_OWN):
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
            raise BadOption(f"option {name} can't be {text!r}") from error


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
        raise BadOption("options tlsCertFile and tlsKeyFile go together") from error
    wanted = given.flag("tls", security != Security())
    if security != Security() and not wanted:
        raise BadOption("option tls is false, and files for it are named")
    timeout_ms = given.number("timeoutMs", 120_000, least=1)
    return ConnectionOptions(nameserver, timeout_ms, security if wanted else None)


def _places(
    given: _OptionReader, side: str, default: Literal["earliest", "latest"]
) -> OffsetsOption:
    at, name = given.text(f"{side}Timestamp"), f"{side}Offsets"
    text = given.text(name)
    if at and text.lower() not in ("", "timestamp"):
        raise BadOption(f"{name} and {side}Timestamp contradict each other")
    if at:
        return FromTime(_unix_ms(at))
    if text.startswith("{"):
        return _by_queue(name, text)
    if text.lower() == "earliest":
        return "earliest"
    if text.lower() == "latest":
        return "latest"
    if text:
        raise BadOption(f"option {name} can't be {text!r}")
    return default


def _by_queue(name: str, text: str) -> Mapping[str, OffsetOption]:
    try:
        found = json.loads(text)
        places = {key: _place(value) for key, value in found.items() if key != "topic_id"}
    except (ValueError, TypeError, AttributeError) as error:
        raise BadOption(f'option {name} wants {{"broker/queue_id": offset}}, not {text}') from error
    return places


def _place(value: object) -> OffsetOption:
    if value == "earliest":
        return "earliest"
    if value == "latest":
        return "latest"
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(value)
    return value


def _unix_ms(text: str) -> int:
    """Milliseconds since the epoch, from those or from ISO 8601; UTC unless it names a zone."""
    if text.isdecimal():
        return int(text)
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise BadOption(f"{text!r} is no time: give ISO 8601, or Unix milliseconds") from error
    aware = found if found.tzinfo else found.replace(tzinfo=UTC)
    return int(aware.timestamp() * 1000)
