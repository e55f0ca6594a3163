"""Pages of changes: a plan with a form, and the result.

A change is carried out only by a form with the token of the session, an author and a reason; and
only if the console may change anything at all.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from batonmq.admin.operation import Operation
from batonmq.errors import BatonError, InvalidArgument, PermissionDenied
from batonmq_server.console.access_changes import ROLES
from batonmq_server.console.changes import CHANGES, Change
from batonmq_server.console.core.change_plan import TARGETS, author_problem
from batonmq_server.console.viewers import Viewer
from batonmq_server.console.visit import Console
from batonmq_server.console.web import form_of

log = logging.getLogger(__name__)
NAME_COOKIE = "baton_console_name"
_NAME_AGE_S = 90 * 86_400


class Web(Protocol):
    """What these pages need of the application."""

    console: Console

    def viewer_of(self, request: Request) -> Viewer | None:
        """Return the viewer of the session of a browser; None if it has to sign in."""

    def page(
        self, request: Request, template: str, values: dict[str, Any], status: int = ...
    ) -> Response:
        """Return a whole page."""

    def error(self, request: Request, error: BatonError) -> Response:
        """Return the page of an error."""

    def forged(self, request: Request, form: Mapping[str, str]) -> Response | None:
        """Return the refusal of a form that no page of the session has sent."""

    def to_sign_in(self, request: Request) -> Response:
        """Return the redirection to the sign-in."""


class ChangePages:
    """Handles the plans and the forms of changes."""

    def __init__(self, web: Web) -> None:
        self._web = web

    @property
    def routes(self) -> list[Route]:
        """The routes of the pages."""
        return [Route("/change/{kind}", self._handle, methods=["GET", "POST"])]

    async def _handle(self, request: Request) -> Response:
        web = self._web
        viewer = web.viewer_of(request)
        if viewer is None:
            return web.to_sign_in(request)
        kind = request.path_params["kind"]
        form = await form_of(request) if request.method == "POST" else {}
        if request.method == "POST" and (refused := web.forged(request, form)):
            return refused
        try:
            change = _change(kind)
            if not web.console.settings.changes:
                raise PermissionDenied(
                    "this console is read-only",
                    remedy="Set BATON_CONSOLE_CHANGES to true, or use the `baton` command.",
                )
            if request.method == "GET":
                return await self._plan(request, viewer, kind, dict(request.query_params))
            return await self._carry_out(request, viewer, change, form)
        except BatonError as error:
            return web.error(request, error)

    async def _plan(
        self,
        request: Request,
        viewer: Viewer,
        kind: str,
        fields: Mapping[str, str],
        problem: str = "",
    ) -> Response:
        change = _change(kind)
        area = change.area
        if change.asks is not None and not fields.get(change.asks[0]):
            chosen = {
                "kind": kind,
                "targets": TARGETS,
                "roles": ROLES,
                "fields": fields,
                "back": area.page(fields),
                "section": area.section,
            }
            return self._web.page(request, change.asks[1], chosen)
        resource = area.resource(fields)
        values: dict[str, Any] = {
            "plan": await change.plan(viewer, fields),
            "kind": kind,
            "fields": fields,
            "back": area.page(fields),
            "op_id": secrets.token_hex(8),
            "by": viewer.identity,
            "name": request.cookies.get(NAME_COOKIE, ""),
            "reason": fields.get("reason", ""),
            "problem": problem,
            "allowed": await viewer.may(area.role, resource),
            "needed": f"{area.role} on {resource}",
            "section": area.section,
        }
        status = HTTPStatus.BAD_REQUEST if problem else HTTPStatus.OK
        return self._web.page(request, change.template, values, status)

    async def _carry_out(
        self, request: Request, viewer: Viewer, change: Change, form: dict[str, str]
    ) -> Response:
        kind = request.path_params["kind"]
        by = viewer.identity or form.get("by", "").strip()
        reason, op_id = form.get("reason", "").strip(), form.get("op_id", "")
        if problem := author_problem(by, reason, op_id):
            return await self._plan(request, viewer, kind, form, problem)
        operation = Operation(by, reason, op_id)
        facts = {name: form[name] for name in _LOGGED if form.get(name)}
        try:
            result = await change.carry_out(viewer, form, operation)
        except BatonError as error:
            log.warning(
                "change refused kind=%s by=%s reason=%r op_id=%s on=%s error=%s",
                kind, by, reason, op_id, facts, error.reason,
            )  # fmt: skip
            raise
        log.info(
            "change made kind=%s by=%s reason=%r op_id=%s on=%s", kind, by, reason, op_id, facts
        )
        viewer.reports.forget()
        area = change.area
        values = {"result": result, "back": area.page(form), "section": area.section}
        response = self._web.page(request, "changed.html", values)
        if not viewer.identity:
            response.set_cookie(
                NAME_COOKIE, by.encode("ascii", "ignore").decode(), max_age=_NAME_AGE_S,
                httponly=True, samesite="strict",
                secure=bool(self._web.console.settings.tls_cert_file),
            )  # fmt: skip
        return response


_LOGGED = (
    "group", "topic", "broker", "queue", "target", "value", "op", "to_topic",
    "identity", "role", "resource", "token", "subject",
)  # fmt: skip


def _change(kind: str) -> Change:
    if kind not in CHANGES:
        raise InvalidArgument(f"there is no change {kind[:40]!r}")
    return CHANGES[kind]
