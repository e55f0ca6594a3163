"""Goal: settings of the services are printed with their source, and a wrong setting is named.

Method: the command in this process, which starts the programs of the services; no cluster is up.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from batonmq.cli.config import parse_env
from batonmq.errors import InvalidArgument
from tests.cli.baton import baton


def test_values_are_printed_with_their_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "storage.toml"
    file.write_text("segment_bytes = 65536\nport = 5000\n")
    monkeypatch.setenv("BATON_STORAGE_PORT", "6000")
    env_file = tmp_path / "env"
    env_file.write_text("BATON_STORAGE_PORT=7000\n")
    arguments = ("config", "print", "storage", "--format", "json", "--file", str(file))
    settings = {setting["name"]: setting for setting in baton(*arguments).json}
    assert (settings["flush"]["value"], settings["flush"]["source"]) == ("fsync", "default")
    assert (settings["port"]["value"], settings["port"]["source"]) == ("5000", str(file))
    settings = {s["name"]: s for s in baton(*arguments, "--env-file", str(env_file)).json}
    assert (settings["port"]["value"], settings["port"]["source"]) == ("7000", "environment")
    assert (settings["segment_bytes"]["value"], settings["segment_bytes"]["unit"]) == (
        "65536",
        "bytes",
    )
    (own,) = baton("config", "explain", "storage.port", "--format", "json").json
    assert (own["value"], own["source"], own["default"]) == ("6000", "environment", "0")


def test_every_wrong_setting_is_named(tmp_path: Path) -> None:
    env_file = tmp_path / "env"
    env_file.write_text("BATON_STORAGE_FLUSH=never\nBATON_STORAGE_SPORT=1\nOTHER=x\n")
    arguments = ("config", "check", "storage", "--env-file", str(env_file))
    wrong = baton(*arguments, "--format", "json")
    assert wrong.code == 1
    places = [problem["source"] for problem in wrong.json["problems"]]
    assert places == ["BATON_STORAGE_SPORT", "BATON_STORAGE_FLUSH"]
    env_file.write_text("BATON_STORAGE_FLUSH=async\n")
    assert baton(*arguments).code == 0


def test_missing_setting_has_no_source(tmp_path: Path) -> None:
    env_file = tmp_path / "env"
    env_file.write_text("")
    rows = baton("config", "print", "offsets", "--env-file", str(env_file)).rows
    assert [row["SOURCE"] for row in rows if row["VARIABLE"] == "BATON_OFFSETS_DATA_DIR"] == [
        "missing"
    ]
    missing = baton("config", "check", "offsets", "--env-file", str(env_file))
    assert missing.code == 1
    assert "BATON_OFFSETS_DATA_DIR: Field required" in missing.out


def test_unknown_setting_exits_with_1() -> None:
    refused = baton("config", "explain", "colour")
    assert (refused.code, refused.out) == (1, "")
    assert "UNKNOWN_SETTING" in refused.err


def test_bad_env_file_is_named(tmp_path: Path) -> None:
    env_file = tmp_path / "env"
    env_file.write_text("A=1\nwhat\n")
    refused = baton("config", "check", "storage", "--env-file", str(env_file))
    assert refused.code == 1
    assert f"BAD_ENV_FILE: {env_file}: line 2" in refused.err


def test_env_files_are_read_like_those_of_docker() -> None:
    lines = ["# note", "", "A=1", "export B='x y'", 'C="=="', "D="]
    assert parse_env(lines) == {"A": "1", "B": "x y", "C": "==", "D": ""}
    with pytest.raises(InvalidArgument, match="line 1"):
        parse_env(["1A=2"])
