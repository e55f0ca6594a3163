"""The services as programs: what they say of their settings.

Not an import: the command may be installed where services are not, and knows nothing of theirs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

SERVICES = ("storage", "offsets", "lockmgr", "nameserver")
_TIMEOUT_S = 60.0


def settings_of(service: str, given: Mapping[str, str] | None = None) -> dict[str, Any]:
    """`settings` and `problems` of a service, as `batonmq._process.settings_help` has them.

    Args:
        given: The variables it is to see; None for those of this process.

    Raises:
        OSError: it is not installed here, or can't tell.
    """
    env = dict(os.environ)  # noqa: TID251  handed on as a whole
    if given is not None:
        env = {name: value for name, value in env.items() if not name.startswith("BATON_")}
        env |= given
    command = [sys.executable, "-m", f"batonmq_server.{service}", "--explain-config"]
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        said = (error.stderr or "").strip() if isinstance(error.stderr, str) else ""
        reason = said.splitlines()[-1:] or [str(error)]
        raise OSError(f"the {service} service can't be asked here: {reason[0]}") from error
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def settings_of_services() -> dict[str, Any]:
    """The same of all, by name.

    Raises:
        OSError: as `settings_of`.
    """
    return {service: settings_of(service) for service in SERVICES}
