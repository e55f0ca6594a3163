"""Subscription expressions: which messages of a topic a consumer group wants.

An expression is `*` or empty for everything, tags separated by `||`, or `sql:`, white space and a
condition on properties. Servers compare the hashes of tags, which may collide; the client compares
the tags. Conditions mean the same on both sides.

Source: RocketMQ FilterAPI.buildSubscriptionData. Deviation: what RocketMQ silently drops (empty
parts, `*` among tags) is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Final

from batonmq._core.records import check_tag, tag_hash
from batonmq._core.sql import Test, count_comparisons
from batonmq._core.sql_parser import parse_condition
from batonmq.errors import BadExpression, LimitExceeded

EXPRESSION_CHARACTERS_MAX = 2_048
ALL: Final = "*"
SQL: Final = "sql:"
TAGS: Final = "TAGS"
KEYS: Final = "KEYS"
"""What conditions call the tag and the keys; a property of that name is out of their reach."""
_NONE: Final[Mapping[str, str]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class TagFilter:
    """Wants messages by their tags; equal filters are equal objects.

    Attributes:
        tags: The wanted tags; None for everything.
    """

    tags: frozenset[str] | None

    @classmethod
    def parse(cls, expression: str) -> TagFilter:
        """The filter that `expression` means.

        Raises:
            LimitExceeded: it is longer than 2,048 characters.
            BadExpression: a part is empty, no tag, or a `*` among tags.
        """
        _check_length(expression)
        parts = [part.strip() for part in expression.split("||")]
        if parts in ([""], [ALL]):
            return cls(None)
        for part in parts:
            problem = "a part is empty" if not part else "* stands among tags"
            if part not in ("", ALL):
                problem = check_tag(part)
            if problem:
                raise BadExpression(
                    f"expression {expression[:140]!r}: {problem}",
                    facts={"expression": expression[:140]},
                )
        return cls(frozenset(parts))

    def canonical(self) -> str:
        """The same for all expressions that mean the same: sorted tags, `*` for everything."""
        return ALL if self.tags is None else "||".join(sorted(self.tags))

    def accepts(
        self, tag: str, keys: Sequence[str] = (), properties: Mapping[str, str] = _NONE
    ) -> bool:
        """Whether a message with `tag` (empty: without a tag) is wanted."""
        return self.tags is None or tag in self.tags

    @property
    def hashes(self) -> frozenset[int] | None:
        """Tag hashes, signed 32 bit, of the wanted tags; None for everything."""
        return None if self.tags is None else frozenset(map(tag_hash, self.tags))


@dataclass(frozen=True, slots=True)
class SqlFilter:
    """Wants messages by a condition on their properties; equal filters are equal objects.

    Attributes:
        text: The expression in canonical form.
        names: The properties that the condition looks at.
        cost: Of one test: how many comparisons it has, or properties these look at.
        test: Whether the condition is true, given a function from name to text, None for none.
    """

    text: str
    names: frozenset[str] = field(compare=False)
    cost: int = field(compare=False)
    test: Test = field(compare=False, repr=False)

    @classmethod
    def parse(cls, expression: str) -> SqlFilter:
        """The filter that `expression`, which begins with `sql:`, means.

        Raises:
            LimitExceeded: it is longer than 2,048 characters, or becomes so in canonical form.
            BadExpression: what follows is no condition, or has too many comparisons.
        """
        _check_length(expression)
        text = expression.lstrip()
        condition = parse_condition(text, len(SQL))
        canonical = f"{SQL} {condition.text()}"
        _check_length(canonical)
        names = tuple(condition.names())
        cost = max(len(names), count_comparisons(condition))
        return cls(canonical, frozenset(names), cost, condition.test(negated=False))

    def canonical(self) -> str:
        """The same for all expressions that differ in nothing but how they are written."""
        return self.text

    def accepts(
        self, tag: str, keys: Sequence[str] = (), properties: Mapping[str, str] = _NONE
    ) -> bool:
        """Whether the condition is true of a message; an empty tag is none."""
        if TAGS in self.names or KEYS in self.names:
            named = {**properties, TAGS: tag or None, KEYS: " ".join(keys) or None}
            return self.test(named.get)
        return self.test(properties.get)

    @property
    def hashes(self) -> None:
        """No tag is out of the question."""
        return


Filter = TagFilter | SqlFilter


@lru_cache(maxsize=1_024)
def parse_filter(expression: str) -> Filter:
    """The filter that any expression means.

    Raises:
        LimitExceeded: it is longer than 2,048 characters.
        BadExpression: it means nothing.
    """
    head, rest = (text := expression.lstrip())[: len(SQL)].lower(), text[len(SQL) :]
    if head != SQL or not rest:
        return TagFilter.parse(expression)
    if rest[0].isspace():
        return SqlFilter.parse(expression)
    if any(mark in rest for mark in "=<>'("):  # a tag may look like that, but nobody means it
        raise BadExpression(
            f"expression {expression[:140]!r}: no white space after {SQL}",
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
