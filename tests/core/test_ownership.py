"""The transition table of a queue's ownership.

Goal: every state and input is a stated transition or a stated refusal, and the invariants hold on
every path through the table.
Method: the expected table is written down as one row per state; walks follow all transitions.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from batonmq._core.ownership import (
    TABLE,
    InvalidInput,
    OwnershipEffect,
    OwnershipInput,
    OwnershipState,
    QueueOwnership,
    mermaid_diagram,
)

INPUTS = (
    "GRANTED", "WITHDRAWN", "WITHDRAWN_LATE", "REVOKED", "FENCED", "RESET", "DEADLINE_PASSED",
    "MODE_CHANGED", "STOPPED", "DRAINED", "RELEASED",
)  # fmt: skip
# `-` is a refusal, `=` stays in the state; in the order of INPUTS.
EXPECTED = {
    "ACQUIRING": "OWNED - - WITHDRAWING = = - WITHDRAWING - - -",
    "WITHDRAWING": "DRAINING RELEASED DRAINING = = = - = - - -",
    "OWNED": "- - - DRAINING FENCED FENCED EXPIRED LOST - - -",
    "DRAINING": "- - - = LOST LOST - LOST - CLOSING -",
    "CLOSING": "- - - = = = - = - - RELEASED",
    "EXPIRED": "- - - DRAINING FENCED FENCED - LOST ACQUIRING - -",
    "FENCED": "- - - LOST = = - LOST ACQUIRING - -",
    "LOST": "- - - = = = - = RELEASED - -",
    "RELEASED": "- - - = = = - = - - -",
}
CELLS = [
    (state, cause, target)
    for state, row in EXPECTED.items()
    for cause, target in zip(INPUTS, row.split(), strict=True)
]


def in_state(state: OwnershipState) -> QueueOwnership:
    ownership = QueueOwnership()
    ownership.state = state
    return ownership


def test_expected_table_names_every_state_and_every_input() -> None:
    assert [state.name for state in OwnershipState] == list(EXPECTED)
    assert [cause.name for cause in OwnershipInput] == list(INPUTS)
    assert list(TABLE) == list(OwnershipState)


@pytest.mark.parametrize(("state", "cause", "target"), CELLS)
def test_input_leads_to_the_stated_state_or_is_refused(state: str, cause: str, target: str) -> None:
    ownership = in_state(OwnershipState[state])
    if target == "-":
        with pytest.raises(InvalidInput, match=f"^{cause} is not possible in state {state}$"):
            ownership.receive(OwnershipInput[cause])
        assert ownership.state is OwnershipState[state]
    else:
        ownership.receive(OwnershipInput[cause])
        assert ownership.state is (
            OwnershipState[state] if target == "=" else OwnershipState[target]
        )


def test_new_queue_is_being_acquired() -> None:
    assert QueueOwnership().state is OwnershipState.ACQUIRING


def test_only_acquiring_owned_expired_and_fenced_queues_are_assigned() -> None:
    assert {state for state in OwnershipState if in_state(state).assigned} == {
        OwnershipState.ACQUIRING,
        OwnershipState.OWNED,
        OwnershipState.EXPIRED,
        OwnershipState.FENCED,
    }


def test_only_owned_and_draining_queues_are_held() -> None:
    assert {state for state in OwnershipState if in_state(state).held} == {
        OwnershipState.OWNED,
        OwnershipState.DRAINING,
    }


def test_revoked_queue_is_never_assigned_again() -> None:
    """The next assignment begins with a new object, after the hand-over."""
    for state in OwnershipState:
        for cause, (target, _) in TABLE[state].items():
            if not in_state(state).assigned:
                assert not in_state(target).assigned, (state, cause)


def test_owned_is_entered_by_a_grant_only() -> None:
    for state in OwnershipState:
        for cause, (target, _) in TABLE[state].items():
            if target is OwnershipState.OWNED:
                assert cause is OwnershipInput.GRANTED


def test_draining_is_entered_by_a_grant_a_revocation_or_with_an_earlier_token() -> None:
    entries = {
        (state, cause)
        for state in OwnershipState
        for cause, (target, _) in TABLE[state].items()
        if target is OwnershipState.DRAINING is not state
    }
    assert entries == {
        (OwnershipState.WITHDRAWING, OwnershipInput.GRANTED),
        (OwnershipState.WITHDRAWING, OwnershipInput.WITHDRAWN_LATE),
        (OwnershipState.OWNED, OwnershipInput.REVOKED),
        (OwnershipState.EXPIRED, OwnershipInput.REVOKED),
    }


def test_token_of_an_expired_lease_is_kept_until_it_is_refused() -> None:
    """The consumer may close it, which spares the next owner the wait for the lease."""
    kept = TABLE[OwnershipState.EXPIRED][OwnershipInput.STOPPED]
    assert kept.effects == ()
    for state in (OwnershipState.ACQUIRING, OwnershipState.WITHDRAWING):
        for refused in (OwnershipInput.FENCED, OwnershipInput.RESET, OwnershipInput.MODE_CHANGED):
            assert OwnershipEffect.CLEAR_TOKEN in TABLE[state][refused].effects


def test_released_queue_was_closed_or_lost_its_token_or_was_never_granted() -> None:
    before = {
        state
        for state in OwnershipState
        for target, _ in TABLE[state].values()
        if target is OwnershipState.RELEASED
    }
    assert before - {OwnershipState.RELEASED} == {
        OwnershipState.CLOSING,
        OwnershipState.LOST,
        OwnershipState.WITHDRAWING,
    }


def test_grant_is_reported_once_and_its_end_once() -> None:
    for state in OwnershipState:
        for cause, (target, effects) in TABLE[state].items():
            gained = cause is OwnershipInput.GRANTED
            assert (OwnershipEffect.REPORT_GRANTED in effects) == gained, (state, cause)
            lost = in_state(state).held and target in (
                OwnershipState.EXPIRED,
                OwnershipState.FENCED,
                OwnershipState.LOST,
            )
            assert (OwnershipEffect.REPORT_FENCED in effects) == lost, (state, cause)
            assert (OwnershipEffect.REPORT_RELEASED in effects) == (
                cause is OwnershipInput.RELEASED
            )
            assert (OwnershipEffect.REPORT_DRAINING in effects) == (
                state is OwnershipState.OWNED and target is OwnershipState.DRAINING
            )


def test_reset_and_mode_change_drop_all_work_unless_the_queue_is_closed() -> None:
    for state in OwnershipState:
        for cause in (OwnershipInput.RESET, OwnershipInput.MODE_CHANGED):
            drops_work = OwnershipEffect.FORGET_WORK in TABLE[state][cause].effects
            assert drops_work == (state not in (OwnershipState.CLOSING, OwnershipState.RELEASED)), (
                state,
                cause,
            )


def test_fence_keeps_the_work_in_flight() -> None:
    """The next request claims these messages (protocol section 11)."""
    for state in OwnershipState:
        assert OwnershipEffect.FORGET_WORK not in TABLE[state][OwnershipInput.FENCED].effects


def test_fence_and_revocation_are_possible_in_every_state() -> None:
    """The group's record and late refusals arrive at any time."""
    for state in OwnershipState:
        assert {
            OwnershipInput.REVOKED,
            OwnershipInput.FENCED,
            OwnershipInput.RESET,
            OwnershipInput.MODE_CHANGED,
        } <= TABLE[state].keys()


def test_every_state_leads_to_released() -> None:
    ends = {OwnershipState.RELEASED}
    for _ in OwnershipState:
        ends |= {
            state
            for state in OwnershipState
            if ends & {target for target, _ in TABLE[state].values()}
        }
    assert ends == set(OwnershipState)


def test_module_prints_its_diagram() -> None:
    command = [sys.executable, "-m", "batonmq._core.ownership"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert printed == mermaid_diagram() + "\n"
    assert "    OWNED --> DRAINING: revoked\n" in printed
    assert "    OWNED --> FENCED: fenced, reset\n" in printed
