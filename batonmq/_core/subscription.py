"""Subscription expressions: filters for the messages of a topic.

An expression is `*` or empty for all messages, or tags separated by `||`, or `sql:`, white space
and a condition on properties. Servers compare the hashes of tags, which may collide; the client
compares the tags. Servers and clients evaluate conditions in the same way.

Source: RocketMQ FilterAPI.buildSubscriptionData. Deviation: empty parts and `*` among tags, which
RocketMQ ignores, are errors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from batonmq._core.records import check_tag, tag_hash
from batonmq.errors import BadExpression, LimitExceeded

if TYPE_CHECKING:
    from batonmq._core.sql import Test

EXPRESSION_CHARACTERS_MAX = 2_048
ALL: Final = "*"
SQL: Final = "sql:"
TAGS: Final = "TAGS"
KEYS: Final = "KEYS"
"""Names of the tag and the keys in conditions; properties of these names can't be tested."""
_NONE: Final[Mapping[str, str]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class TagFilter:
    """Accepts messages by their tags; filters with equal tags are equal.

    Attributes:
        tags: The accepted tags; None for all messages.
    """

    tags: frozenset[str] | None

    @classmethod
    def parse(cls, expression: str) -> TagFilter:
        """Return the filter of `expression`.

        Raises:
            LimitExceeded: The expression is longer than 2,048 characters.
            BadExpression: A part is empty, not a valid tag, or `*` among tags.
        """
        _check_length(expression)
        parts = [part.strip() for part in expression.split("||")]
        if parts in ([""], [ALL]):
            return cls(None)
        for part in parts:
            problem = "a part is empty" if not part else "* is combined with tags"
            if part not in ("", ALL):
                problem = check_tag(part)
            if problem:
                raise BadExpression(
                    f"expression {expression[:140]!r}: {problem}",
                    facts={"expression": expression[:140]},
                )
        return cls(frozenset(parts))

    def canonical(self) -> str:
        """Return the canonical expression: sorted tags, or `*` for all messages."""
        return ALL if self.tags is None else "||".join(sorted(self.tags))

    def accepts(
        self, tag: str, keys: Sequence[str] = (), properties: Mapping[str, str] = _NONE
    ) -> bool:
        """Return whether a message with `tag` is accepted; an empty tag means no tag."""
        return self.tags is None or tag in self.tags

    @property
    def hashes(self) -> frozenset[int] | None:
        """Hashes of the accepted tags, signed 32 bit; None for all messages."""
        return None if self.tags is None else frozenset(map(tag_hash, self.tags))


@dataclass(frozen=True, slots=True)
class SqlFilter:
    """Accepts messages by a condition on their properties; filters with equal texts are equal.

    Attributes:
        text: The expression in canonical form.
        names: Names of the properties in the condition.
        cost: Cost of one test: the larger of the numbers of comparisons and of properties.
        test: Evaluates the condition with a function that returns the value of a property, or None.
    """

    text: str
    names: frozenset[str] = field(compare=False)
    cost: int = field(compare=False)
    test: Test = field(compare=False, repr=False)

    @classmethod
    def parse(cls, expression: str) -> SqlFilter:
        """Return the filter of `expression`, which begins with `sql:`.

        Raises:
            LimitExceeded: The expression, or its canonical form, is longer than 2,048 characters.
            BadExpression: The condition can't be parsed, or has too many comparisons.
        """
        # Most programs have no condition, and import faster without these modules.
        from batonmq._core.sql import count_comparisons  # noqa: PLC0415
        from batonmq._core.sql_parser import parse_condition  # noqa: PLC0415

        _check_length(expression)
        text = expression.lstrip()
        condition = parse_condition(text, len(SQL))
        canonical = f"{SQL} {condition.text()}"
        _check_length(canonical)
        names = tuple(condition.names())
        cost = max(len(names), count_comparisons(condition))
        return cls(canonical, frozenset(names), cost, condition.test(negated=False))

    def canonical(self) -> str:
        """Return the canonical expression, equal for all ways to write the condition."""
        return self.text

    def accepts(
        self, tag: str, keys: Sequence[str] = (), properties: Mapping[str, str] = _NONE
    ) -> bool:
        """Return whether the condition is true of a message; an empty tag means no tag."""
        if TAGS in self.names or KEYS in self.names:
            named = {**properties, TAGS: tag or None, KEYS: " ".join(keys) or None}
            return self.test(named.get)
        return self.test(properties.get)

    @property
    def hashes(self) -> None:
        """None: a message with any tag may be accepted."""
        return


Filter = TagFilter | SqlFilter


@lru_cache(maxsize=1_024)
def parse_filter(expression: str) -> Filter:
    """Return the filter of an expression of any kind.

    Raises:
        LimitExceeded: The expression is longer than 2,048 characters.
        BadExpression: The expression can't be parsed.
    """
    head, rest = (text := expression.lstrip())[: len(SQL)].lower(), text[len(SQL) :]
    if head != SQL or not rest:
        return TagFilter.parse(expression)
    if rest[0].isspace():
        return SqlFilter.parse(expression)
    if any(mark in rest for mark in "=<>'("):  # valid as a tag, but more likely a condition
        raise BadExpression(
            f"expression {expression[:140]!r}: white space is missing after {SQL}",
            remedy=f"Write {SQL}, a space, and the condition.",
            facts={"expression": expression[:140]},
        )
    return TagFilter.parse(expression)


def _check_length(expression: str) -> None:
    if len(expression) > EXPRESSION_CHARACTERS_MAX:
        raise LimitExceeded(
            f"expression has {len(expression)} characters; "
            f"the limit is {EXPRESSION_CHARACTERS_MAX}",
            facts={
                "field": "expression",
                "limit": EXPRESSION_CHARACTERS_MAX,
                "actual": len(expression),
            },
        )
