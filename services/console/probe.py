"""`python -m batonmq_server.console.probe`: exit with 0 if the console of these settings answers.

The kubelet is not on the loopback address of a pod, so its probes run this program in the pod.
"""

from __future__ import annotations

import ssl
import sys
from http import HTTPStatus
from http.client import HTTPConnection, HTTPException, HTTPSConnection

from batonmq._process.config import ConfigError, load
from batonmq_server.console.config import PREFIX, ConsoleSettings

_TIMEOUT_S = 5
_ANY = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}


def problem_of(settings: ConsoleSettings) -> str:
    """Return why the console does not serve; empty if it does."""
    host = settings.host.strip("[]")
    connection = _connection(_ANY.get(host, host), settings)
    try:
        connection.request("GET", "/health")
        status = connection.getresponse().status
    except (OSError, HTTPException) as error:
        return f"{host}:{settings.port} does not answer: {error}"
    finally:
        connection.close()
    return "" if status == HTTPStatus.OK else f"{host}:{settings.port} answers with {status}"


def _connection(host: str, settings: ConsoleSettings) -> HTTPConnection:
    if not settings.tls_cert_file:
        return HTTPConnection(host, settings.port, timeout=_TIMEOUT_S)
    # The certificate has the names that browsers use, not the address in the pod.
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return HTTPSConnection(host, settings.port, timeout=_TIMEOUT_S, context=context)


def main() -> int:
    """Return the exit status of the program."""
    try:
        problem = problem_of(load(ConsoleSettings, PREFIX))
    except ConfigError as error:
        problem = str(error)
    if problem:
        print(f"console: {problem}", file=sys.stderr)
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
