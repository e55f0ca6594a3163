"""Goal: `make kind-up` damages no cluster; `make kind-test` ends, and passes only after checks.

Method: the scripts of deploy/k8s/scripts with a kubectl that answers like a cluster with faults.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tools.containers.pods import REPO

pytestmark = pytest.mark.timeout(180)

SENT = '{"sent": 9000, "handled": %s}'
WARNING = "a broker answers slowly"
RUNNING = {
    "*get pods --selector*": "echo pod/etcd-0; echo pod/storage-a-0",
    "*get job/*": "echo SuccessCriteriaMet Complete",
}


def traffic(lines: str) -> dict[str, str]:
    """Answers of a cluster without faults; the command `lines` prints the log of the traffic."""
    logs = {"*logs job/traffic": lines, "*logs job/traffic --tail 1": f"{{ {lines}; }} | tail -n 1"}
    return {**RUNNING, **logs}


class Machine:
    """A copy of `deploy`, and a PATH with a scripted kubectl and a `sleep` that returns at once."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._programs = folder, folder / "bin"
        shutil.copytree(REPO / "deploy", folder / "deploy")
        self._programs.mkdir()
        self._program("sleep", "exit 0")
        self._calls = folder / "calls"
        self._calls.touch()

    def set_answers(self, answers: Mapping[str, str]) -> None:
        """Install a kubectl that runs the command of the first pattern that matches its arguments.

        Without a match it prints nothing and succeeds. In a command, `$n` is the number of earlier
        calls that matched the same pattern.
        """
        cases = "\n".join(
            f"{pattern.replace(' ', chr(92) + ' ')})\n"
            f'n=$(cat "$0.{number}" 2>/dev/null || echo 0); echo $((n + 1)) >"$0.{number}"\n'
            f"{answer} ;;"
            for number, (pattern, answer) in enumerate(answers.items())
        )
        self._program("kubectl", f'echo "$*" >>{self._calls}\ncase "$*" in\n{cases}\nesac')

    def run(self, script: str, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self._folder / "deploy" / "k8s" / "scripts" / script, *words],
            env={"PATH": f"{self._programs}:/usr/local/bin:/usr/bin:/bin"},
            check=False,
            capture_output=True,
            text=True,
            timeout=150,
        )

    def make(self, verb: str) -> subprocess.CompletedProcess[str]:
        """Run the script of `make VERB-up` with a PATH that has only `dirname`."""
        (self._programs / "dirname").symlink_to("/usr/bin/dirname")
        return subprocess.run(
            ["/bin/bash", self._folder / "deploy" / verb / "up.sh"],
            env={"PATH": str(self._programs)},
            check=False,
            capture_output=True,
            text=True,
            timeout=150,
        )

    def call_count(self, words: str) -> int:
        """Return the number of kubectl calls whose arguments contain these words."""
        return sum(words in call for call in self._calls.read_text().splitlines())

    def _program(self, name: str, text: str) -> None:
        path = self._programs / name
        path.write_text(f"#!/usr/bin/env bash\n{text}\n")
        path.chmod(0o755)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize(("scheme", "overlay"), [("http", "kind-secure"), ("https", "minikube")])
def test_etcd_whose_addresses_would_change_is_not_modified(
    machine: Machine, scheme: str, overlay: str
) -> None:
    machine.set_answers({"*get statefulset etcd *": f"printf {scheme}"})
    done = machine.run("apply.sh", "there", overlay)
    assert done.returncode == 1
    assert f"delete the cluster first: make {overlay.partition('-')[0]}-down" in done.stderr
    assert (machine.call_count("apply"), machine.call_count("create")) == (0, 0)


@pytest.mark.parametrize(
    ("scheme", "overlay"),
    [("", "kind"), ("http", "kind"), ("", "kind-secure"), ("https", "kind-secure")],
)
def test_new_cluster_and_cluster_of_the_same_kind_are_applied(
    machine: Machine, scheme: str, overlay: str
) -> None:
    machine.set_answers({"*get statefulset etcd *": f"printf '{scheme}'"})
    done = machine.run("apply.sh", "there", overlay)
    assert (done.returncode, done.stderr) == (0, "")
    assert machine.call_count(f"apply -k deploy/k8s/overlays/{overlay}") == 1


