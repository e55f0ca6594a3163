"""The web application: sign-in, pages, updates and errors."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import (
    HTMLResponse,
    PlainTextResponse,
    RedirectResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from batonmq._connection.directory import ClientEnvironment
from batonmq.errors import BatonError, PermissionDenied, Unauthenticated
from batonmq_server.console.change_pages import ChangePages
from batonmq_server.console.config import ConsoleSettings
from batonmq_server.console.event_reader import EventReader
from batonmq_server.console.live import LiveHub, TooManyViewers
from batonmq_server.console.pages import PAGES
from batonmq_server.console.pages.dead_letters import export
from batonmq_server.console.viewers import SignInRefused, Viewer, Viewers
from batonmq_server.console.visit import (
    FOLDER,
    NAV,
    Console,
    PageSpec,
    Visit,
    make_templates,
    render_block,
)
from batonmq_server.console.web import HEALTH, FormTooLarge, Guard, form_of, is_foreign

COOKIE = "baton_console"
_SIGN_INS_AT_ONCE = 4
_STATUS = {
    "INVALID_ARGUMENT": HTTPStatus.BAD_REQUEST,
    "NOT_FOUND": HTTPStatus.NOT_FOUND,
    "PERMISSION_DENIED": HTTPStatus.FORBIDDEN,
    "UNAUTHENTICATED": HTTPStatus.UNAUTHORIZED,
    "UNAVAILABLE": HTTPStatus.SERVICE_UNAVAILABLE,
    "DEADLINE_EXCEEDED": HTTPStatus.SERVICE_UNAVAILABLE,
    "RESOURCE_EXHAUSTED": HTTPStatus.SERVICE_UNAVAILABLE,
    "OUT_OF_RANGE": HTTPStatus.NOT_FOUND,
}


class WebConsole:
    """Handles the calls of browsers.

    Args:
        pages: All pages.
    """

    def __init__(self, console: Console, pages: Sequence[PageSpec] = PAGES) -> None:
        self.console, self._pages = console, pages
        self._sign_ins = asyncio.Semaphore(_SIGN_INS_AT_ONCE)

    def application(self) -> Starlette:
        """Return the application for a web server."""
        settings = self.console.settings
        routes = [
            Route(HEALTH, self._health),
            Route("/sign-in", self._sign_in, methods=["GET", "POST"]),
            Route("/sign-out", self._sign_out, methods=["POST"]),
            *(Route(page.path, self._endpoint(page)) for page in self._pages),
            *ChangePages(self).routes,
            Route("/dead-letters/{group}/export", self._export),
            Mount("/static", StaticFiles(directory=FOLDER / "static")),
        ]
        return Starlette(
            routes=routes,
            middleware=[
                Middleware(Guard, hosts=settings.hosts, secure=bool(settings.tls_cert_file))
            ],
            exception_handlers={HTTPException: self._http_error, FormTooLarge: self._too_large},
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        async with self.running():
            yield

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Update open pages until the end of the block; then close all clients."""
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(self.console.hub.run()),
                    tasks.create_task(self.console.events.run()),
                ]
                yield
                for task in running:
                    task.cancel()
        finally:
            await self.console.viewers.close()

    # ---- pages

    def _endpoint(self, page: PageSpec) -> Any:
        async def show(request: Request) -> Response:
            return await self._show(page, request)

        return show

    async def _show(self, page: PageSpec, request: Request) -> Response:
        session_id = request.cookies.get(COOKIE, "")
        viewer = self.console.viewers.viewer_of(session_id)
        live = page.live and "live" in request.query_params
        if viewer is None:
            if live:
                return PlainTextResponse("signed out", status_code=HTTPStatus.UNAUTHORIZED)
            return self.to_sign_in(request)
        query = {name: text for name, text in request.query_params.items() if name != "live"}
        visit = Visit(self.console, viewer, request.url.path, request.path_params, query)
        if live:
            return await self._updates(page, visit, session_id)
        try:
            values = await page.load(visit)
        except Unauthenticated:
            await self.console.viewers.sign_out(session_id)
            return self.to_sign_in(request)
        except BatonError as error:
            return self.error(request, error)
        shown = {"section": page.section, "live": page.live, **values}
        return self.page(request, page.template, shown)

    async def _updates(self, page: PageSpec, visit: Visit, session_id: str) -> Response:
        viewer = visit.viewer

        async def render() -> str:
            values = self._common(visit) | await page.load(visit)
            return render_block(self.console.templates, page.template, values)

        address = f"{visit.path}?{sorted(visit.query.items())}"
        # A later viewer with the same credential has a client of its own.
        events = self.console.hub.events((f"{viewer.credential} {id(viewer)}", address), render)
        try:
            first = await anext(events)
        except TooManyViewers:
            return PlainTextResponse(
                "too many open pages", status_code=HTTPStatus.SERVICE_UNAVAILABLE
            )

        async def stream() -> AsyncIterator[str]:
            yield first
            async for event in events:
                if self.console.viewers.viewer_of(session_id) is not viewer:
                    return  # the browser asks again, and is told that it is signed out
                yield event

        return StreamingResponse(stream(), media_type="text/event-stream")

    def _common(self, visit: Visit) -> dict[str, Any]:
        return {
            "path": visit.path,
            "query": visit.query,
            "changes": self.console.settings.changes,
        }

    def page(
        self,
        request: Request,
        template: str,
        values: dict[str, Any],
        status: int = HTTPStatus.OK,
    ) -> Response:
        """Return a whole page, with the session of the browser."""
        viewers = self.console.viewers
        session_id = request.cookies.get(COOKIE, "")
        viewer = viewers.viewer_of(session_id)
        fresh = "" if _is_session_id(session_id) else secrets.token_urlsafe(32)
        session_id = fresh or session_id
        common: dict[str, Any] = {
            "path": request.url.path,
            "query": dict(request.query_params),
            "changes": self.console.settings.changes,
            "nav": NAV,
            "section": "",
            "live": False,
            "csrf": viewers.csrf_token(session_id),
            "signed_in": viewer is not None,
            "identity": viewer.identity if viewer else "",
            "open": viewers.open,
        }
        text = self.console.templates.get_template(template).render({**common, **values})
        response = HTMLResponse(text, status_code=status)
        if fresh:
            self._set_cookie(response, fresh)
        return response

    def viewer_of(self, request: Request) -> Viewer | None:
        """Return the viewer of the session of a browser; None if it has to sign in."""
        return self.console.viewers.viewer_of(request.cookies.get(COOKIE, ""))

    async def _export(self, request: Request) -> Response:
        viewer = self.viewer_of(request)
        if viewer is None:
            return self.to_sign_in(request)
        group = request.path_params["group"]
        lines = export(viewer, group, dict(request.query_params))
        try:
            first = await anext(lines, b"")
        except BatonError as error:
            return self.error(request, error)

        async def stream() -> AsyncIterator[bytes]:
            yield first
            async for line in lines:
                yield line

        name = "".join(c for c in group if c.isascii() and (c.isalnum() or c in "-_"))
        headers = {"content-disposition": f'attachment; filename="dead-letters-{name}.jsonl"'}
        return StreamingResponse(stream(), media_type="application/jsonl", headers=headers)

    # ---- sign-in

    async def _sign_in(self, request: Request) -> Response:
        viewers = self.console.viewers
        if viewers.open:
            return RedirectResponse("/", status_code=HTTPStatus.SEE_OTHER)
        if request.method == "GET":
            goal = _own_path(request.query_params.get("next", ""))
            return self.page(request, "sign_in.html", {"goal": goal, "refusal": ""})
        form = await form_of(request)
        goal = _own_path(form.get("next", ""))
        if refused := self.forged(request, form):
            return refused
        try:
            async with self._sign_ins:
                session_id = await viewers.sign_in(form.get("token", "").strip())
        except SignInRefused as error:
            return self.page(
                request,
                "sign_in.html",
                {"goal": goal, "refusal": str(error)},
                HTTPStatus.UNAUTHORIZED,
            )
        except BatonError as error:
            return self.error(request, error)
        response = RedirectResponse(goal, status_code=HTTPStatus.SEE_OTHER)
        self._set_cookie(response, session_id)
        return response

    async def _sign_out(self, request: Request) -> Response:
        if refused := self.forged(request, await form_of(request)):
            return refused
        await self.console.viewers.sign_out(request.cookies.get(COOKIE, ""))
        response = RedirectResponse("/sign-in", status_code=HTTPStatus.SEE_OTHER)
        response.delete_cookie(COOKIE)
        return response

    def forged(self, request: Request, form: Mapping[str, str]) -> Response | None:
        """Return the refusal of a form that no page of this session has sent; None if it is one."""
        session_id = request.cookies.get(COOKIE, "")
        token = form.get("csrf", "")
        if not is_foreign(request) and self.console.viewers.is_csrf_token(session_id, token):
            return None
        return self.page(
            request,
            "error.html",
            {
                "reason": "FORGED_FORM",
                "message": "this form does not come from a page of your session",
                "remedy": "Load the page again and send the form from there.",
            },
            HTTPStatus.FORBIDDEN,
        )

    def to_sign_in(self, request: Request) -> Response:
        """Return the redirection to the sign-in, and from there back to this page."""
        goal = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        address = str(request.url_for("_sign_in").include_query_params(next=goal))
        parts = urlsplit(address)
        return RedirectResponse(f"{parts.path}?{parts.query}", status_code=HTTPStatus.SEE_OTHER)

    def _set_cookie(self, response: Response, session_id: str) -> None:
        settings = self.console.settings
        response.set_cookie(
            COOKIE,
            session_id,
            max_age=settings.session_ms // 1000,
            httponly=True,
            samesite="strict",
            secure=bool(settings.tls_cert_file),
        )

    # ---- errors

    def error(self, request: Request, error: BatonError) -> Response:
        """Return the page of an error."""
        values = {"reason": error.reason, "message": error.message, "remedy": error.remedy}
        if isinstance(error, PermissionDenied):
            values["remedy"] = error.remedy or "Ask an administrator for the permission."
        status = _STATUS.get(error.kind, HTTPStatus.CONFLICT)
        return self.page(request, "error.html", values, status)

    async def _http_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        values = {
            "reason": HTTPStatus(error.status_code).phrase,
            "message": f"there is no page {request.url.path}"
            if error.status_code == HTTPStatus.NOT_FOUND
            else error.detail,
            "remedy": "Choose one of the pages above.",
        }
        return self.page(request, "error.html", values, error.status_code)

    async def _too_large(self, request: Request, _: Exception) -> Response:
        values = {
            "reason": "FORM_TOO_LARGE",
            "message": "the form is larger than 6 MiB",
            "remedy": "Send large messages with `baton produce`.",
        }
        return self.page(request, "error.html", values, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)

    async def _health(self, _: Request) -> Response:
        return PlainTextResponse("serving\n")


def make_console(
    settings: ConsoleSettings, environment: ClientEnvironment | None = None
) -> WebConsole:
    """Return a console with its parts.

    Args:
        environment: Clock, random numbers and transport of its clients, for tests.
    """
    events = EventReader()
    viewers = Viewers(settings, environment or ClientEnvironment(), events.forget)
    hub = LiveHub(settings.refresh_ms / 1000, settings.viewers_max)
    return WebConsole(Console(settings, viewers, hub, events, make_templates()))


def _own_path(goal: str) -> str:
    """Return a path of this console; the first page if `goal` leads elsewhere."""
    parts = urlsplit(goal)
    own = goal.startswith("/") and not goal.startswith(("//", "/\\")) and not parts.netloc
    return goal if own and not parts.scheme else "/"


def _is_session_id(text: str) -> bool:
    return (
        40 <= len(text) <= 64
        and text.isascii()
        and text.replace("-", "").replace("_", "").isalnum()
    )
