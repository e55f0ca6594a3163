"""Goal: an open page shows nothing more when the session of its browser has ended.

Method: the application with a page and sessions that the test makes; no cluster is called.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import StreamingResponse

from batonmq.errors import NotServing
from batonmq_server.console import viewers as viewers_module
from batonmq_server.console.app import COOKIE, WebConsole, make_console
from batonmq_server.console.config import ConsoleSettings
from batonmq_server.console.viewers import Session, Viewer
from batonmq_server.console.visit import PageSpec, Visit
from batonmq_server.local.certificates import CertificateAuthority
from tests.support.conditions import until

NUMBERS = count()


async def load(visit: Visit) -> dict[str, Any]:
    """Fail with another text each time, which names the viewer."""
    raise NotServing(f"viewer {id(visit.viewer)} look {next(NUMBERS)}")


PAGE = PageSpec("/page", "topics.html", "topics", load)


@asynccontextmanager
async def console(folder: Path) -> AsyncIterator[tuple[WebConsole, asyncio.TaskGroup]]:
    """Start a console with sign-in; what was started in the task group ends with the block."""
    ca_file = str(CertificateAuthority(folder).ca_file)
    values: dict[str, Any] = {"ca_file": ca_file, "refresh_ms": 500}
    web = make_console(ConsoleSettings(**values))
    async with web.running(), asyncio.TaskGroup() as tasks:
        await asyncio.sleep(0)  # the hub begins
        yield web, tasks
        for task in list(tasks._tasks):
            task.cancel()


def sign_in(web: WebConsole, session_id: str, left_ms: int = 60_000) -> int:
    """Begin a session of the only credential; return the id of its viewer."""
    viewers = web.console.viewers
    viewer = viewers._viewer("credential", viewers.settings.security)
    viewer.sessions += 1
    viewers._sessions[session_id] = Session(viewer, viewers.clock.monotonic_ms() + left_ms)
    return id(viewer)


async def opened(web: WebConsole, tasks: asyncio.TaskGroup, session_id: str) -> list[str]:
    """Open the updates of the page; return its events, to which later ones are added."""
    scope = {
        "type": "http", "method": "GET", "path": "/page", "query_string": b"live=1",
        "headers": [(b"cookie", f"{COOKIE}={session_id}".encode())],
    }  # fmt: skip
    response = await web._show(PAGE, Request(scope))
    assert isinstance(response, StreamingResponse)
    events: list[str] = []

    async def read() -> None:
        async for event in response.body_iterator:
            events.append(str(event))  # noqa: PERF401  the test looks at them meanwhile
        events.append("end")

    tasks.create_task(read())
    return events


@pytest.mark.parametrize("expires", [True, False], ids=["expires", "is ended"])
async def test_open_page_ends_when_its_session(tmp_path: Path, expires: bool) -> None:
    async with console(tmp_path) as (web, tasks):
        sign_in(web, "other")  # of the same credential, whose client stays open
        sign_in(web, "one", 200 if expires else 60_000)
        events = await opened(web, tasks, "one")
        await until(lambda: len(events) > 1)
        if not expires:
            await web.console.viewers.sign_out("one")
        await until(lambda: events[-1] == "end")


async def test_page_of_a_new_session_does_not_use_the_client_of_an_ended_one(
    tmp_path: Path,
) -> None:
    async with console(tmp_path) as (web, tasks):
        sign_in(web, "one")
        earlier = await opened(web, tasks, "one")
        await until(lambda: len(earlier) > 1)
        await web.console.viewers.sign_out("one")
        viewer = sign_in(web, "two")
        later = await opened(web, tasks, "two")
        await until(lambda: len(later) > 1)
        assert f"viewer {viewer} " in later[1]


async def test_sign_out_during_a_sign_in_with_the_same_token_leaves_its_client_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answered = asyncio.Event(), asyncio.Event()

    async def identify(viewer: Viewer) -> None:
        asked.set()
        await answered.wait()
        viewer.access_on = True

    monkeypatch.setattr(viewers_module, "_identify", identify)
    async with console(tmp_path) as (web, tasks):
        viewers = web.console.viewers
        answered.set()
        first = await viewers.sign_in("token")
        answered.clear()
        asked.clear()
        second = tasks.create_task(viewers.sign_in("token"))
        await asked.wait()
        await viewers.sign_out(first)
        answered.set()
        viewer = viewers.viewer_of(await second)
        assert viewer is not None
        assert viewers._viewers[viewer.credential] is viewer
        await viewers.sign_out(second.result())
        assert viewers._viewers == {}
