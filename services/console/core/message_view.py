"""Bodies of messages as text: JSON is indented, other text is shown as it is, the rest as hex."""

from __future__ import annotations

import json
from dataclasses import dataclass

from batonmq.admin.message_queries import StoredMessage

SHOWN_BYTES_MAX = 64 * 1024
PREVIEW_CHARACTERS = 120
_HEX_LINE = 16
_ALLOWED_CONTROLS = "\t\n\r"


@dataclass(frozen=True, slots=True)
class BodyView:
    """A body as text; `form` is json, text, hex or empty."""

    form: str
    text: str
    byte_count: int
    cut: bool


@dataclass(frozen=True, slots=True)
class MessageRow:
    """A message of a list, with the beginning of its body."""

    message: StoredMessage
    preview: str


def body_view(body: bytes) -> BodyView:
    """Return the body as text; at most its first 64 KiB."""
    shown, cut = body[:SHOWN_BYTES_MAX], len(body) > SHOWN_BYTES_MAX
    if not body:
        return BodyView("empty", "", 0, cut=False)
    text = _text_of(shown, cut=cut)
    if text is None:
        return BodyView("hex", hex_dump(shown), len(body), cut)
    if not cut and text.lstrip()[:1] in ("{", "["):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return BodyView("text", text, len(body), cut)
        return BodyView("json", json.dumps(value, indent=2, ensure_ascii=False), len(body), cut)
    return BodyView("text", text, len(body), cut)


def message_row(message: StoredMessage) -> MessageRow:
    """Return a message with the beginning of its body on one line."""
    text = _text_of(message.body[: 4 * PREVIEW_CHARACTERS], cut=True)
    if text is None:
        preview = message.body[: PREVIEW_CHARACTERS // 3].hex(" ")
    else:
        preview = " ".join(text.split())
    shortened = preview[:PREVIEW_CHARACTERS]
    return MessageRow(message, shortened + ("…" if len(preview) > PREVIEW_CHARACTERS else ""))


def hex_dump(body: bytes) -> str:
    """Return lines of offset, 16 bytes in hex, and their printable ASCII characters."""
    lines = []
    for start in range(0, len(body), _HEX_LINE):
        part = body[start : start + _HEX_LINE]
        characters = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
        lines.append(f"{start:08x}  {part.hex(' '):<47}  {characters}")
    return "\n".join(lines)


def _text_of(body: bytes, *, cut: bool) -> str | None:
    """Return UTF-8 text without control characters; None if the bytes are something else."""
    for end in range(len(body), max(0, len(body) - 4), -1):
        try:
            text = body[:end].decode()
        except UnicodeDecodeError:
            if not cut:
                return None
            continue
        printable = all(one.isprintable() or one in _ALLOWED_CONTROLS for one in text)
        return text if printable else None
    return None if body else ""
