"""Goal: translated progress never counts a message as handled that is not, and counts each that is
and that the map has.

Method: Hypothesis makes two queues message by message: messages of the source, some removed before
they are copied, messages of the target, and those of each that were brought to the other. The truth
is the message at each offset.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from batonmq._core.mirror_map import (
    OffsetMap,
    OffsetRun,
    handled_ranges,
    translate_progress,
)
from batonmq._core.ranges import of_sorted


@dataclass
class TwoQueues:
    """The message at each offset of both queues, and the maps that a mirror has made of them."""

    source: list[int] = field(default_factory=list)
    target: list[int] = field(default_factory=list)
    forward: OffsetMap = field(default_factory=OffsetMap)
    own: OffsetMap = field(default_factory=OffsetMap)

    def happen(self, event: str) -> None:
        message = len(self.source) + len(self.target) * 1_000
        if event in ("copied", "removed", "source"):
            self.source.append(message)
        if event in ("copied", "target", "brought"):
            self.target.append(message)
        if event == "brought":
            self.source.append(message)
        run = OffsetRun(len(self.source) - 1, len(self.target) - 1, 1)
        if event == "copied":
            self.forward.add(run)
        elif event == "brought":
            self.own.add(run)


EVENTS = st.lists(
    st.sampled_from(["copied", "copied", "removed", "target", "brought"]), max_size=60
)


@given(EVENTS, st.data())
def test_translation_has_exactly_the_handled_messages_that_both_queues_have(
    events: list[str], data: st.DataObject
) -> None:
    queues = TwoQueues()
    for event in events:
        queues.happen(event)
    offsets = st.integers(0, len(queues.source))
    committed = data.draw(offsets)
    acked = of_sorted(sorted(data.draw(st.sets(st.integers(committed, committed + 20)))))
    handled = handled_ranges(committed, acked)
    made = translate_progress(handled, (queues.forward, queues.own), [])
    done = {m for o, m in enumerate(queues.source) if any(a <= o < b for a, b in handled)}
    translated = {
        queues.target[o]
        for first, end in [(0, made.committed_offset), *made.acked]
        for o in range(first, end)
    }
    assert translated == done & set(queues.target)
    assert all(first > made.committed_offset for first, _ in made.acked)


@given(EVENTS, st.integers(1, 4))
def test_bounded_map_counts_no_message_as_handled_that_is_not(
    events: list[str], runs_max: int
) -> None:
    queues = TwoQueues(forward=OffsetMap(runs_max), own=OffsetMap(runs_max))
    for event in events:
        queues.happen(event)
    assert len(queues.forward) <= runs_max
    made = translate_progress(
        handled_ranges(len(queues.source), ()), (queues.forward, queues.own), []
    )
    shared = set(queues.source) & set(queues.target)
    for first, end in [(0, made.committed_offset), *made.acked]:
        assert {queues.target[o] for o in range(first, end)} <= shared


def test_dense_queues_have_one_run() -> None:
    found = OffsetMap()
    for number in range(1_000):
        found.add(OffsetRun(50 + 3 * number, 3 * number, 3))
    assert found.runs == [OffsetRun(50, 0, 3_000)]


def test_own_progress_of_the_target_and_what_it_has_removed_count_as_handled() -> None:
    found = OffsetMap()
    found.add(OffsetRun(100, 10, 10))
    made = translate_progress([(0, 105)], (found,), [(0, 10), (17, 18)])
    assert made == (15, ((17, 18),))


def test_progress_beyond_the_mirrored_messages_ends_with_them() -> None:
    found = OffsetMap()
    found.add(OffsetRun(0, 0, 10))
    assert translate_progress([(0, 500)], (found,), []) == (10, ())
