"""The list of event kinds in docs/reference/metrics-streams.md, generated from the proto.

python -m tools.docs.event_kinds     writes it again
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from baton.metrics.v1 import metrics_service_pb2 as pb

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "metrics-streams.md"
PROTO = ROOT / "protos" / "baton" / "metrics" / "v1" / "metrics_service.proto"
BEGIN, END = "<!-- begin vocabulary -->\n", "<!-- end vocabulary -->"
_TYPES = {
    getattr(FieldDescriptor, name): name.removeprefix("TYPE_").lower()
    for name in dir(FieldDescriptor)
    if name.startswith("TYPE_")
}
_OPENING = re.compile(r"(?:message|enum|oneof) (\w+) \{")
_FIELD = re.compile(r"(?:repeated )?(?:[\w.]+ )?(\w+) = \d+;")


def kinds() -> dict[str, Descriptor]:
    """Return the message of each kind, by the name of its field."""
    found: dict[str, Descriptor] = {}
    for field in pb.MetricEvent.DESCRIPTOR.oneofs_by_name["kind"].fields:
        assert field.message_type is not None
        found[field.name] = field.message_type
    return found


def comments(proto: str) -> dict[str, str]:
    """Return the comments of messages (`Latency`) and of fields and values (`Latency.us`)."""
    found: dict[str, str] = {}
    path: list[str] = []
    said: list[str] = []
    for line in map(str.strip, proto.splitlines()):
        if line.startswith("//"):
            said.append(line.removeprefix("//").strip())
            continue
        if opening := _OPENING.match(line):
            path.append(opening[1])
            found[".".join(path)] = " ".join(said)
            if line.endswith("}"):
                path.pop()
        elif line.startswith("}"):
            path.pop()
        elif field := _FIELD.match(line):
            found[".".join((*path, field[1]))] = " ".join(said)
        elif line.endswith("{"):
            path.append("")
        said = []
    return found


def written() -> str:
    """Return the list as Markdown."""
    said = comments(PROTO.read_text())
    return "\n".join(_lines(kinds(), said)) + "\n"


def rewritten(page: str) -> str:
    """Return `page` with the generated list."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + written() + END + after


def _lines(found: Mapping[str, Descriptor], said: Mapping[str, str]) -> Iterator[str]:
    for kind, message in found.items():
        yield f"### {kind}\n"
        yield said[message.name] + "\n"
        yield "| Field | Type | Meaning |\n|---|---|---|"
        for field in message.fields:
            meaning = said[f"{message.name}.{field.name}"]
            if field.enum_type is not None and field.enum_type.containing_type is message:
                meaning += " " + _values(message.name, field, said)
            yield f"| `{field.name}` | {_type(field)} | {meaning} |"
        yield ""


def _values(message: str, field: FieldDescriptor, said: Mapping[str, str]) -> str:
    enum = field.enum_type
    assert enum is not None
    prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", enum.name).upper() + "_"
    return "<br>".join(
        f"`{value.name.removeprefix(prefix)}`: {said[f'{message}.{enum.name}.{value.name}']}"
        for value in enum.values
        if value.number
    )


def _type(field: FieldDescriptor) -> str:
    kind = field.message_type or field.enum_type
    name = kind.name if kind is not None else _TYPES[field.type]
    return f"{name}, repeated" if field.is_repeated else name


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text()))
