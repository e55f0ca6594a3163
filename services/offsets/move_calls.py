"""The calls by which another replica set takes a group over."""

from __future__ import annotations

from baton.offsets.v1 import offsets_service_pb2 as pb
from batonmq._core.names import check_group, check_offsets_set
from batonmq_server.offsets.offsets_calls import Context, OffsetsCalls
from batonmq_server.offsets.request_reader import number


class MoveCalls(OffsetsCalls):
    """Answers ExportGroup and ForgetGroup."""

    async def ExportGroup(
        self, request: pb.ExportGroupRequest, context: Context
    ) -> pb.ExportGroupResponse:
        """See the proto."""
        self._check_change(0)
        return await self._exporter.export(
            check_group(request.group),
            number(request.move, "move", 1),
            check_offsets_set(request.to_set),
            request.after_key,
        )

    async def ForgetGroup(
        self, request: pb.ForgetGroupRequest, context: Context
    ) -> pb.ForgetGroupResponse:
        """See the proto."""
        self._check_change(0)
        await self._exporter.forget(check_group(request.group), number(request.move, "move", 1))
        return pb.ForgetGroupResponse(offsets_epoch=self._table.epoch)
