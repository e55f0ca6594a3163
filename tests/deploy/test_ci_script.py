"""What CI runs can't be green by skipping.

Goal: every program without which tests are skipped is there before they run, and new enough, or CI
fails and says which package is missing; and then skips are failures (`tests/test_skips.py`).
Method: the script with a PATH on which there is only what a test puts there.
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
}
NEW, OLD = "Client Version: v1.31.0", 'version.Info{Major:"1", Minor:"20", GitVersion:"v1.20.2"}'
VERBS = ("quick", "lint", "k8s", "test", "coverage", "pythons")
RUN = [f"make {verb} CI=true" for verb in VERBS]


class Machine:
    """One that has no more than the script itself needs, and a `make` that says its verb."""

    def __init__(self, folder: Path) -> None:
        self.programs = folder / "bin"
        self.servers = folder / "postgresql" / "99" / "bin"
        self.script = folder / "repo" / ".ci" / "run"
        for made in (self.programs, self.servers, self.script.parent):
            made.mkdir(parents=True)
        text = SCRIPT.read_text()
        assert text.count("/usr/lib/postgresql/") == 1
        self.script.write_text(text.replace("/usr/lib/postgresql", f"{folder}/postgresql"))
        for name in ("bash", "dirname", "env", "sort", "cat", "chmod"):
            found = shutil.which(name)
            assert found is not None
            (self.programs / name).symlink_to(found)
        self.has("make", 'echo "make $1 CI=$CI"')

    def has(self, name: str, text: str = "") -> None:
        """From now on."""
        self._write(self.programs / name, text)

    def has_all_but(self, *names: str) -> None:
        for name in PACKAGES:
            if name not in names:
                self.has(name, f"echo '{NEW}'")

    def can_install(self, **programs: Path) -> None:
        """`apt-get` knows the packages that bring these programs, and no other."""
        cases = "".join(
            f"{PACKAGES[name]}) cat {self.programs}/made >{at}; chmod +x {at};;\n"
            for name, at in programs.items()
        )
        self._write(self.programs / "made", f"echo '{NEW}'")
        text = 'echo "$*"\n[ "$1" = update ] && exit 0\nshift 3\n[ $# = 1 ] || exit 100\n'
        self.has("apt-get", f"{text}case $1 in\n{cases}*) exit 100\nesac")

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


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """The packages that a run asks for that did not even begin."""
    assert done.returncode == 1
    assert "make" not in done.stdout
    return done.stderr.partition("could not install them: ")[2].partition("\n")[0]


def test_program_that_is_missing_and_not_available_is_named_and_nothing_runs(
    machine: Machine,
) -> None:
    assert refused(machine.run()) == " ".join(sorted(set(PACKAGES.values())))


def test_missing_program_is_installed_first(machine: Machine) -> None:
    machine.has_all_but("openssl", "shellcheck")
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
    machine.has_all_but("kubectl", "openssl")
    machine.can_install(openssl=machine.programs / "openssl")
    assert refused(machine.run()) == "kubectl"


def test_old_kubectl_counts_as_missing(machine: Machine) -> None:
    machine.has_all_but()
    machine.has("kubectl", f"echo '{OLD}'")
    assert refused(machine.run()) == "kubectl"


def test_postgresql_server_is_found_in_the_folder_of_debian(machine: Machine) -> None:
    machine.has_all_but("postgres", "initdb")
    (machine.servers / "initdb").symlink_to(machine.programs / "openssl")
    machine.can_install(postgres=machine.servers / "postgres")
    machine.has("make", "command -v postgres")
    done = machine.run()
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(machine.servers / "postgres")


def test_nothing_is_installed_if_every_program_exists(machine: Machine) -> None:
    machine.has_all_but()
    assert machine.run().stdout.splitlines() == RUN


def test_failing_verb_fails_the_script(machine: Machine) -> None:
    machine.has_all_but()
    machine.has("make", '[ "$1" != k8s ] && echo "$1"')
    done = machine.run()
    assert (done.returncode, done.stdout) == (1, "quick\nlint\n")


@pytest.mark.parametrize(("ci", "required"), [("CI=true", True), ("CI=", False)])
def test_skips_are_failures_if_ci_is_set(ci: str, required: bool) -> None:
    for verb in ("test", "k8s"):
        told = subprocess.run(
            ["make", "--dry-run", verb, ci],
            cwd=ROOT, check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
        assert (" --required" in told) is required


def test_documentation_names_the_packages() -> None:
    page = (ROOT / "docs" / "explanation" / "testing.md").read_text()
    told = page.partition("missing Debian packages (")[2].partition(")")[0]
    assert {name.strip("`") for name in told.split(", ")} == set(PACKAGES.values())
