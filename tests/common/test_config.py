"""Goal: settings come from the named file and the prefixed variables only; errors are named.

Method: `load` with files and environments of the test; then a real service process, which ends with
one line about a misspelt or invalid setting.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import Field

from batonmq._process.config import ConfigError, Settings, load


class Lamp(Settings):
    """Settings of a fictional service."""

    node_id: str
    watts: int = Field(60, ge=1, le=1_000)
    host: str = "127.0.0.1"
    folder: Path = Path("lamps")


def lamp(tmp_path: Path, file: str = "", **env: str) -> Lamp:
    variables = {f"BATON_LAMP_{key.upper()}": value for key, value in env.items()}
    if file:
        path = tmp_path / "lamp.toml"
        path.write_text(file)
        variables["BATON_LAMP_CONFIG_FILE"] = str(path)
    return load(Lamp, "BATON_LAMP", variables)


def test_setting_that_is_not_given_has_its_default(tmp_path: Path) -> None:
    settings = lamp(tmp_path, node_id="a")
    assert (settings.watts, settings.folder, settings.log_level) == (60, Path("lamps"), "INFO")


def test_environment_takes_precedence_over_the_file(tmp_path: Path) -> None:
    settings = lamp(tmp_path, 'node_id = "file"\nwatts = 100\nfolder = "attic"', watts="40")
    assert (settings.node_id, settings.watts, settings.folder) == ("file", 40, Path("attic"))


def test_unknown_variable_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown variable BATON_LAMP_WATS"):
        lamp(tmp_path, node_id="a", wats="40")


def test_value_that_is_not_utf8_is_a_problem_of_its_variable(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="BATON_LAMP_HOST is not valid UTF-8"):
        lamp(tmp_path, node_id="a", host="\udcff")


def test_unknown_setting_in_the_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"lamp\.toml: unknown setting wats"):
        lamp(tmp_path, 'node_id = "a"\nwats = 40')


def test_all_unknown_names_are_reported_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown setting wats; unknown variable BATON_LAMP_HOTS"):
        lamp(tmp_path, 'node_id = "a"\nwats = 40', hots="x")


def test_missing_setting_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="BATON_LAMP_NODE_ID: Field required"):
        lamp(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [("watts", "bright"), ("watts", "0"), ("log_level", "loud"), ("log_format", "xml")],
)
def test_setting_with_an_invalid_value_is_named(tmp_path: Path, name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"BATON_LAMP_{name.upper()}: "):
        lamp(tmp_path, node_id="a", **{name: value})


@pytest.mark.parametrize(
    "content", [b"watts = ", b'folder = "\xff"'], ids=["not TOML", "not UTF-8"]
)
def test_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "lamp.toml").write_bytes(content)
    env = {"BATON_LAMP_CONFIG_FILE": str(tmp_path / "lamp.toml")}
    with pytest.raises(ConfigError, match=r"BATON_LAMP_CONFIG_FILE=.*lamp\.toml: "):
        load(Lamp, "BATON_LAMP", env)


def test_missing_file_is_named(tmp_path: Path) -> None:
    env = {"BATON_LAMP_CONFIG_FILE": str(tmp_path / "absent.toml")}
    with pytest.raises(ConfigError, match=r"absent\.toml: .*No such file"):
        load(Lamp, "BATON_LAMP", env)


def test_variables_without_the_prefix_are_ignored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOST", "elsewhere")
    monkeypatch.setenv("WATTS", "1")
    monkeypatch.setenv("BATON_LAMPSHADE_WATTS", "2")
    settings = lamp(tmp_path, node_id="a")
    assert (settings.host, settings.watts) == ("127.0.0.1", 60)


def test_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_LAMP_NODE_ID", "from-the-process")
    assert load(Lamp, "BATON_LAMP").node_id == "from-the-process"


def test_settings_are_frozen(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        lamp(tmp_path, node_id="a").watts = 5


# ---- a real process


def offsets(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m batonmq_server.offsets` to its end."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("BATON_")}  # noqa: TID251
    return subprocess.run(
        [sys.executable, "-m", "batonmq_server.offsets", *arguments],
        env=clean | {f"BATON_OFFSETS_{key.upper()}": value for key, value in env.items()},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


@pytest.mark.e2e
def test_print_config_shows_the_settings_and_starts_nothing(tmp_path: Path) -> None:
    file = tmp_path / "offsets.toml"
    file.write_text('port = 4000\nspan_max = 7\nlog_level = "debug"')
    ended = offsets(
        "--print-config", config_file=str(file), port="5000", data_dir=str(tmp_path / "data")
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    printed = json.loads(ended.stdout)
    assert (printed["port"], printed["span_max"], printed["log_level"]) == (5000, 7, "debug")
    assert printed["cluster"] == "baton", "defaults too"
    assert printed["data_dir"] == str(tmp_path / "data")
    assert not (tmp_path / "data").exists()


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("arguments", "env", "line"),
    [
        (
            (),
            {"data_dir": "d", "port": "x"},
            "offsets: BATON_OFFSETS_PORT: Input should be a valid",
        ),
        ((), {"data_dir": "d", "prot": "1"}, "offsets: unknown variable BATON_OFFSETS_PROT"),
        (("--print-config",), {}, "offsets: BATON_OFFSETS_DATA_DIR: Field required"),
        (
            ("--prnt",),
            {"data_dir": "d"},
            "usage: python -m batonmq_server.offsets [--print-config | --explain-config]",
        ),
    ],
    ids=["bad value", "unknown", "missing", "bad argument"],
)
def test_invalid_configuration_ends_the_process_with_one_line(
    arguments: tuple[str, ...], env: dict[str, str], line: str
) -> None:
    ended = offsets(*arguments, **env)
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert ended.stderr.startswith(line)
    assert ended.stderr.count("\n") == 1


@pytest.mark.e2e
def test_help_needs_no_valid_configuration() -> None:
    ended = offsets("--help")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("usage: python -m batonmq_server.offsets [--print-config")
