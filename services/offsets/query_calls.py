"""The calls that read: progress of queues and groups, recorded resets, holds of a queue."""

from __future__ import annotations

from baton.offsets.v1 import offsets_service_pb2 as pb
from batonmq._common.rpc import error_to_pb
from batonmq._core.names import check_group
from batonmq._core.queues import GroupQueue
from batonmq.errors import BatonError
from batonmq_server.offsets.core.holds import link_holds
from batonmq_server.offsets.core.progress import Progress
from batonmq_server.offsets.offsets_calls import Context, OffsetsCalls, attempt
from batonmq_server.offsets.persistence import find_token_changes
from batonmq_server.offsets.request_reader import (
    number_of_token,
    queue_of_token,
    token_key_of_queue,
)
from batonmq_server.offsets.responses import hold_pb, progress_pb, recorded_reset_pb
from batonmq_server.runtime.paging import page_of


class QueryCalls(OffsetsCalls):
    """Answers Query, QueryGroup, ListResets and ListHolds."""

    async def Query(self, request: pb.QueryRequest, context: Context) -> pb.QueryResponse:
        """See the proto."""
        self._table.check_epoch(request.offsets_epoch)
        keys = await self._reader.batch(request.queues, self._reader.queue)
        groups = {key.group for key in keys}
        unplaced = await self._resolver.resolve(groups, self._modes.exists)
        now, outcomes = self._now(), []
        for key in keys:
            progress = attempt(self._query, key, placed=key.group not in unplaced)
            if isinstance(progress, BatonError):
                outcomes.append(pb.QueryOutcome(error=error_to_pb(progress)))
            else:
                answer = progress_pb(key, progress, self._table.limits, now)
                outcomes.append(pb.QueryOutcome(progress=answer))
        await self._commits.wait_durable(keys)
        return pb.QueryResponse(offsets_epoch=self._table.epoch, outcomes=outcomes)

    async def QueryGroup(
        self, request: pb.QueryGroupRequest, context: Context
    ) -> pb.QueryGroupResponse:
        """See the proto."""
        group = check_group(request.group)
        after = queue_of_token(group, request.page_token)
        await self._is_placed(group)
        keys = [key for key in self._table.queues_of(group) if after is None or key > after]
        now, limits = self._now(), self._table.limits
        entries = (
            (token_key_of_queue(key), progress_pb(key, self._table.query(key), limits, now))
            for key in keys
        )
        page = page_of(entries, request.page_size)
        await self._commits.wait_durable(keys[: len(page.entries)])
        return pb.QueryGroupResponse(
            offsets_epoch=self._table.epoch,
            queues=page.entries,
            next_page_token=page.next_page_token,
        )

    async def ListResets(
        self, request: pb.ListResetsRequest, context: Context
    ) -> pb.ListResetsResponse:
        """See the proto."""
        group, before = check_group(request.group), number_of_token(request.page_token)
        await self._is_placed(group)
        resets = self._resets.history.newest_first(group)
        entries = (
            (str(each.number), recorded_reset_pb(each))
            for each in resets
            if before is None or each.number < before
        )
        page = page_of(entries, request.page_size)
        await self._commits.wait_all_durable()
        return pb.ListResetsResponse(
            offsets_epoch=self._table.epoch,
            resets=page.entries,
            next_page_token=page.next_page_token,
        )

    async def ListHolds(
        self, request: pb.ListHoldsRequest, context: Context
    ) -> pb.ListHoldsResponse:
        """See the proto.

        The records are read from the disk after the current token is taken from memory, so they may
        have newer tokens; these are left out.
        """
        key, before = self._reader.queue(request.queue), number_of_token(request.page_token)
        await self._is_placed(key.group)
        if key not in self._table:
            return pb.ListHoldsResponse(offsets_epoch=self._table.epoch)
        progress = self._table.query(key)
        token, reach = progress.token, progress.reach
        await self._commits.wait_durable([key])
        changes = await find_token_changes(self._disk, key)
        self._resolver.check(key.group)  # the group may have left, and its records with it
        entries = (
            (str(hold.began.token), hold_pb(hold))
            for hold in link_holds(changes, token, reach)
            if before is None or hold.began.token < before
        )
        page = page_of(entries, request.page_size)
        return pb.ListHoldsResponse(
            offsets_epoch=self._table.epoch,
            holds=page.entries,
            next_page_token=page.next_page_token,
        )

    def _query(self, key: GroupQueue, *, placed: bool) -> Progress:
        self._resolver.check(key.group, placed=placed)
        return self._table.query(key)
