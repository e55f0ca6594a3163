"""Options of `format("baton")`: read once, checked, and small enough to travel to executors.

A name that is not known is an error: a misspelt option never silently does nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, TypeVar

import grpc
import grpc.aio

from batonmq.admin import Admin
from batonmq.channels import OPTIONS, connect
from batonmq.directory import Surroundings

T = TypeVar("T")
View = Literal["messages", "metrics"]
METRICS_TOPIC = "BATON_SYS_METRICS"
FETCH_BYTES_MAX = 4 * 1024 * 1024
FETCH_MESSAGES_MAX = 65_535

_SPARKS_OWN = {"path", "checkpointlocation", "queryname"}
_REACHING = {
    "nameserver", "timeoutms", "tls", "tlscafile", "tlscertfile", "tlskeyfile", "tlsservername",
}  # fmt: skip
_READING = {
    "topic", "view", "startingoffsets", "startingtimestamp", "endingoffsets", "endingtimestamp",
    "queues", "maxrowspertrigger", "failondataloss", "readfrom", "pushdown", "rowsperbatch",
}  # fmt: skip
_WRITING = {"topic", "writeid", "order", "rowsperbatch", "compression"}


class BadOption(ValueError):
    """An option is missing, unknown, or has a value that it can't have."""


@dataclass(frozen=True, slots=True)
class Tls:
    """How services prove who they are, and this client who it is.

    Attributes:
        ca_file: Certificates that are trusted; those that gRPC brings if empty.
        cert_file: Certificate of this client, with `key_file` its key; empty for none.
        server_name: Name in the servers' certificates, where it is not that of their addresses.
    """

    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    server_name: str = ""

    def connect(self, address: str) -> grpc.aio.Channel:
        """A channel to `host:port`. The files are read here: they have to be on every node."""
        read = [
            Path(name).read_bytes() if name else None
            for name in (self.ca_file, self.key_file, self.cert_file)
        ]
        options: list[tuple[str, int | str]] = list(OPTIONS)
        if self.server_name:
            options.append(("grpc.ssl_target_name_override", self.server_name))
        return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(*read), options)


@dataclass(frozen=True, slots=True)
class Reach:
    """What it takes to talk to a cluster.

    Attributes:
        timeout_ms: How long an answer is waited for while services are away.
    """

    nameserver: str
    timeout_ms: int = 120_000
    tls: Tls | None = None

    def admin(self) -> Admin:
        """A client; to be made in the event loop that it is used in."""
        surroundings = Surroundings(connect=self.tls.connect if self.tls else connect)
        return Admin(self.nameserver, timeout_s=self.timeout_ms / 1000, surroundings=surroundings)


@dataclass(frozen=True, slots=True)
class AtTime:
    """The first message that was stored at or after a time."""

    unix_ms: int


Place = Literal["earliest", "latest"] | int
Places = Literal["earliest", "latest"] | AtTime | Mapping[str, Place]
"""Where to begin or to end: of all queues, or by `broker/queue_id`."""


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How to read a topic; docs/spark.md says what the options mean.

    Attributes:
        queues: `broker/queue_id` of those to read; None for all.
        rows_max: Messages of one micro-batch; 0 for no bound.
        slaves: Whether slaves are asked before the master.
    """

    reach: Reach
    topic: str
    view: View
    starting: Places
    ending: Places
    queues: frozenset[str] | None
    rows_max: int
    fail_on_loss: bool
    slaves: bool
    push_down: bool
    rows_per_batch: int


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """How to write to a topic.

    Attributes:
        write_id: Names a batch write, so that its repetition stores nothing twice.
        sorted: Whether a task sorts its rows, for plans that do not repeat their order.
    """

    reach: Reach
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
    given = _Given(options, _REACHING | _READING)
    view: View = given.one_of("view", "messages", ("messages", "metrics"))
    topic = given.text("topic", METRICS_TOPIC if view == "metrics" else "")
    if not topic:
        raise BadOption("option topic is missing")
    queues = given.text("queues")
    return ReadOptions(
        reach=_reach(given),
        topic=topic,
        view=view,
        starting=_places(given, "starting", "earliest"),
        ending=_places(given, "ending", "latest"),
        queues=frozenset(part.strip() for part in queues.split(",")) if queues else None,
        rows_max=given.number("maxRowsPerTrigger", 0),
        fail_on_loss=given.flag("failOnDataLoss", True),
        slaves=given.one_of("readFrom", "master", ("master", "slaves")) == "slaves",
        push_down=given.flag("pushDown", False),
        rows_per_batch=given.number("rowsPerBatch", 8_192, least=1),
    )


def write_options(options: Mapping[str, str]) -> WriteOptions:
    """What the options of a write mean.

    Raises:
        BadOption: see there.
    """
    given = _Given(options, _REACHING | _WRITING)
    topic = given.text("topic")
    if not topic:
        raise BadOption("option topic is missing")
    return WriteOptions(
        reach=_reach(given),
        topic=topic,
        write_id=given.text("writeId"),
        sorted=given.one_of("order", "rows", ("rows", "content")) == "content",
        rows_per_batch=given.number("rowsPerBatch", 1_000, least=1),
        compression=given.one_of("compression", "none", ("none", "lz4", "zstd")),
    )


class _Given:
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


def _reach(given: _Given) -> Reach:
    nameserver = given.text("nameserver")
    if not nameserver:
        raise BadOption("option nameserver is missing: host:port, several separated by commas")
    tls = Tls(
        given.text("tlsCaFile"),
        given.text("tlsCertFile"),
        given.text("tlsKeyFile"),
        given.text("tlsServerName"),
    )
    wanted = given.flag("tls", tls != Tls())
    if bool(tls.cert_file) != bool(tls.key_file):
        raise BadOption("options tlsCertFile and tlsKeyFile go together")
    if tls != Tls() and not wanted:
        raise BadOption("option tls is false, and files for it are named")
    return Reach(nameserver, given.number("timeoutMs", 120_000, least=1), tls if wanted else None)


def _places(given: _Given, side: str, default: Literal["earliest", "latest"]) -> Places:
    at, name = given.text(f"{side}Timestamp"), f"{side}Offsets"
    text = given.text(name)
    if at and text.lower() not in ("", "timestamp"):
        raise BadOption(f"{name} and {side}Timestamp contradict each other")
    if at:
        return AtTime(_unix_ms(at))
    if text.startswith("{"):
        return _by_queue(name, text)
    if text.lower() == "earliest":
        return "earliest"
    if text.lower() == "latest":
        return "latest"
    if text:
        raise BadOption(f"option {name} can't be {text!r}")
    return default


def _by_queue(name: str, text: str) -> Mapping[str, Place]:
    try:
        found = json.loads(text)
        places = {key: _place(value) for key, value in found.items() if key != "topic_id"}
    except (ValueError, TypeError, AttributeError) as error:
        raise BadOption(f'option {name} wants {{"broker/queue_id": offset}}, not {text}') from error
    return places


def _place(value: object) -> Place:
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
