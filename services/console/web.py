"""Rules of HTTP that hold for every call: host names, headers, and the size of forms."""

from __future__ import annotations

from urllib.parse import parse_qsl, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

FORM_BYTES_MAX = 6 * 1024 * 1024
"""A message of 4 MiB, percent-encoded in part."""
FIELDS_MAX = 2_000
HEALTH = "/health"
"""Path that answers under every host name: probes and load balancers call by address, and the
answer contains nothing of the cluster."""
CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
HEADERS = {
    "content-security-policy": CSP,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


class FormTooLarge(Exception):
    """The body of a request is longer than the limit, or has too many fields."""


class Guard:
    """Refuses calls under foreign host names, and adds the headers of security.

    Args:
        hosts: Host names without port under which the console may be called.
        secure: Whether the console is served with TLS.
    """

    def __init__(self, app: ASGIApp, hosts: frozenset[str], secure: bool) -> None:
        self._app, self._hosts, self._secure = app, hosts, secure

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one call."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers[name] = value
                if self._secure:
                    headers["strict-transport-security"] = "max-age=31536000"
                if not scope["path"].startswith("/static/"):
                    headers.setdefault("cache-control", "no-store")
            await send(message)

        host = host_of(Headers(scope=scope).get("host", ""))
        if host not in self._hosts and scope["path"] != HEALTH:
            refusal = PlainTextResponse(
                "This console does not answer under this host name.\n"
                "Set BATON_CONSOLE_ALLOWED_HOSTS to the names under which browsers call it.\n",
                status_code=421,
            )
            await refusal(scope, receive, send_with_headers)
            return
        await self._app(scope, receive, send_with_headers)


def host_of(header: str) -> str:
    """Return the host of a Host header, without port and in lower case."""
    host = header.strip().lower()
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]


def is_foreign(request: Request) -> bool:
    """Return whether a browser says that another site has caused the call."""
    site = request.headers.get("sec-fetch-site", "")
    if site and site not in ("same-origin", "none"):
        return True
    origin = request.headers.get("origin", "")
    if not origin:
        return False
    return urlsplit(origin).netloc.lower() != request.headers.get("host", "").lower()


async def form_of(request: Request) -> dict[str, str]:
    """Return the fields of a form; of several fields with one name the last one.

    Raises:
        FormTooLarge: The body is too long, or has too many fields.
    """
    return dict(await fields_of(request))


async def fields_of(request: Request) -> list[tuple[str, str]]:
    """Return the fields of a form in order.

    Raises:
        FormTooLarge: As `form_of`.
    """
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > FORM_BYTES_MAX:
            raise FormTooLarge
    try:
        return parse_qsl(body.decode("ascii"), keep_blank_values=True, max_num_fields=FIELDS_MAX)
    except ValueError as error:
        raise FormTooLarge from error
