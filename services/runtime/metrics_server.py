"""The HTTP server of the Prometheus endpoint, with bounded connections."""

from __future__ import annotations

import logging
import socket
import threading
from http.server import ThreadingHTTPServer
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import MetricsHandler

SILENCE_S = 5.0
"""A connection that neither sends nor takes a byte for this long is closed."""

log = logging.getLogger(__name__)


class MetricsServer(ThreadingHTTPServer):
    """Serves the metrics of a registry; each connection has a thread until it ends.

    With more than `connections_max` connections the oldest one is closed: a scrape takes
    milliseconds, so the oldest is the one that holds its thread.

    Args:
        silence_s: Time without a byte after which a connection is closed, in seconds.
    """

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(
        self,
        host: str,
        port: int,
        registry: CollectorRegistry,
        connections_max: int,
        silence_s: float = SILENCE_S,
    ) -> None:
        handler = type("Handler", (MetricsHandler,), {"registry": registry, "timeout": silence_s})
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family = addresses[0][0]
        self._connections_max = connections_max
        self._open: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        try:
            super().__init__(addresses[0][4][:2], handler)  # type: ignore[arg-type]
        except OSError as error:
            where = f"{error.strerror}: metrics_port {host}:{port}"
            raise OSError(error.errno, where) from error

    @property
    def connection_count(self) -> int:
        """Number of open connections."""
        return len(self._open)

    def start(self) -> None:
        """Serve in a thread until `stop`."""
        threading.Thread(target=self.serve_forever, name="metrics", daemon=True).start()

    def stop(self) -> None:
        """Stop serving, and close the port."""
        self.shutdown()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start the thread of a connection; end the oldest connection if there are too many."""
        with self._lock:
            oldest = next(iter(self._open)) if len(self._open) >= self._connections_max else None
            if oldest is not None:
                del self._open[oldest]
                _end(oldest)  # its thread then reads the end of the connection and closes it
            self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection; its thread ends."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error of one connection; it does not concern the others."""
        log.debug("metrics not sent to=%s", client_address)


def _end(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it has ended by itself
