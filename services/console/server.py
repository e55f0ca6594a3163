"""The process of the console: a web server with one application."""

from __future__ import annotations

import asyncio
import logging

import uvicorn

from batonmq._process import logs
from batonmq_server.console.app import make_console
from batonmq_server.console.config import ConsoleSettings

log = logging.getLogger(__name__)
STOP_S = 2
"""Time that open pages have to end after SIGTERM; their updates are endless."""
CONNECTIONS_MAX = 1_000


def serve(settings: ConsoleSettings) -> None:
    """Serve until SIGTERM or SIGINT."""
    logs.configure(settings.log_level, settings.log_format, service="console", node="console")
    asyncio.run(_serve(settings))


async def _serve(settings: ConsoleSettings) -> None:
    application = make_console(settings).application()
    await uvicorn.Server(server_config(application, settings)).serve()


def server_config(application: object, settings: ConsoleSettings) -> uvicorn.Config:
    """Return the configuration of the web server."""
    return uvicorn.Config(
        application,  # type: ignore[arg-type]
        host=settings.host,
        port=settings.port,
        http="h11",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        limit_concurrency=CONNECTIONS_MAX,
        timeout_graceful_shutdown=STOP_S,
        ssl_certfile=settings.tls_cert_file or None,
        ssl_keyfile=settings.tls_key_file or None,
    )
