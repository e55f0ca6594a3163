"""How to read each panel: what is normal, what is not, and the alert that watches it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reading:
    """What to conclude from a panel.

    Attributes:
        text: What is normal, and what to look at if it is not.
        alert: The alert that watches the same value; empty for none.
        limit: The limit of that alert, drawn as a line; None if there is no alert.
        below: Whether values below the limit are bad, not those above.
    """

    text: str
    alert: str = ""
    limit: float | None = None
    below: bool = False


_R = Reading
_LAG = _R(
    "Normal is a few seconds. A line that rises at 1 s per second means that nothing is handled; "
    "a line that rises slowly means that the handlers are too slow.",
    "BatonGroupLagsInTime",
    300,
)
_STUCK = _R(
    "Normal is 0. The reason says what to mend; each reason has a runbook.", "BatonQueueStuck", 1
)
_LOST = _R("Must be 0: the group never gets these messages.", "BatonMessagesLost", 1)
_ACKS = _R(
    "Normal is near 0. A rising line means that one unacknowledged message holds many others.",
    "BatonAckRangesNearCap",
    0.7,
)
_DISK = _R(
    "Slow growth up to the retention is normal. Compare with the time until the disk is full."
)
_ANSWERS = _R("Compare with the messages stored: a lasting gap is growing lag.")
_VOLUME = _R("Follows the traffic of the producers. A sudden change without a deployment is odd.")
_REPEATS = _R(
    "Repeats after a crash or an expired lease are normal. CUT_OFF and CLOSED_OR_DRAINED must be 0."
)
READINGS: Mapping[str, Mapping[str, Reading]] = {
    "baton-cluster": {
        "Processes up": _R("Fewer than configured: a process is dead or not reachable."),
        "Replica sets without a leader": _R(
            "Must be 0. A failover takes a few seconds; longer means that no election succeeds.",
            "BatonNoLeader",
            1,
        ),
        "Groups with stuck queues": _STUCK,
        "Topics, groups, members": _R(
            "Changes with deployments only. A drop of the members is an outage of consumers."
        ),
        "Messages stored, by topic": _VOLUME,
        "Messages delivered, by group": _ANSWERS,
        "Bytes": _R(
            "Delivered is stored times the number of groups. More is a catch-up or a reset."
        ),
        "Append latency": _R(
            "Normal is near the sync time of the log. If only this rises, the nodes lack CPU.",
            "BatonPublishSlow",
            1,
        ),
        "Rejected and failed calls, by reason": _R(
            "UNREACHABLE, OVERLOADED, DISK_FULL and NO_QUORUM are faults; look up other reasons."
        ),
        "Lag in time, by group": _LAG,
        "Stuck queues, by reason": _STUCK,
        "Members, by group": _R("A group that falls to 0 handles nothing."),
        "Redelivered messages, by cause": _REPEATS,
        "Disk in use": _DISK,
        "Ack window in use": _ACKS,
        "Time until certificates expire": _R(
            "Renewal must happen above the line.",
            "BatonCertificateExpiresSoon",
            1_209_600,
            below=True,
        ),
    },
    "baton-topic": {
        "Messages stored": _VOLUME,
        "Bytes stored": _VOLUME,
        "Average message size": _R("A jump means that a producer has changed its contents."),
        "Send latency, reported by producers": _R(
            "Compare with the append latency of the cluster: the rest is batching and network."
        ),
        "Failed sends, reported by producers": _R(
            "Normal is 0: these messages have no receipt, and the program must handle the error."
        ),
        "Messages delivered, by group": _ANSWERS,
        "Bytes delivered, by group": _ANSWERS,
        "Lag in messages, by group": _R(
            "Short peaks are normal. A line that only rises needs more consumers.",
            "BatonGroupLagGrows",
            10_000,
        ),
        "Lag in time, by group": _LAG,
        "Messages lost to retention, by group": _LOST,
    },
    "baton-group": {
        "Members": _R("Fewer than deployed: a member is dead or rejected. 0: nothing is handled."),
        "Lag in time": _LAG,
        "Messages ready and in flight": _R(
            "Ready, but none in flight: nothing is delivered. Many in flight: slow handlers."
        ),
        "Stuck queues, by reason": _STUCK,
        "Messages delivered": _ANSWERS,
        "Messages handled, reported by consumers": _R(
            "Should equal the messages delivered. Less means that handlers fail or wait."
        ),
        "Handler time, reported by consumers": _R(
            "Limits the rate of an ordered queue. A jump points at a system behind the handler."
        ),
        "Failed messages, by reason, reported by consumers": _R(
            "Each failure is a retry, and after the last one a dead letter."
        ),
        "Messages in the client": _R("Waiting and none handled: the handlers hang or are paused."),
        "Dead letters, in an hour": _R(
            "Normal is 0. Read the errors, mend the cause, then redrive."
        ),
        "Queues whose progress went back, in an hour": _R(
            "A reset by an operator is normal; messages are delivered again.",
            "BatonOffsetRewind",
            1,
        ),
        "Messages lost to retention, in an hour": _LOST,
        "Queues acquired and lost, reported by consumers": _R(
            "Peaks at a deployment are normal. A steady rate means that members join and leave."
        ),
    },
    "baton-locks": {
        "Hand-over time, by phase": _R(
            "Normal is below a second. The phase that is slow names the service to look at."
        ),
        "Queues granted, by kind": _R("Peaks at a deployment are normal; a steady rate is not."),
        "Queues denied, by reason": _R("HELD is normal in a hand-over, while its owner drains."),
        "Redelivered messages, by cause": _REPEATS,
        "Calls with an invalid token": _R(
            "Some are normal after a hand-over by force: a former owner is fenced.",
            "BatonFencedOften",
            1,
        ),
        "Queues taken from their owner": _R(
            "Expired leases mean that consumers die, pause or lose the network."
        ),
        "Members removed without a Leave": _R(
            "A consumer that stops gracefully leaves. These have crashed, or were cut off."
        ),
        "Rejected heartbeats, by reason": _R(
            "SUBSCRIPTION_CONFLICT: two versions of a program. CLIENT_ID_IN_USE: two with one id."
        ),
        "Locks, by state": _R(
            "Pending for minutes is a hand-over that does not end. A phantom ends when a member "
            "acquires the queue; if none is to have it, 20 minutes after its owner has died."
        ),
        "Term": _R("Exactly one node has a value above 0. Each step up is a failover."),
        "Keep-alives": _R("Steady with the number of consumers. A drop is a loss of consumers."),
        "Groups whose subscription is being changed": _R(
            "Above 0 during a deployment only.", "BatonMembersWaitForSubscription", 1
        ),
    },
    "baton-storage": {
        "Sync time of the log": _R(
            "Each receipt waits for a sync. A slow disk slows every producer.",
            "BatonFsyncSlow",
            0.25,
        ),
        "Messages stored, by node": _VOLUME,
        "Rejected batches, by reason": _R("Normal is 0. DISK_FULL: add space or cut retention."),
        "Waiting long polls": _R(
            "Idle consumers wait here. 0: all are busy, or none is connected."
        ),
        "Lateness of scheduled messages": _R("Normal is below a second; more: the node lacks CPU."),
        "Age of the oldest transaction": _R(
            "A transaction above the line waits for a producer that can say what became of it.",
            "BatonTransactionOld",
            900,
        ),
        "Damaged batches found": _R(
            "Must be 0. A disk returns other bytes than were written.", "BatonDataDamaged", 1
        ),
        "Disk in use": _DISK,
        "Time until the disk is full": _R(
            "Below the line, add space or cut retention today.",
            "BatonDiskFillsUp",
            21_600,
            below=True,
        ),
        "Segments that retention removed, in an hour": _R(
            "Steady if traffic is steady. 0 for a day on a full disk: retention is too long."
        ),
        "Bytes in the object store only": _R("Grows until the retention of the broker is reached."),
        "Oldest segment that waits for the object store": _R(
            "Normal is below a minute. Above the line, the local disk grows.",
            "BatonSegmentsNotStored",
            900,
        ),
        "Share of replicas in sync": _R(
            "Normal is 100 %. Below, the loss of another node can stop the set.",
            "BatonUnderReplicated",
            1,
            below=True,
        ),
        "Follower lag of storage, in bytes": _R("Peaks under load are normal; it must fall again."),
        "Follower lag of storage, in time": _R(
            "A follower above the line is too slow: look at its disk and its network.",
            "BatonReplicaLags",
            30,
        ),
        "Follower lag of offsets, in changes": _R("Normal is near 0; it must fall again."),
        "Leaders of storage": _R("One node of each set is 1. A change is a failover."),
        "Followers with an error": _R(
            "Must be 0. Its log names the error, and often the remedy.", "BatonReplicaStuck", 1
        ),
        "Time of a durable write of offsets": _R(
            "Each delivery and acknowledgement waits for it. A rise slows every group."
        ),
        "Acknowledgements, by outcome": _R(
            "Other outcomes than OK are normal after hand-overs only."
        ),
        "Unrecorded deliveries, by reason": _R(
            "Normal is 0: messages are held back, because offsets did not record their delivery."
        ),
        "Ack window in use": _ACKS,
    },
    "baton-gateway": {
        "Remote clients": _R("A consumer calls every gateway, so all lines are near each other."),
        "Groups of the gateway": _R("Follows the groups of its clients, with a minute's delay."),
        "Waiting receive calls": _R(
            "About one for each idle consumer. 0 with lag means that no client asks for messages."
        ),
        "Calls, by kind": _R("Acknowledgements follow the messages, receive calls the clients."),
        "Calls, by language of the client": _R("OTHER is a client that names no known language."),
        "Refused and failed calls, by code": _R(
            "UNAUTHORIZED and FORBIDDEN are missing rights, ILLEGAL codes mistakes of a program."
        ),
        "Share of calls that fail at the gateway": _R(
            "Normal is 0, and a peak while a service is replaced.", "BatonGatewayFails", 0.01
        ),
        "Calls with an invalid receipt handle": _R(
            "Normal is near 0: these messages are delivered again.",
            "BatonReceiptHandlesExpire",
            1,
        ),
        "Messages of remote clients": _R(
            "Acknowledged is delivered without the repeats. A lasting gap is handlers that fail."
        ),
        "Messages in flight at clients": _R("Follows the number of consumers and their batches."),
        "Age of the oldest delivery at a client": _R(
            "Normal is the time that a handler needs.", "BatonRemoteMessageHeld", 3600
        ),
        "Checks of transactions, in an hour": _R(
            "Normal is near 0: producers end their transactions themselves."
        ),
    },
    "baton-spark": {
        "Running queries": _R("Each query must be 1. 0: read the log of its driver."),
        "Time since the last micro-batch": _R("Normal is the trigger interval and a few seconds."),
        "Firing alerts, by rule": _R("Normal is 0. Read the alerts from the topic for the values."),
        "Backlog": _R("Must fall after each batch. A line that only rises needs more cores."),
        "Duration of a micro-batch": _R("Must be shorter than the trigger interval."),
        "Input rows": _R("Follows the traffic."),
        "Processed rows": _R("Must be above the input rows, or the backlog grows."),
        "Rows in the state": _R("Levels off with the watermark. Endless growth is a missing one."),
        "Memory of the state": _R(
            "Follows the rows in the state; compare with the executors' memory."
        ),
        "Rows dropped as too late": _R("Normal is 0: these rows are missing in the windows."),
    },
}
"""By the uid of the dashboard and the title of the panel."""
