"""The CI script fails if tests would be skipped because a program is missing.

Goal: before the tests run, every program that they need is installed and new enough; otherwise CI
fails and names the missing package. In CI a skipped test is a failure (`tests/test_skips.py`).
Method: the script runs with a PATH that has only the programs that a test puts there.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tools.docs.pages import ROOT

SCRIPT = ROOT / ".ci" / "run"
PACKAGES = {
    "prometheus": "prometheus",
    "promtool": "prometheus",
    "openssl": "openssl",
    "shellcheck": "shellcheck",
    "kubectl": "kubectl",
    "ip": "iproute2",
    "postgres": "postgresql",
    "initdb": "postgresql",
    "node": "nodejs",
    "npm": "npm",
    "chromium": "chromium",
}
NEW, OLD = "Client Version: v1.31.0", 'version.Info{Major:"1", Minor:"20", GitVersion:"v1.20.2"}'
VERBS = ("lint", "k8s", "test", "pythons")
RUN = [f"make {verb} CI=true" for verb in VERBS]


class Machine:
    """The programs that the script itself needs, and a `make` that prints its verb."""

    def __init__(self, folder: Path) -> None:
        self.programs = folder / "bin"
        self.servers = folder / "postgresql" / "99" / "bin"
        self.script = folder / "repo" / ".ci" / "run"
        for created in (self.programs, self.servers, self.script.parent):
            created.mkdir(parents=True)
        text = SCRIPT.read_text()
        assert text.count("/usr/lib/postgresql/") == 1
        self.script.write_text(text.replace("/usr/lib/postgresql", f"{folder}/postgresql"))
        for name in ("bash", "dirname", "env", "sort", "cat", "chmod"):
            program_path = shutil.which(name)
            assert program_path is not None
            (self.programs / name).symlink_to(program_path)
        self.add_program("make", 'echo "make $1 CI=$CI"')

    def add_program(self, name: str, text: str = "") -> None:
        """Put a bash script on the PATH; it replaces one with the same name."""
        self._write(self.programs / name, text)

    def add_all_programs_except(self, *names: str) -> None:
        for name in PACKAGES:
            if name not in names:
                self.add_program(name, f"echo '{NEW}'")

    def can_install(self, **programs: Path) -> None:
        """Add an `apt-get` that installs only these programs, each at its path."""
        cases = "".join(
            f"{PACKAGES[name]}) cat {self.programs}/made >{at}; chmod +x {at};;\n"
            for name, at in programs.items()
        )
        self._write(self.programs / "made", f"echo '{NEW}'")
        beginning = 'echo "$*"\n[ "$1" = update ] && exit 0\nshift 3\n[ $# = 1 ] || exit 100\n'
        self.add_program("apt-get", f"{beginning}case $1 in\n{cases}*) exit 100\nesac")

    def run(self) -> subprocess.CompletedProcess[str]:
        bash = self.programs / "bash"
        return subprocess.run(
            [bash, self.script],
            env={"PATH": str(self.programs)}, check=False, capture_output=True, text=True,
        )  # fmt: skip

    def _write(self, at: Path, text: str) -> None:
        at.write_text(f"#!{self.programs}/bash\n{text}\n")
        at.chmod(0o755)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def missing_packages(done: subprocess.CompletedProcess[str]) -> str:
    """Assert that no `make` verb ran; return the packages that the error names."""
    assert done.returncode == 1
    assert "make" not in done.stdout
    return done.stderr.partition("could not install them: ")[2].partition("\n")[0]


def test_program_that_is_missing_and_not_available_is_named_and_nothing_runs(
    machine: Machine,
) -> None:
    assert missing_packages(machine.run()) == " ".join(sorted(set(PACKAGES.values())))


def test_missing_program_is_installed_first(machine: Machine) -> None:
    machine.add_all_programs_except("openssl", "shellcheck")
    machine.can_install(
        openssl=machine.programs / "openssl", shellcheck=machine.programs / "shellcheck"
    )
    done = machine.run()
    assert done.returncode == 0, done.stderr
    installed = [
        f"install --yes --no-install-recommends {name}" for name in ("openssl", "shellcheck")
    ]
    assert done.stdout.splitlines() == ["update", *installed, *RUN]


def test_unavailable_package_does_not_prevent_installing_the_others(machine: Machine) -> None:
    machine.add_all_programs_except("kubectl", "openssl")
    machine.can_install(openssl=machine.programs / "openssl")
    assert missing_packages(machine.run()) == "kubectl"


def test_old_kubectl_counts_as_missing(machine: Machine) -> None:
    machine.add_all_programs_except()
    machine.add_program("kubectl", f"echo '{OLD}'")
    assert missing_packages(machine.run()) == "kubectl"


def test_postgresql_server_is_found_in_the_folder_of_debian(machine: Machine) -> None:
    machine.add_all_programs_except("postgres", "initdb")
    (machine.servers / "initdb").symlink_to(machine.programs / "openssl")
    machine.can_install(postgres=machine.servers / "postgres")
    machine.add_program("make", "command -v postgres")
    done = machine.run()
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(machine.servers / "postgres")


def test_nothing_is_installed_if_every_program_exists(machine: Machine) -> None:
    machine.add_all_programs_except()
    assert machine.run().stdout.splitlines() == RUN


def test_failing_verb_fails_the_script_after_the_others(machine: Machine) -> None:
    machine.add_all_programs_except()
    machine.add_program("make", '[ "$1" != k8s ] && echo "$1"')
    done = machine.run()
    assert (done.returncode, done.stdout) == (1, "lint\ntest\npythons\n")


@pytest.mark.parametrize(("ci", "required"), [("CI=true", True), ("CI=", False)])
def test_skips_are_failures_if_ci_is_set(ci: str, required: bool) -> None:
    for verb in ("test", "k8s"):
        commands = subprocess.run(
            ["make", "--dry-run", verb, ci],
            cwd=ROOT, check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
        assert (" --required" in commands) is required


def test_documentation_names_the_packages() -> None:
    page = (ROOT / "docs" / "explanation" / "testing.md").read_text()
    package_list = page.partition("missing Debian packages (")[2].partition(")")[0]
    assert {name.strip("`") for name in package_list.split(", ")} == set(PACKAGES.values())
