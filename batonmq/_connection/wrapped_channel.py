"""The base of channels that forward to gRPC channels."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import grpc.aio


class WrappedChannel(grpc.aio.Channel):
    """A channel that is closed at the end of its block."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
