"""The settings of the services, as their programs report them.

The programs are started and not imported: `baton` may be installed without the services.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

SERVICES = ("storage", "offsets", "lockmgr", "nameserver", "gateway")
_TIMEOUT_S = 60.0
_FOLDER = "/"
"""Working directory of the programs: `python -m` imports from it, and here it finds nothing."""


def settings_of(service: str, given: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the `settings` and `problems` of a service; see `batonmq._process.settings_help`.

    Args:
        given: Environment variables of the service; None for those of this process.

    Raises:
        OSError: the service is not installed here, or did not answer.
    """
    env = dict(os.environ)  # noqa: TID251  the program inherits all of it
    if given is not None:
        env = {name: value for name, value in env.items() if not name.startswith("BATON_")}
        env |= given
    name = f"BATON_{service.upper()}_CONFIG_FILE"
    if env.get(name):
        env[name] = os.path.abspath(env[name])  # noqa: PTH100  it is relative to our folder
    command = [sys.executable, "-m", f"batonmq_server.{service}", "--explain-config"]
    try:
        done = subprocess.run(
            command,
            env=env,
            cwd=_FOLDER,
            capture_output=True,
            text=True,
            check=True,
            timeout=_TIMEOUT_S,
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        output = (error.stderr or "").strip() if isinstance(error.stderr, str) else ""
        reason = output.splitlines()[-1:] or [str(error)]
        raise OSError(f"can't read the settings of the {service} service: {reason[0]}") from error
    settings: dict[str, Any] = json.loads(done.stdout)
    return settings


def settings_of_services() -> dict[str, Any]:
    """Return the settings and problems of all services, by the name of the service.

    Raises:
        OSError: see `settings_of`.
    """
    return {service: settings_of(service) for service in SERVICES}
