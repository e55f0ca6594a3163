"""Plans and results of changes, as a page shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from batonmq._core.reset_targets import ResetTarget, ShiftBy, ToEarliest, ToLatest, ToOffset, ToTime
from batonmq.admin.resets import ResetStep
from batonmq.errors import InvalidArgument
from batonmq_server.console.core.formats import counted

REASON_CHARACTERS_MAX = 1_024
BY_CHARACTERS_MAX = 255
OP_ID_CHARACTERS_MAX = 64
TARGETS = (
    ("earliest", "the first stored message"),
    ("latest", "behind the last message"),
    ("offset", "an offset"),
    ("time", "a time (UTC)"),
    ("shift", "some messages forward, or back with a minus"),
)


@dataclass(frozen=True, slots=True)
class ItemResult:
    """The outcome of one item of a change; `level` is good, warn or bad."""

    name: str
    outcome: str
    level: str
    text: str


@dataclass(frozen=True, slots=True)
class ChangePlan:
    """What a change would do. Nothing is changed yet.

    Attributes:
        sentences: The effect in words.
        steps: Effect on the progress of each queue.
        warning: What can't be undone; empty if nothing.
        button: Text of the button that carries it out.
        fields: Fields of the form besides author, reason and id.
        possible: Whether there is something to do.
    """

    title: str
    sentences: tuple[str, ...]
    button: str
    fields: tuple[tuple[str, str], ...]
    steps: Sequence[ResetStep] = ()
    warning: str = ""
    possible: bool = True


@dataclass(frozen=True, slots=True)
class ChangeResult:
    """What a change has done.

    Attributes:
        undo: Path of the page that plans to undo it; empty if that is impossible.
    """

    sentences: tuple[str, ...]
    steps: Sequence[ResetStep] = ()
    items: Sequence[ItemResult] = field(default_factory=tuple)
    problems: Sequence[str] = ()
    undo: str = ""


def reset_target(kind: str, value: str) -> ResetTarget:
    """Return the target that a person has chosen in a form.

    Raises:
        InvalidArgument: The value is not one for this kind.
    """
    text = value.strip()
    if kind == "earliest":
        return ToEarliest()
    if kind == "latest":
        return ToLatest()
    if kind == "time":
        return ToTime(unix_ms_of(text))
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= 18):
        raise InvalidArgument(
            f"the value must be a number, got {text[:40]!r}", facts={"field": "value"}
        )
    if kind == "shift":
        return ShiftBy(int(text))
    if kind == "offset" and not text.startswith("-"):
        return ToOffset(int(text))
    raise InvalidArgument(f"{kind[:40]!r} with {text[:40]!r} is not a target of a reset")


def unix_ms_of(text: str) -> int:
    """Return a time, in UTC if it has no zone, in Unix milliseconds.

    Raises:
        InvalidArgument: The text is not a time.
    """
    if text.isascii() and text.isdecimal() and 9 <= len(text) <= 15:
        return int(text)
    try:
        stamp = datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidArgument(
            f"{text[:40]!r} is not a time",
            remedy="Use a form such as 2026-01-31T08:00:00Z, or Unix milliseconds.",
            facts={"field": "time"},
        ) from error
    stamp = stamp if stamp.tzinfo else stamp.replace(tzinfo=UTC)
    return round(stamp.timestamp() * 1000)


def plan_sentence(steps: Sequence[ResetStep]) -> str:
    """Return the sum of the effects on progress as a sentence."""
    replayed = sum(step.replayed_count for step in steps)
    skipped = sum(step.skipped_count for step in steps)
    return (
        f"{counted(len(steps), 'queue')}. Delivered again, although acknowledged: "
        f"{counted(replayed, 'message')}. Counted as handled, although not acknowledged: "
        f"{counted(skipped, 'message')}."
    )


def author_problem(by: str, reason: str, op_id: str) -> str:
    """Return what is missing in the record of a change; empty if it is complete."""
    if not by:
        return "Give your name: it is recorded with the change."
    if len(by) > BY_CHARACTERS_MAX or not by.isprintable():
        return f"Your name must have 1 to {BY_CHARACTERS_MAX} printable characters."
    if not reason:
        return "Give a reason: it is recorded with the change."
    if len(reason) > REASON_CHARACTERS_MAX:
        return f"The reason has {len(reason):,} characters; at most {REASON_CHARACTERS_MAX:,}."
    if not (op_id.isascii() and op_id.isalnum() and 1 <= len(op_id) <= OP_ID_CHARACTERS_MAX):
        return "The id of the change is missing: load the plan again."
    return ""
