"""Goal: a context replaces options, options and variables win over it, and its file is safe.

Method: commands in this process on a file of the test; no cluster is up.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from batonmq.cli import context_file
from batonmq.cli.context_file import Context, ContextError, Contexts
from tests.cli.baton import CommandResult, baton


def _address(finished: CommandResult) -> str:
    """Return the nameserver that a command used: commas, which are rejected before a request."""
    assert finished.code == 1, finished
    _, _, rest = finished.err.partition("INVALID_ARGUMENT: '")
    return rest.partition("' is not an address of a nameserver")[0]


def test_first_context_is_in_use_until_another_is_chosen(contexts: Path) -> None:
    assert baton("context", "set", "dev", "--nameserver", ",").code == 0
    assert baton("context", "set", "prod", "--nameserver", ",,", "--by", "me").code == 0
    rows = baton("context", "list").rows
    assert [(row["CURRENT"], row["NAME"]) for row in rows] == [("*", "dev"), ("-", "prod")]
    assert _address(baton("topic", "list")) == ","
    assert baton("context", "use", "prod").code == 0
    assert _address(baton("topic", "list")) == ",,"
    assert baton("context", "show", "--format", "json").json == {
        "name": "prod", "current": True, "nameserver": ",,", "format": None, "by": "me",
        **dict.fromkeys(context_file.SECURITY),
    }  # fmt: skip
    assert baton("context", "delete", "prod").code == 0
    assert baton("context", "show").code == 1
    assert contexts.exists()


def test_option_wins_over_variable_and_variable_over_context(
    contexts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    baton("context", "set", "dev", "--nameserver", ",", "--format", "json")
    assert '"reason": "INVALID_ARGUMENT"' in baton("topic", "list").err
    assert "error: INVALID_ARGUMENT" in baton("topic", "list", "--format", "table").err
    monkeypatch.setenv("BATON_NAMESERVER", ",,")
    monkeypatch.setenv("BATON_FORMAT", "wide")
    assert _address(baton("topic", "list")) == ",,"
    assert _address(baton("--nameserver", ",,,", "topic", "list")) == ",,,"
    assert _address(baton("topic", "list", "--nameserver", ",,,,")) == ",,,,"


def test_context_is_chosen_for_one_command(contexts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    baton("context", "set", "dev", "--nameserver", ",")
    baton("context", "set", "prod", "--nameserver", ",,")
    assert _address(baton("--context", "prod", "topic", "list")) == ",,"
    monkeypatch.setenv("BATON_CONTEXT", "prod")
    assert _address(baton("topic", "list")) == ",,"
    unknown = baton("--context", "nobody", "topic", "list")
    assert (unknown.code, unknown.out) == (1, "")
    assert "context 'nobody' does not exist; existing: dev, prod" in unknown.err


def test_context_on_the_command_line_wins_over_variables(
    contexts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`baton --context prod topic delete` must not reach the cluster of a variable."""
    baton("context", "set", "prod", "--nameserver", ",", "--format", "json")
    baton("context", "set", "plain", "--by", "me")
    monkeypatch.setenv("BATON_NAMESERVER", ",,")
    monkeypatch.setenv("BATON_FORMAT", "table")
    named = baton("--context", "prod", "topic", "list")
    assert '"reason": "INVALID_ARGUMENT", "message": "\',\'' in named.err
    assert _address(baton("--context", "plain", "topic", "list")) == ",,"
    option = baton("--context", "prod", "--nameserver", ",,,", "--format", "table", "topic", "list")
    assert _address(option) == ",,,"
    monkeypatch.setenv("BATON_CONTEXT", "prod")
    assert _address(baton("topic", "list")) == ",,"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("current = 5", "current"),
        ("[contexts.a]\nnamserver = 'x:1'", "contexts.a.namserver"),
        ("[contexts.a]\nformat = 'xml'", "contexts.a.format"),
        ("[contexts.'a b']", "a b"),
        ("[", "key part"),
    ],
)
def test_invalid_file_is_rejected_with_the_field(contexts: Path, text: str, problem: str) -> None:
    contexts.write_text(text)
    for arguments in (("topic", "list"), ("context", "list"), ("context", "set", "b", "--by", "x")):
        refused = baton(*arguments)
        assert (refused.code, refused.out) == (1, "")
        assert str(contexts) in refused.err
        assert problem in refused.err
    assert contexts.read_text() == text


def test_missing_current_context_can_be_repaired(contexts: Path) -> None:
    contexts.write_text("current = 'gone'\n")
    assert baton("topic", "list").code == 1
    assert baton("context", "set", "new", "--nameserver", ",").code == 0
    assert _address(baton("topic", "list")) == ","


@pytest.mark.parametrize(
    "arguments",
    [
        ("set", "a b", "--by", "x"),
        ("set", "a", "--nameserver", "x y"),
        ("set", "a", "--by", "x\x07"),
        ("use", "nobody"),
        ("delete", "nobody"),
        ("show", "nobody"),
    ],
)
def test_invalid_change_leaves_the_file_alone(contexts: Path, arguments: tuple[str, ...]) -> None:
    assert baton("context", *arguments).code == 1
    assert not contexts.exists()


def test_set_without_options_exits_with_2(contexts: Path) -> None:
    assert baton("context", "set", "a").code == 2


def test_written_contexts_are_read_back_with_any_characters(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "config.toml"
    contexts = Contexts(
        "a-b_1",
        {"a-b_1": Context(nameserver="h:1,i:2", format="wide", by='C"\\ä😀'), "c": Context()},
    )
    context_file.write(path, contexts)
    assert context_file.read(path) == contexts
    context_file.write(path, contexts.without("a-b_1"))
    assert context_file.read(path) == Contexts("", {"c": Context()})
    assert [file.name for file in path.parent.iterdir()] == ["config.toml"]


def test_empty_value_removes_a_key() -> None:
    contexts = Contexts().with_changes("a", {"nameserver": "h:1", "by": "me"})
    assert contexts.with_changes("a", {"by": ""}).get("a") == Context(nameserver="h:1")


def test_unreadable_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ContextError):
        context_file.read(tmp_path)
