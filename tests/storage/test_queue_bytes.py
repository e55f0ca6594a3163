"""Goal: the bytes of a queue count each of its batches once, whatever the length of a step.

Method: a queue in memory; a list of batches is the model.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from batonmq_server.storage.core.consumequeue import ConsumeQueue
from batonmq_server.storage.core.files import FileCache
from batonmq_server.storage.core.queue_bytes import batch_bytes_by_step
from batonmq_server.testing.memory_disks import MemoryDisk

BATCHES = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 10_000)), max_size=12)


def filled(batches: list[tuple[int, int]]) -> tuple[ConsumeQueue, list[int]]:
    """Return a queue of batches of (messages, bytes), and their positions."""
    queue = ConsumeQueue(FileCache(MemoryDisk()), "consumequeue/t-1/0", entries_per_file=7)
    positions, position = [], 0
    for count, size in batches:
        queue.append(position, size, np.zeros(count, np.int32))
        positions.append(position)
        position += size
    queue.make_visible(queue.next_offset)
    return queue, positions


@given(BATCHES, st.integers(1, 20))
def test_sum_of_the_steps_is_the_sum_of_the_batches(
    batches: list[tuple[int, int]], step: int
) -> None:
    queue, _ = filled(batches)
    assert sum(batch_bytes_by_step(queue, step)) == sum(size for _, size in batches)


@given(BATCHES, st.integers(1, 20), st.data())
def test_trimmed_batches_do_not_count(
    batches: list[tuple[int, int]], step: int, data: st.DataObject
) -> None:
    queue, positions = filled(batches)
    kept_from = data.draw(st.sampled_from([*positions, 1 << 40]))
    queue.trim_before(kept_from)
    kept = [size for at, (_, size) in zip(positions, batches, strict=True) if at >= kept_from]
    assert sum(batch_bytes_by_step(queue, step)) == sum(kept)


def test_trim_between_two_steps_leaves_out_what_was_not_counted() -> None:
    queue, positions = filled([(2, 10), (2, 20), (2, 40), (2, 80)])
    steps = batch_bytes_by_step(queue, 2)
    assert next(steps) == 10
    queue.trim_before(positions[3])
    assert list(steps) == [80]


def test_growth_between_two_steps_is_left_out() -> None:
    queue, _ = filled([(2, 10), (2, 20)])
    steps = batch_bytes_by_step(queue, 2)
    assert next(steps) == 10
    queue.append(30, 40, np.zeros(1, np.int32))
    queue.make_visible(5)
    assert list(steps) == [20]
