"""Remedies for a stuck queue as changes that a person can carry out in the console.

The diagnosis says what to do in words. A remedy is here only if the console can carry it out; a
cause outside of the cluster, such as a consumer that hangs, has to be fixed there.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlencode

from batonmq.admin.group_reports import QueueDiagnosis


@dataclass(frozen=True, slots=True)
class Remedy:
    """A change that a person can choose.

    Attributes:
        kind: resume, release, skip or reset.
        label: Text of the button.
        effect: What it does, in a sentence.
        path: Page of the plan.
    """

    kind: str
    label: str
    effect: str
    path: str


_RELEASE = "release"
_SKIP = "skip"
_RESET = "reset"
_RESUME = "resume"
_LABELS = {
    _RESUME: ("Resume the group", "Deliveries to all members start again."),
    _RELEASE: (
        "Force release",
        "The owner is fenced, and the next owner gets the messages in flight again, flagged.",
    ),
    _SKIP: ("Skip the message", "The oldest message counts as handled; this can be undone."),
    _RESET: ("Reset the progress", "The group continues at another offset; this can be undone."),
}
_BY_REASON = {
    "PAUSED": (_RESUME,),
    "OWNER_SILENT": (_RELEASE,),
    "PHANTOM_TOKEN": (_RELEASE,),
    "HELD": (_RELEASE,),
    "NOT_PULLING": (_RELEASE,),
    "HEAD_OF_LINE": (_SKIP, _RELEASE),
    "OUTPUTS_REFUSED": (_SKIP,),
    "ACK_CAP": (_SKIP, _RELEASE),
    "OFFSET_AHEAD_OF_LOG": (_RESET,),
    "DATA_LOSS": (_SKIP, _RESET),
}


def remedies_of(group: str, diagnosis: QueueDiagnosis) -> tuple[Remedy, ...]:
    """Return the changes that may help a queue; none if the cause is outside of the cluster."""
    queue = {
        "topic": diagnosis.topic,
        "broker": diagnosis.broker,
        "queue": str(diagnosis.queue_id),
    }
    return tuple(
        Remedy(kind, *_LABELS[kind], change_path(kind, group, {} if kind == _RESUME else queue))
        for kind in _BY_REASON.get(diagnosis.reason, ())
    )


def change_path(kind: str, group: str, scope: dict[str, str] | None = None) -> str:
    """Return the path of the page that plans a change of a group."""
    return f"/change/{kind}?{urlencode({'group': group, **(scope or {})})}"
