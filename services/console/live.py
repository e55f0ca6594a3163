"""Updates of open pages: each page is rendered once per interval for all of its viewers.

A page is one address and one credential. While at least one browser has it open, one task renders
it; a text that did not change is not sent. A browser that is slow gets the newest text only.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

from batonmq._common import timeouts
from batonmq.errors import BatonError

log = logging.getLogger(__name__)

Render = Callable[[], Awaitable[str]]
PING_S = 15.0
"""A comment is sent after this time without an update, so that a closed connection is noticed."""


class TooManyViewers(Exception):
    """The limit of pages that are updated is reached."""


@dataclass(eq=False, slots=True)
class _Viewer:
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    event: str = ""


@dataclass(slots=True)
class _Page:
    viewers: set[_Viewer] = field(default_factory=set)
    event: str = ""


class LiveHub:
    """Renders the open pages.

    Args:
        interval_s: Time between two renderings of a page.
        viewers_max: Maximum number of open pages over all viewers.
    """

    def __init__(self, interval_s: float, viewers_max: int) -> None:
        self._interval_s, self._viewers_max = interval_s, viewers_max
        self._pages: dict[tuple[str, str], _Page] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self.rendered_count = 0

    @property
    def viewer_count(self) -> int:
        """Number of open pages."""
        return sum(len(page.viewers) for page in self._pages.values())

    @property
    def page_count(self) -> int:
        """Number of different pages that are rendered."""
        return len(self._pages)

    async def run(self) -> None:
        """Run until cancelled; pages are updated meanwhile."""
        async with asyncio.TaskGroup() as self._tasks:
            await asyncio.Event().wait()

    async def events(self, key: tuple[str, str], render: Render) -> AsyncIterator[str]:
        """Yield server-sent events of a page, as soon as its text changes.

        Raises:
            TooManyViewers: At the first step: the limit is reached.
        """
        if self.viewer_count >= self._viewers_max or self._tasks is None:
            raise TooManyViewers
        viewer = _Viewer()
        page = self._pages.get(key)
        if page is None:
            page = self._pages[key] = _Page()
            self._tasks.create_task(self._keep(key, page, render))
        page.viewers.add(viewer)
        if page.event:
            viewer.event = page.event
            viewer.changed.set()
        try:
            yield "retry: 3000\n\n"
            while True:
                try:
                    async with timeouts.timeout(PING_S):
                        await viewer.changed.wait()
                except TimeoutError:
                    yield ": still here\n\n"
                    continue
                viewer.changed.clear()
                yield viewer.event
        finally:
            page.viewers.discard(viewer)

    async def _keep(self, key: tuple[str, str], page: _Page, render: Render) -> None:
        try:
            while page.viewers:
                event = await self._render(render)
                if event != page.event:
                    page.event = event
                    for viewer in page.viewers:
                        viewer.event = event
                        viewer.changed.set()
                await asyncio.sleep(self._interval_s)
        finally:
            if self._pages.get(key) is page:
                del self._pages[key]

    async def _render(self, render: Render) -> str:
        self.rendered_count += 1
        try:
            return f"event: live\ndata: {json.dumps(await render())}\n\n"
        except BatonError as error:
            text = {"reason": error.reason, "message": error.message, "remedy": error.remedy}
            return f"event: problem\ndata: {json.dumps(text)}\n\n"
        except Exception:  # one page that can't be rendered must not end the updates of all others
            log.exception("page not rendered")
            text = {"reason": "INTERNAL", "message": "this page can't be updated", "remedy": ""}
            return f"event: problem\ndata: {json.dumps(text)}\n\n"
