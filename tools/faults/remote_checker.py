"""Checks the ledgers of the remote clients of a run."""

from __future__ import annotations

from collections.abc import Iterator

from tools.faults.history import (
    History,
    HistoryProblem,
    Queue,
    RemoteDelivery,
    RemoteLedger,
    SendOutcome,
)

RESUMED_US = 250_000
"""A gateway that was paused while it wrote an answer finishes it this long after the pause."""


def check_remote_clients(history: History) -> Iterator[HistoryProblem]:
    """Stored messages are acknowledged at last; acknowledged ones are not delivered again.

    The messages of a message group are delivered in order, each after the one ahead of it.
    """
    for ledger in history.remote:
        yield from _check_sends(history, ledger)
        yield from _check_deliveries(history, ledger)
        yield from _check_order(history, ledger)


def _check_sends(history: History, ledger: RemoteLedger) -> Iterator[HistoryProblem]:
    delivered = {one.number for one in ledger.deliveries}
    for send in ledger.lost(history.sends):
        text = "was delivered and never acknowledged"
        if send.number not in delivered:
            text = "was never delivered"
        yield HistoryProblem("remote lost", f"{send.number} {text} to a remote client")
    for send in history.sends:
        if send.outcome is SendOutcome.FAIL and send.number in delivered:
            yield HistoryProblem(
                "failed", f"{send.number} reached a remote client, though it failed: {send.reason}"
            )
    for number in sorted(delivered - {one.number for one in history.sends if ledger.is_for(one)}):
        yield HistoryProblem("unknown", f"{number} reached a remote client and was not for it")


def _check_deliveries(history: History, ledger: RemoteLedger) -> Iterator[HistoryProblem]:
    seen: set[int] = set()
    for one in sorted(ledger.deliveries, key=lambda delivery: delivery.at_us):
        acked_us = ledger.acks.get(one.number)
        what = f"{one.number} reached {one.client} from {one.gateway}, attempt {one.attempt}"
        if _just_resumed(history, one):
            continue
        if acked_us is not None and one.at_us > acked_us:
            after_ms = (one.at_us - acked_us) // 1000
            yield HistoryProblem("remote again", f"{what}, {after_ms} ms after it was acknowledged")
        if one.number in seen and one.attempt < 2:
            yield HistoryProblem("remote attempt", f"{what}, though it was delivered before")
        seen.add(one.number)


def _check_order(history: History, ledger: RemoteLedger) -> Iterator[HistoryProblem]:
    if not ledger.in_order:
        return
    lanes = {one.number: one.lane for one in history.sends}
    first: dict[tuple[str, Queue], dict[int, RemoteDelivery]] = {}
    for one in sorted(ledger.deliveries, key=lambda delivery: delivery.at_us):
        of_lane = first.setdefault((lanes.get(one.number, ""), one.queue), {})
        of_lane.setdefault(one.offset, one)
    for (lane, _), by_offset in first.items():
        ahead: RemoteDelivery | None = None
        for _, one in sorted(by_offset.items()):
            if ahead is not None and not ledger.asked.get(ahead.number, one.at_us) < one.at_us:
                yield HistoryProblem(
                    "remote order",
                    f"{lane}: {one.number} reached {one.client} from {one.gateway} before "
                    f"{ahead.number} was acknowledged",
                )
            ahead = one


def _just_resumed(history: History, delivery: RemoteDelivery) -> bool:
    return any(
        one.member == delivery.gateway
        and one.end_us is not None
        and 0 <= delivery.at_us - one.end_us <= RESUMED_US
        for one in history.gateway_outages
    )