@pytest.mark.parametrize(("verb", "program"), [("kind", "docker"), ("minikube", "minikube")])
def test_missing_program_is_named(machine: Machine, verb: str, program: str) -> None:
    done = machine.make(verb)
    assert (done.returncode, done.stdout) == (1, "")
    assert (
        done.stderr
        == f"{program} was not found; docs/how-to/deploy.md lists the required programs\n"
    )


@pytest.mark.parametrize("script", ["apply.sh", "test.sh", "apply-secrets.sh", "make-ca.sh"])
@pytest.mark.parametrize("words", [(), ("--help",)], ids=["nothing", "help"])
def test_script_without_arguments_prints_its_usage(
    machine: Machine, script: str, words: tuple[str, ...]
) -> None:
    machine.set_answers({})
    done = machine.run(script, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"{script} ")
    assert "unbound" not in done.stderr
    assert machine.call_count("") == 0


def test_handled_count_is_read_from_a_log_with_other_lines(machine: Machine) -> None:
    lines = f"echo '{SENT}'; echo '{WARNING}'" % "'$((n * 600))'"
    machine.set_answers(traffic(lines))
    done = machine.run("test.sh", "there", "kind")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("nothing lost, nothing twice.\n")
    assert machine.call_count("delete pod/") == 2


@pytest.mark.parametrize("handled", ["5000", ""], ids=["constant", "missing"])
def test_missing_message_flow_fails_the_script(machine: Machine, handled: str) -> None:
    """Also if the last line of the log is not a count the first time the script reads it."""
    count = f"echo '{SENT}'" % handled if handled else "true"
    lines = f"{count}; [ $((n % 2)) = 1 ] || echo '{WARNING}'"
    machine.set_answers(traffic(lines))
    done = machine.run("test.sh", "there", "kind")
    assert done.returncode == 1
    assert "fewer than 1000 messages were handled in 180 s" in done.stderr
    assert machine.call_count("delete pod/") == 0


def test_stall_time_is_read_from_a_log_with_other_lines(
    machine: Machine,
) -> None:
    since = "; ".join(f"echo '{SENT}'; echo '{WARNING}'" % n for n in (100, 200, 200, 200, 300))
    lines = f"echo '{SENT}'" % "'$((n * 600))'"
    machine.set_answers({"*--since-time*": since, **traffic(lines)})
    done = machine.run("test.sh", "there", "kind")
    line = r"^pod/etcd-0: ready again after \d+ s, nothing handled for 2 s$"
    assert re.search(line, done.stdout, re.MULTILINE), done.stdout


@pytest.mark.parametrize("state", ["", "Failed"], ids=["unfinished", "failed"])
def test_failed_job_ends_the_script_and_its_pod_is_shown(machine: Machine, state: str) -> None:
    machine.set_answers(
        {
            "*get job/demo *": f"echo '{state}'",
            "*wait job/demo *": "exit 1",
            "*describe pod* batonmq/job=demo*": "echo ErrImageNeverPull",
        }
    )
    done = machine.run("test.sh", "there", "kind")
    assert done.returncode == 1
    assert "ErrImageNeverPull" in done.stderr
    assert machine.call_count("logs job/traffic") == 0


def test_images_are_measured_with_the_modules_that_the_manifests_start() -> None:
    folders = (REPO / "deploy/k8s/base", REPO / "deploy/k8s/components/gateway")
    manifests = "".join(path.read_text() for one in folders for path in one.rglob("*.yaml"))
    started = set(re.findall(r"command: \[python, -m, ([\w.]+)\]", manifests))
    script = (REPO / "deploy/images/build.sh").read_text()
    services = re.findall(r"^for service in ([a-z ]+); do$", script, re.MULTILINE)
    modules = re.findall(r'python -m "([\w.]+)\.\$service"', script)
    assert {f"{one}.{each}" for one in modules for names in services for each in names.split()} == (
        started
    )
