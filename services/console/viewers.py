"""Viewers of the console: their credentials, their clients of the cluster, and their sessions.

A viewer is one credential: a token, the key of the console's own certificate, or none where the
cluster has no TLS. All sessions of one credential share one client and its reports. Tokens and
clients exist in memory only.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from batonmq._common.clock import Clock
from batonmq._common.secret import Secret
from batonmq._connection.directory import ClientEnvironment
from batonmq._connection.security import Security
from batonmq.admin.access import AccessControl, Role, RoleGrant
from batonmq.admin.admin import Admin
from batonmq.errors import InvalidArgument, Unauthenticated
from batonmq_server.console.config import ConsoleSettings
from batonmq_server.console.reports import Reports

SESSIONS_MAX = 1_000
RIGHTS_AGE_MS = 10_000
TIMEOUT_S = 5.0
_OPEN, _KEY = "open", "key"


class SignInRefused(Exception):
    """A credential was not accepted; the message says why."""


@dataclass(slots=True)
class Viewer:
    """One credential, with a client that uses it.

    Attributes:
        credential: Digest of the credential; equal for equal credentials.
        identity: Identity of the caller at the services; empty if they check no permissions.
        access_on: Whether the services check permissions.
        admin: Client with this credential.
        nameserver: host:port of the nameservers.
        security: TLS and credential of the client; None without TLS.
        environment: Clock, random numbers and transport of the client.
        sessions: Number of open sessions.
    """

    credential: str
    identity: str
    admin: Admin
    reports: Reports
    nameserver: str
    security: Security | None
    environment: ClientEnvironment
    sessions: int = 0
    access_on: bool = False

    async def may(self, role: Role, resource: str) -> bool:
        """Return whether the services allow the viewer a role on a resource."""
        if not self.access_on:
            return True
        wanted = RoleGrant(role, resource)
        check = await self.reports.get(
            ("may", wanted), lambda: AccessControl(self.admin).check(wanted), RIGHTS_AGE_MS
        )
        return check.allowed


@dataclass(frozen=True, slots=True)
class Session:
    """A sign-in of a person until it ends."""

    viewer: Viewer
    end_ms: int


@dataclass(slots=True)
class Viewers:
    """All viewers and sessions of a console.

    Args:
        environment: Clock, random numbers and transport of all clients.
        on_end: Called with the credential of a viewer whose last session has ended.
    """

    settings: ConsoleSettings
    environment: ClientEnvironment = field(default_factory=ClientEnvironment)
    on_end: Callable[[str], None] = lambda _: None
    _viewers: dict[str, Viewer] = field(default_factory=dict)
    _sessions: dict[str, Session] = field(default_factory=dict)
    _secret: bytes = field(default_factory=lambda: secrets.token_bytes(32))

    @property
    def open(self) -> bool:
        """Whether no sign-in is needed, because the services have no TLS."""
        return not self.settings.ca_file

    @property
    def clock(self) -> Clock:
        """The clock of the console."""
        return self.environment.clock

    async def close(self) -> None:
        """Close every client."""
        for viewer in self._viewers.values():
            await viewer.admin.close()
        self._viewers.clear()
        self._sessions.clear()

    def anonymous(self) -> Viewer:
        """Return the viewer without a credential, for a cluster without TLS."""
        assert self.open
        return self._viewer(_OPEN, None)

    def viewer_of(self, session_id: str) -> Viewer | None:
        """Return the viewer of a session; None if the session does not exist or has ended."""
        if self.open:
            return self.anonymous()
        session = self._sessions.get(session_id)
        if session is None or session.end_ms <= self.clock.monotonic_ms():
            return None
        return session.viewer

    def csrf_token(self, session_id: str) -> str:
        """Return the token that forms of a session contain."""
        return hmac.new(self._secret, session_id.encode(), hashlib.sha256).hexdigest()

    def is_csrf_token(self, session_id: str, token: str) -> bool:
        """Return whether a form has the token of the session."""
        return bool(session_id) and hmac.compare_digest(
            self.csrf_token(session_id).encode(), token.encode()
        )

    async def sign_in(self, secret: str) -> str:
        """Return the id of a new session for a token, or for the key of the console.

        Raises:
            SignInRefused: The token or the key is not valid.
            BatonError: The cluster does not answer.
        """
        await self._end_old_sessions()
        viewer = await self._by_key(secret) or await self._by_token(secret)
        session_id = secrets.token_urlsafe(32)
        end_ms = self.clock.monotonic_ms() + self.settings.session_ms
        self._sessions[session_id] = Session(viewer, end_ms)
        return session_id

    async def sign_out(self, session_id: str) -> None:
        """End a session; the client of its viewer is closed with the last one."""
        session = self._sessions.pop(session_id, None)
        if session is not None:
            await self._leave(session.viewer)

    async def _leave(self, viewer: Viewer) -> None:
        """End one session of a viewer, or a sign-in that failed."""
        viewer.sessions -= 1
        if not viewer.sessions:
            self._viewers.pop(viewer.credential, None)
            self.on_end(viewer.credential)
            await viewer.admin.close()

    async def _end_old_sessions(self) -> None:
        now_ms = self.clock.monotonic_ms()
        ended = [key for key, one in self._sessions.items() if one.end_ms <= now_ms]
        over = len(self._sessions) - len(ended) - SESSIONS_MAX + 1
        ended += [key for key in self._sessions if key not in ended][: max(0, over)]
        for session_id in ended:
            await self.sign_out(session_id)

    async def _by_key(self, secret: str) -> Viewer | None:
        key = _key_in(self.settings.sign_in_key_file)
        if not key or not hmac.compare_digest(key.encode(), secret.encode()):
            return None
        viewer = self._viewer(_KEY, self.settings.security)
        await self._enter(viewer)
        return viewer

    async def _by_token(self, secret: str) -> Viewer:
        security = self.settings.security
        assert security is not None
        credential = hashlib.sha256(secret.encode()).hexdigest()
        try:
            viewer = self._viewer(credential, replace(security, token=Secret(secret)))
        except InvalidArgument as error:
            raise SignInRefused(error.message) from error
        try:
            await self._enter(viewer)
        except Unauthenticated as error:
            raise SignInRefused(error.message) from error
        if not viewer.access_on:
            await self._leave(viewer)
            raise SignInRefused(
                "the services check no permissions, so they accept any token: access control "
                "is off (BATON_<SERVICE>_ACCESS)"
            )
        return viewer

    async def _enter(self, viewer: Viewer) -> None:
        """Begin a session of a viewer, once the services know its credential.

        Raises:
            BatonError: The credential is not valid, or no service answers.
        """
        viewer.sessions += 1  # first, so that the end of another one does not close the client
        try:
            await _identify(viewer)
        except BaseException:
            await self._leave(viewer)
            raise

    def _viewer(self, credential: str, security: Security | None) -> Viewer:
        viewer = self._viewers.get(credential)
        if viewer is None:
            nameserver, environment = self.settings.nameserver, self.environment
            admin = Admin(
                nameserver, timeout_s=TIMEOUT_S, security=security, environment=environment
            )
            # A page that is updated every two seconds must not show the report before.
            reports = Reports(admin, self.clock, self.settings.refresh_ms * 9 // 10)
            viewer = Viewer(credential, "", admin, reports, nameserver, security, environment)
            self._viewers[credential] = viewer
        return viewer


def _key_in(path: str) -> str:
    """Return the key in a file; empty without a file."""
    try:
        return Path(path).read_text().strip() if path else ""
    except OSError as error:
        raise SignInRefused(f"{path} can't be read: {error.strerror}") from error


async def _identify(viewer: Viewer) -> None:
    """Ask the services for the identity of the viewer.

    Raises:
        BatonError: The credential is not valid, or no service answers.
    """
    try:
        check = await AccessControl(viewer.admin).check(RoleGrant(Role.ADMIN, "cluster"))
    except InvalidArgument:  # without access control a caller has no identity
        return
    viewer.identity, viewer.access_on = check.identity, check.access_on
