"""Differences between a heartbeat and its group: in the subscription and in the settings."""

from __future__ import annotations

from collections.abc import Sequence

from batonmq.errors import Difference, SubscriptionConflict
from batonmq_server.nameserver.core.groups import Heartbeat, Member, Terms

_VALUE_CHARACTERS_MAX = 140
_DIFFERENCES_SHOWN_MAX = 3


def differences(heartbeat: Heartbeat, terms: Terms, client_id: str) -> tuple[Difference, ...]:
    """Return every difference between the heartbeat and `terms`: topics by name, then settings.

    Args:
        terms: Of the group.
        client_id: A member with these terms, to be named in the differences.
    """

    def difference(topic: str, setting: str, requested: str, present: str) -> Difference:
        return Difference(topic, setting, heartbeat.client_id, requested, client_id, present)

    requested = {s.topic: s.expression for s in heartbeat.terms.subscriptions}
    present = {s.topic: s.expression for s in terms.subscriptions}
    topics = sorted(requested.keys() | present.keys()) if not terms.broadcasting else []
    by_topic = [
        difference(topic, "expression", requested.get(topic, ""), present.get(topic, ""))
        for topic in topics
        if requested.get(topic) != present.get(topic)
    ]
    settings = [
        ("model", heartbeat.terms.model, terms.model),
        ("order", heartbeat.terms.order, terms.order),
        ("consume_from", heartbeat.terms.consume_from, terms.consume_from),
    ]
    return (*by_topic, *(difference("", *s) for s in settings if s[1] != s[2]))


def conflict_error(
    heartbeat: Heartbeat, terms: Terms, client_id: str, *, retry_after_ms: int = 0
) -> SubscriptionConflict:
    """Return the error for a heartbeat that differs from `terms`, those of member `client_id`."""
    all_differences = differences(heartbeat, terms, client_id)
    shown = [
        f"{d.topic or d.setting}: {d.newcomer_client_id} wants {_shown(d.newcomer_value)}, "
        f"{d.member_client_id} has {_shown(d.member_value)}"
        for d in all_differences[:_DIFFERENCES_SHOWN_MAX]
    ]
    hidden_count = len(all_differences) - len(shown)
    more = f"; and {hidden_count} more" if hidden_count else ""
    return SubscriptionConflict(
        f"group {heartbeat.group} has another subscription ({'; '.join(shown)}{more})",
        retry_after_ms=retry_after_ms,
        differences=all_differences,
    )


def longest_member(members: Sequence[Member], subscription_hash: int) -> str:
    """Return the client id of the longest member with that subscription.

    If no member has it, of the longest member; empty if there is no member.
    """
    agreeing = [m for m in members if m.subscription_hash == subscription_hash] or members
    return min(agreeing, key=lambda m: m.join_unix_ms).client_id if agreeing else ""


def _shown(value: str) -> str:
    if not value:
        return "nothing"
    if len(value) > _VALUE_CHARACTERS_MAX:
        value = f"{value[:_VALUE_CHARACTERS_MAX]}..."
    return repr(value)
