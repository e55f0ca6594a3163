"""Tag expressions: which messages of a topic a consumer group wants.

An expression is `*` or empty for everything, else tags separated by `||`. Servers compare the
hashes of tags, which may collide; the client compares the tags.

Source: RocketMQ FilterAPI.buildSubscriptionData. Deviation: what RocketMQ silently drops (empty
parts, `*` among tags) is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from batonmq.common.errors import BadExpression, LimitExceeded
from batonmq.core.records import check_tag, tag_hash

EXPRESSION_CHARACTERS_MAX = 2_048
ALL: Final = "*"


@dataclass(frozen=True, slots=True)
class TagFilter:
    """A parsed expression; equal filters are equal objects.

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

    def accepts(self, tag: str) -> bool:
        """Whether a message with `tag` (empty: without a tag) is wanted."""
        return self.tags is None or tag in self.tags

    @property
    def hashes(self) -> frozenset[int] | None:
        """Tag hashes, signed 32 bit, of the wanted tags; None for everything."""
        return None if self.tags is None else frozenset(map(tag_hash, self.tags))
