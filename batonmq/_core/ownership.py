"""The states of a queue that is assigned to a consumer, as one transition table.

Everything that decides in which state a queue is lives in this module: the queue's task, the
handlers, the keep-alives and the group's record only report inputs. The module does no I/O and
does not know tokens, messages or servers; `batonmq._consumer.assigned_queue` carries the effects
out. In a group without ownership (protocol section 15) the table is the same: "granted" means that
the group's progress was read, and "released" that it was committed for the last time.

Theory of operation. A queue begins in ACQUIRING when the group's record assigns it to the consumer.
OWNED is the only state in which it is pulled and in which a handler may start one of its messages.
It leaves OWNED in one of three ways:

- The record assigns the queue to another member (REVOKED). The token stays valid, so the queue is
  handed over in order: handlers end (DRAINING), then the token is closed and the lock is released
  (CLOSING).
- The token is not valid any more (FENCED, RESET, MODE_CHANGED). There is nothing to hand over.
  While the queue is still assigned (FENCED) it is acquired again, and the request claims the
  messages that are handled meanwhile; otherwise (LOST) they are dropped.
- The own deadline has passed (DEADLINE_PASSED). The consumer starts nothing more, but no service
  has said that the token is invalid. So the consumer keeps the token while it acquires the queue
  again (EXPIRED, ACQUIRING). If the queue is revoked meanwhile, it is handed over in order under
  that token, late, and the next owner waits for no lease.

A queue never returns from DRAINING to OWNED: if the record assigns it again meanwhile, it is handed
over first, and a new `QueueOwnership` acquires it.

Run `python -m batonmq._core.ownership` to print the table as a Mermaid diagram;
docs/explanation/queue-ownership-states.md shows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final, NamedTuple


class OwnershipState(Enum):
    """What the consumer may do with the queue; the value is the meaning."""

    ACQUIRING = "Assigned; a request for the queue is under way, or waits to be repeated."
    WITHDRAWING = "Not assigned any more; the request is being cancelled."
    OWNED = "Granted; the queue is pulled, and its messages are started."
    DRAINING = "Not assigned any more; no message is started, those in flight end."
    CLOSING = "Drained; the token is closed at offsets and the lock is released."
    EXPIRED = "The own deadline has passed; the token may be valid; the queue is still assigned."
    FENCED = "The token is not valid any more; the queue is still assigned."
    LOST = "The token is not valid any more, and the queue is not assigned."
    RELEASED = "The end: the next owner may have the queue."


class OwnershipInput(Enum):
    """What happened to the queue; the value is the meaning."""

    GRANTED = "The lock manager granted the queue."
    WITHDRAWN = "The request for the queue ended without a grant, and there is no token."
    WITHDRAWN_LATE = "The request ended without a grant; the token from before it may be valid."
    REVOKED = "The group's record does not assign the queue to this consumer any more."
    FENCED = "A call under the token was refused, or the lock manager named another owner."
    RESET = "As FENCED, and the group's progress on the queue was replaced."
    DEADLINE_PASSED = "The own deadline of the lease has passed."
    MODE_CHANGED = "The group switched ownership on or off: nothing of the old mode counts."
    STOPPED = "No pull is under way any more."
    DRAINED = "No handler runs, or the drain timed out."
    RELEASED = "Close and Release were answered, or were repeated long enough."


class OwnershipEffect(Enum):
    """What the shell has to do after a transition, in order; the value is the meaning."""

    FORGET_WORK = "drop progress; results of running handlers are discarded"
    CLEAR_TOKEN = "keep-alives do not name the token any more"
    REPORT_GRANTED = "ownership event `granted`"
    REPORT_DRAINING = "ownership event `draining`"
    REPORT_FENCED = "ownership event `fenced`"
    REPORT_RELEASED = "ownership event `released`"


class Transition(NamedTuple):
    """The state that an input leads to, and the effects on the way."""

    state: OwnershipState
    effects: tuple[OwnershipEffect, ...] = ()


_S, _I, _E = OwnershipState, OwnershipInput, OwnershipEffect

TABLE: Final[Mapping[OwnershipState, Mapping[OwnershipInput, Transition]]] = {
    _S.ACQUIRING: {
        _I.GRANTED: Transition(_S.OWNED, (_E.REPORT_GRANTED,)),
        _I.REVOKED: Transition(_S.WITHDRAWING),
        # The token from before may be refused now, also by a late answer to a commit.
        _I.FENCED: Transition(_S.ACQUIRING, (_E.CLEAR_TOKEN,)),
        _I.RESET: Transition(_S.ACQUIRING, (_E.CLEAR_TOKEN, _E.FORGET_WORK)),
        _I.MODE_CHANGED: Transition(_S.WITHDRAWING, (_E.CLEAR_TOKEN, _E.FORGET_WORK)),
    },
    _S.WITHDRAWING: {
        # The grant was on its way. It is handed over like any other.
        _I.GRANTED: Transition(_S.DRAINING, (_E.REPORT_GRANTED,)),
        _I.WITHDRAWN: Transition(_S.RELEASED, (_E.FORGET_WORK,)),
        _I.WITHDRAWN_LATE: Transition(_S.DRAINING),
        _I.REVOKED: Transition(_S.WITHDRAWING),
        _I.FENCED: Transition(_S.WITHDRAWING, (_E.CLEAR_TOKEN,)),
        _I.RESET: Transition(_S.WITHDRAWING, (_E.CLEAR_TOKEN, _E.FORGET_WORK)),
        _I.MODE_CHANGED: Transition(_S.WITHDRAWING, (_E.CLEAR_TOKEN, _E.FORGET_WORK)),
    },
    _S.OWNED: {
        _I.REVOKED: Transition(_S.DRAINING, (_E.REPORT_DRAINING,)),
        _I.FENCED: Transition(_S.FENCED, (_E.REPORT_FENCED,)),
        _I.DEADLINE_PASSED: Transition(_S.EXPIRED, (_E.REPORT_FENCED,)),
        _I.RESET: Transition(_S.FENCED, (_E.REPORT_FENCED, _E.FORGET_WORK)),
        _I.MODE_CHANGED: Transition(_S.LOST, (_E.REPORT_FENCED, _E.FORGET_WORK)),
    },
    _S.DRAINING: {
        # The shell freezes the content of the Close before it reports DRAINED.
        _I.DRAINED: Transition(_S.CLOSING, (_E.FORGET_WORK,)),
        _I.REVOKED: Transition(_S.DRAINING),
        _I.FENCED: Transition(_S.LOST, (_E.REPORT_FENCED,)),
        _I.RESET: Transition(_S.LOST, (_E.REPORT_FENCED, _E.FORGET_WORK)),
        _I.MODE_CHANGED: Transition(_S.LOST, (_E.REPORT_FENCED, _E.FORGET_WORK)),
    },
    _S.CLOSING: {
        # A fence changes nothing any more: the frozen Close is repeated until it is answered.
        _I.RELEASED: Transition(_S.RELEASED, (_E.REPORT_RELEASED, _E.CLEAR_TOKEN)),
        _I.REVOKED: Transition(_S.CLOSING),
        _I.FENCED: Transition(_S.CLOSING),
        _I.RESET: Transition(_S.CLOSING),
        _I.MODE_CHANGED: Transition(_S.CLOSING),
    },
    _S.EXPIRED: {
        _I.STOPPED: Transition(_S.ACQUIRING),
        _I.REVOKED: Transition(_S.DRAINING),
        _I.FENCED: Transition(_S.FENCED),
        _I.RESET: Transition(_S.FENCED, (_E.FORGET_WORK,)),
        _I.MODE_CHANGED: Transition(_S.LOST, (_E.FORGET_WORK,)),
    },
    _S.FENCED: {
        _I.STOPPED: Transition(_S.ACQUIRING, (_E.CLEAR_TOKEN,)),
        _I.REVOKED: Transition(_S.LOST),
        _I.FENCED: Transition(_S.FENCED),
        _I.RESET: Transition(_S.FENCED, (_E.FORGET_WORK,)),
        _I.MODE_CHANGED: Transition(_S.LOST, (_E.FORGET_WORK,)),
    },
    _S.LOST: {
        _I.STOPPED: Transition(_S.RELEASED, (_E.CLEAR_TOKEN, _E.FORGET_WORK)),
        _I.REVOKED: Transition(_S.LOST),
        _I.FENCED: Transition(_S.LOST),
        _I.RESET: Transition(_S.LOST, (_E.FORGET_WORK,)),
        _I.MODE_CHANGED: Transition(_S.LOST, (_E.FORGET_WORK,)),
    },
    _S.RELEASED: {
        _I.REVOKED: Transition(_S.RELEASED),
        _I.FENCED: Transition(_S.RELEASED),
        _I.RESET: Transition(_S.RELEASED),
        _I.MODE_CHANGED: Transition(_S.RELEASED),
    },
}
"""An input that a state does not list is a mistake of the shell, and refused."""


class InvalidInput(Exception):
    """The shell reported an input that can't happen in the state; a mistake in this library."""


