"""On what a client and its group disagree."""

from __future__ import annotations

from collections.abc import Sequence

from batonmq.errors import Difference, SubscriptionConflict
from batonmq_server.nameserver.core.groups import Heartbeat, Member, Terms


def differences(heartbeat: Heartbeat, terms: Terms, client_id: str) -> tuple[Difference, ...]:
    """Every point on which the sender disagrees with the group: topics by name, then settings.

    Args:
        terms: The group's.
        client_id: Whom to name as the one who has them.
    """

    def difference(topic: str, setting: str, asked: str, present: str) -> Difference:
        return Difference(topic, setting, heartbeat.client_id, asked, client_id, present)

    asked = {s.topic: s.expression for s in heartbeat.terms.subscriptions}
    present = {s.topic: s.expression for s in terms.subscriptions}
    topics = sorted(asked.keys() | present.keys()) if not terms.broadcasting else []
    by_topic = [
        difference(topic, "expression", asked.get(topic, ""), present.get(topic, ""))
        for topic in topics
        if asked.get(topic) != present.get(topic)
    ]
    settings = [
        ("model", heartbeat.terms.model, terms.model),
        ("orderly", str(heartbeat.terms.orderly).lower(), str(terms.orderly).lower()),
        ("consume_from", heartbeat.terms.consume_from, terms.consume_from),
    ]
    return (*by_topic, *(difference("", *s) for s in settings if s[1] != s[2]))


def conflict_error(
    heartbeat: Heartbeat, terms: Terms, client_id: str, *, retry_after_ms: int = 0
) -> SubscriptionConflict:
    """The refusal of a heartbeat that disagrees with `terms`, which `client_id` has."""
    found = differences(heartbeat, terms, client_id)
    where = [
        f"{d.topic or d.setting}: {d.newcomer_client_id} wants {_shown(d.newcomer_value)}, "
        f"{d.member_client_id} has {_shown(d.member_value)}"
        for d in found
    ]
    more = f"; and {len(where) - 3} more" if len(where) > 3 else ""
    return SubscriptionConflict(
        f"group {heartbeat.group} has another subscription ({'; '.join(where[:3])}{more})",
        retry_after_ms=retry_after_ms,
        differences=found,
    )


def longest_member(members: Sequence[Member], subscription_hash: int) -> str:
    """Client id of who has been a member longest: if possible of one who asks for that."""
    asking = [m for m in members if m.subscription_hash == subscription_hash] or members
    return min(asking, key=lambda m: m.join_unix_ms).client_id if asking else ""


def _shown(value: str) -> str:
    if not value:
        return "nothing"
    return repr(value if len(value) <= 140 else f"{value[:140]}...")
