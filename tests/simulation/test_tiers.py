"""Goal: no message is lost, or read with other bytes, whatever fails while segments move to the
object store; the runs find a broken rule.

Method: `tiers` plays producers and new groups while services and the store fail, with faults drawn
from a seed; in some runs the broker is a replica set. Each mutant leaves one rule out; one of its
runs must break a promise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from batonmq.errors import BatonError
from batonmq_server.storage.core.tier import SegmentName, TierManifest
from batonmq_server.storage.tier_mover import TierMover
from batonmq_server.storage.tier_store import SegmentStore
from tests.simulation.seeds import SEEDS, each_bunch
from tests.simulation.tiers import play_tiers
from tests.support.run_counts import note_runs

pytestmark = [pytest.mark.sim, pytest.mark.timeout(600)]

BUNCH = 5
JUDGED_FROM = 20
TIER_SEEDS = SEEDS[: max(1, len(SEEDS) // 100)]
MUTANT_SEEDS = 10
LEAST = {
    "messages": 5_000, "early messages": 2_000, "remote segments": 1_000, "store failures": 500,
    "broker kills": 200,
}  # fmt: skip
"""Minimum number of events of each kind in 100 runs, judged over a whole session."""
LEAST_REPLICATED = {
    "messages": 5_000, "early messages": 1_000, "remote segments": 1_000, "store failures": 500,
    "leader killed": 50,
}  # fmt: skip


@each_bunch(TIER_SEEDS, BUNCH)
@pytest.mark.parametrize("replicated", [False, True], ids=["two brokers", "a set"])
def test_message_is_read_from_the_store_whatever_fails(
    request: pytest.FixtureRequest, seeds: range, replicated: bool
) -> None:
    counts: Counter[str] = Counter()
    for seed in seeds:
        run = play_tiers(f"tiers/{seed}", replicated=replicated)
        assert not run.violations, f"seed {run.seed}: {run.violations[:5]}"
        assert run.counts["remote segments"], f"seed {run.seed}"
        counts += run.counts
    kind, least = ("tiers of a set", LEAST_REPLICATED) if replicated else ("tiers", LEAST)
    note_runs(request, kind, len(seeds), counts, least, JUDGED_FROM)


def _manifest_before_parts(patch: pytest.MonkeyPatch) -> None:
    """A part that could not be written counts as written."""
    real = SegmentStore.write_part

    def write_part(self: SegmentStore, name: SegmentName, number: int, content: bytes) -> None:
        try:
            real(self, name, number, content)
        except BatonError:
            return

    patch.setattr(SegmentStore, "write_part", write_part)


def _local_copy_without_manifest(patch: pytest.MonkeyPatch) -> None:
    """The local copy is removed when the upload begins, before the store has the manifest."""
    real, store_manifest = TierMover._upload, SegmentStore.write_manifest
    begun: list[TierManifest] = []

    def write_manifest(self: SegmentStore, manifest: TierManifest) -> None:
        begun.append(manifest)
        store_manifest(self, manifest)

    async def upload(self: TierMover, segment: Any) -> bool:
        parts, before = self._parts, dict[str, bytes]()
        writes = SegmentStore._write
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(
                SegmentStore, "_write", lambda _, name, content: before.update({name: content})
            )
            again = await real(self, segment)
        if begun and begun[-1].name == segment.name:
            manifest = begun.pop()
            self._log.move_out(manifest)
            path = f"log/{manifest.first_position:020d}"
            parts.node.disk.replace_sparse(path, manifest.encode(), manifest.size)
        for name, content in before.items():
            writes(parts.store, name, content)
        return again

    patch.setattr(SegmentStore, "write_manifest", write_manifest)
    patch.setattr(TierMover, "_upload", upload)


@pytest.mark.parametrize(
    "break_it",
    [
        pytest.param(_manifest_before_parts, id="parts before manifest"),
        pytest.param(_local_copy_without_manifest, id="manifest before removal"),
    ],
)
def test_run_finds_a_broken_rule(
    break_it: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(monkeypatch)
    for seed in range(1, MUTANT_SEEDS + 1):
        try:
            if play_tiers(f"tiers/{seed}").violations:
                return
        except (BatonError, ExceptionGroup):  # a node can't start without what is lost
            return
    pytest.fail(f"no run of {MUTANT_SEEDS} seeds broke a promise")
