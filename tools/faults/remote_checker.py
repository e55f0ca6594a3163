"""Checks the ledger of the remote clients of a run."""

from __future__ import annotations

from collections.abc import Iterator

from tools.faults.history import History, HistoryProblem, RemoteDelivery, SendOutcome

RESUMED_US = 250_000
"""A gateway that was paused while it wrote an answer finishes it this long after the pause."""


def check_remote_clients(history: History) -> Iterator[HistoryProblem]:
    """Stored messages are acknowledged at last; acknowledged ones are not delivered again.

    The group of the remote clients gets the messages without an ordering key.
    """
    acks = history.remote_acks
    if acks is None:
        return
    delivered = {one.number for one in history.remote_deliveries}
    # The answer to an acknowledgement may be lost with its gateway; then progress counts.
    settled = acks.keys() | {
        one.number
        for one in history.remote_deliveries
        if one.offset < history.remote_committed.get(one.queue, 0)
    }
    for send in history.sends:
        if send.outcome is SendOutcome.OK and not send.lane and send.number not in settled:
            text = (
                "was delivered and never acknowledged"
                if send.number in delivered
                else "was never delivered"
            )
            yield HistoryProblem("remote lost", f"{send.number} {text} to a remote client")
        if send.outcome is SendOutcome.FAIL and send.number in delivered:
            yield HistoryProblem(
                "failed", f"{send.number} reached a remote client, though it failed: {send.reason}"
            )
    for number in sorted(delivered - {send.number for send in history.sends}):
        yield HistoryProblem("unknown", f"{number} reached a remote client and was never sent")
    seen: set[int] = set()
    for one in sorted(history.remote_deliveries, key=lambda delivery: delivery.at_us):
        acked_us = acks.get(one.number)
        what = f"{one.number} reached {one.client} from {one.gateway}, attempt {one.attempt}"
        if _just_resumed(history, one):
            continue
        if acked_us is not None and one.at_us > acked_us:
            after_ms = (one.at_us - acked_us) // 1000
            yield HistoryProblem("remote again", f"{what}, {after_ms} ms after it was acknowledged")
        if one.number in seen and one.attempt < 2:
            yield HistoryProblem("remote attempt", f"{what}, though it was delivered before")
        seen.add(one.number)


def _just_resumed(history: History, delivery: RemoteDelivery) -> bool:
    return any(
        one.member == delivery.gateway
        and one.end_us is not None
        and 0 <= delivery.at_us - one.end_us <= RESUMED_US
        for one in history.gateway_outages
    )