class QueueOwnership:
    """The state of one queue, from its assignment to its release."""

    def __init__(self) -> None:
        self.state = OwnershipState.ACQUIRING

    def receive(self, happened: OwnershipInput) -> tuple[OwnershipEffect, ...]:
        """Go to the next state.

        Returns:
            What the caller has to do now, in order.

        Raises:
            InvalidInput: the table has no transition; the state stays.
        """
        transition = TABLE[self.state].get(happened)
        if transition is None:
            raise InvalidInput(f"{happened.name} is not possible in state {self.state.name}")
        self.state = transition.state
        return transition.effects

    @property
    def assigned(self) -> bool:
        """Whether the group's record assigns the queue to the consumer."""
        return self.state in _ASSIGNED

    @property
    def held(self) -> bool:
        """Whether the consumer has a valid token, and progress under it: OWNED or DRAINING."""
        return self.state in _HELD


_ASSIGNED = frozenset({_S.ACQUIRING, _S.OWNED, _S.EXPIRED, _S.FENCED})
_HELD = frozenset({_S.OWNED, _S.DRAINING})


def mermaid_diagram() -> str:
    """Return the table as a Mermaid state diagram.

    Inputs that lead from one state to the same other one share an arrow. An input that changes
    nothing has none.
    """
    lines = ["stateDiagram-v2", f"    [*] --> {OwnershipState.ACQUIRING.name}: assigned"]
    for state, transitions in TABLE.items():
        arrows: dict[str, list[str]] = {}
        for happened, (target, _) in transitions.items():
            if target is not state:
                arrows.setdefault(target.name, []).append(happened.name.lower())
        for target_name, inputs in arrows.items():
            lines.append(f"    {state.name} --> {target_name}: {', '.join(inputs)}")
    lines.append(f"    {OwnershipState.RELEASED.name} --> [*]")
    return "\n".join(lines)


if __name__ == "__main__":
    print(mermaid_diagram())
