"""Checks of settings, so that a wrong one is refused where it is given. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from batonmq.errors import InvalidArgument


def check_choice(field: str, value: str, choices: Iterable[str]) -> None:
    """Raise InvalidArgument if a value is none of the choices, at least two."""
    names = list(choices)
    if value not in names:
        *others, last = names
        raise InvalidArgument(
            f"{field} must be {', '.join(others)} or {last}, got {value!r}",
            facts={"field": field},
        )


def check_positive(settings: object, *fields: str) -> None:
    """Raise InvalidArgument if a setting is less than 1: with it a client would wait for ever."""
    for field in fields:
        value = getattr(settings, field)
        if value < 1:
            raise InvalidArgument(
                f"{field} must be at least 1, got {value}", facts={"field": field}
            )
