"""Goal: README and docs are true: lists, links, commands, names, section numbers.

Method: compare the pages with settings classes, registries, the Makefile, the command line, the
contracts and the file tree. Each check also detects a planted error.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

from batonmq._process.settings_help import meanings
from batonmq.cli.app import baton
from tools.docs import tables
from tools.docs.metric_families import families
from tools.docs.pages import ROOT, Page, broken_links, pages

PAGES = pages()
_each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
_ROCKETMQ = {
    "ASYNC_FLUSH", "CONSUME_FROM_LAST_OFFSET", "CONSUME_SUCCESS", "FLUSH_DISK_TIMEOUT",
    "RECONSUME_LATER", "SUSPEND_CURRENT_QUEUE_A_MOMENT",
}  # fmt: skip
"""Names of RocketMQ that pages mention."""
OPERATIONS = tables.DOCS / "reference" / "operations.md"
_SOURCES = ("services", "batonmq", "protos", "tests", "bench")


def page_of(text: str) -> Page:
    """Return a page in the root folder with this text."""
    return Page(Path("planted.md"), text)


# ---- lists of settings and metrics


@pytest.mark.parametrize("path", tables.PAGES, ids=lambda path: path.name)
def test_lists_of_settings_and_metrics_are_those_of_the_code(path: Path) -> None:
    page, generated_tables = path.read_text(), tables.PAGES[path]()
    assert sorted(tables.names_of(page)) == sorted(generated_tables), (
        "a table is missing or unknown"
    )
    assert page == tables.rewritten(page, generated_tables), "run: python -m tools.docs.tables"


def test_every_setting_has_a_meaning() -> None:
    for kind in tables.SETTINGS.values():
        assert kind.model_fields.keys() == meanings(kind).keys()


@pytest.mark.parametrize(
    "change", [("`BATON_STORAGE_FLUSH`", "`BATON_STORAGE_FLASH`"), ("| ", "|")]
)
def test_changed_row_is_found(change: tuple[str, str]) -> None:
    page = OPERATIONS.read_text()
    planted = page.replace(*change)
    assert planted != page
    assert tables.rewritten(planted, tables.settings()) != planted


def test_missing_row_is_found() -> None:
    page = OPERATIONS.read_text()
    planted = re.sub(r"\| `BATON_OFFSETS_SPAN_MAX`.*\n", "", page)
    assert planted != page
    assert "`BATON_OFFSETS_SPAN_MAX`" in tables.rewritten(planted, tables.settings())


# ---- links and paths


@_each_page
def test_links_are_not_broken(page: Page) -> None:
    assert broken_links(page) == []


def test_broken_link_is_found() -> None:
    planted = "[a](README.md) [b](docs/nothing.md) [c](README.md#no-such-heading) [d](https://x.y)"
    assert broken_links(page_of(planted)) == ["docs/nothing.md", "README.md#no-such-heading"]


def missing_paths(page: Page) -> list[str]:
    """Return the files and folders that the page names as code and that do not exist."""
    named = re.compile(rf"(?:{'|'.join((*_SOURCES, 'docs', 'gen'))})/[\w./-]*")
    return [
        code
        for code in page.inline()
        if named.fullmatch(code) and not (ROOT / code).exists() and "<" not in code
    ]


@_each_page
def test_named_files_exist(page: Page) -> None:
    assert missing_paths(page) == []


def test_missing_file_is_found() -> None:
    planted = "`services/storage/` `services/storage/serve.py` `batonmq/_core/`"
    assert missing_paths(page_of(planted)) == ["services/storage/serve.py"]


# ---- commands


def make_verbs() -> set[str]:
    """Return the targets of the Makefile."""
    return set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def unknown_verbs(page: Page) -> list[str]:
    """Return the `make` verbs of the page that do not exist."""
    shown = [v for code in page.code() for v in re.findall(r"(?:^|[$ ])make ([a-z0-9-]+)", code)]
    return [verb for verb in shown if verb not in make_verbs()]


@_each_page
def test_make_verbs_exist(page: Page) -> None:
    assert unknown_verbs(page) == []


def test_unknown_make_verb_is_found() -> None:
    assert unknown_verbs(page_of("`make demo` `make coffee`\n```\n$ make tea\n```")) == [
        "coffee",
        "tea",
    ]


def wrong_commands(page: Page) -> list[str]:
    """Return the lines with a `baton` command or option that does not exist."""
    wrong = []
    for code in page.code():
        for words in re.findall(r"(?:^|\| |\$ |bin/)baton((?: [^|]+)+)", code):
            problem = _problem(words.split())
            if problem:
                wrong.append(f"{code}: {problem}")
    return wrong


@cache
def _subcommand(group: click.Group, name: str) -> click.Command | None:
    return group.get_command(click.Context(group), name)


def _problem(words: list[str]) -> str:
    command: click.Command = baton
    options = _options(command)
    for word in words:
        if word.startswith("--"):
            if word.partition("=")[0] not in options:
                return f"no option {word}"
        elif isinstance(command, click.Group) and re.fullmatch("[a-z][a-z-]*", word):
            subcommand = _subcommand(command, word)
            if subcommand is None:
                return f"no command {word}"
            command = subcommand
            options |= _options(command)
    return ""


def _options(command: click.Command) -> set[str]:
    own = {option for parameter in command.params for option in parameter.opts}
    return own | {"--help"}


@_each_page
def test_baton_commands_exist(page: Page) -> None:
    assert wrong_commands(page) == []


def test_unknown_baton_command_is_found() -> None:
    planted = "`baton lock list --group g` `baton lock steal` `baton up --quiet`"
    planted += "\n```\n$ x | baton eat\n```"
    assert [problem.rpartition(": ")[2] for problem in wrong_commands(page_of(planted))] == [
        "no command steal",
        "no option --quiet",
        "no command eat",
    ]


def test_pages_contain_commands() -> None:
    shown = " ".join(code for page in PAGES for code in page.code())
    for command in ("make demo", "make test", "baton up", "baton topic create", "baton lock list"):
        assert command in shown


# ---- names of the code


@cache
def all_sources() -> str:
    """Return the text of all files that may define a name."""
    files: Iterator[Path] = (
        path
        for folder in _SOURCES
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".proto") and path != Path(__file__)
    )
    return "\n".join(path.read_text() for path in files)


@cache
def upper_case_names() -> str:
    """Return the names in upper case of all sources, separated by spaces."""
    return " ".join(set(re.findall("[A-Z_]+", all_sources())))


@cache
def environment_variables() -> set[str]:
    """Return the names of all environment variables that set something."""
    variables = {
        f"BATON_{service.upper()}_{name.upper()}"
        for service, kind in tables.SETTINGS.items()
        for name in (*kind.model_fields, "config_file")
    } | set(
        re.findall(r"`(BATON_(?:SPARK|CONSOLE|SCALER)_\w+)`", "".join(tables.settings().values()))
    )
    files = {"BATON_SPARK_CONFIG_FILE", "BATON_CONSOLE_CONFIG_FILE", "BATON_SCALER_CONFIG_FILE"}
    return variables | files | {str(option.envvar) for option in baton.params}


@cache
def metric_names() -> set[str]:
    """Return the names of all metrics."""
    return {family.name for group in families().values() for family in group}


def unknown_names(page: Page) -> list[str]:
    """Return the reasons, states, settings and metrics of the page that the code does not have."""
    unknown = []
    for code in page.inline():
        if re.fullmatch(r"BATON_[A-Z_]+_[A-Z_]+(=\w+)?", code) and "SYS" not in code:
            known = code.partition("=")[0] in environment_variables()
        elif re.fullmatch(r"baton_[a-z_]+", code):
            known = code in metric_names()
        elif re.fullmatch(r"[A-Z]{2,}(_[A-Z]+)+", code):
            known = code in upper_case_names() or code in _ROCKETMQ
        else:
            continue
        if not known:
            unknown.append(code)
    return unknown


def test_names_of_reasons_settings_and_metrics_exist() -> None:
    assert {page.name: unknown for page in PAGES if (unknown := unknown_names(page))} == {}


def test_unknown_name_is_found() -> None:
    planted = (
        "`NOT_LEADER` `NOT_READER` `BATON_STORAGE_PORT` `BATON_STORAGE_SPORT` `baton_rpc_call`"
    )
    assert unknown_names(page_of(planted)) == [
        "NOT_READER",
        "BATON_STORAGE_SPORT",
        "baton_rpc_call",
    ]


# ---- sections of the protocol


def sections() -> set[str]:
    """Return the numbers of all sections and points of docs/explanation/ownership.md."""
    parts = re.split(
        r"^## (\d+)\. .*$", (ROOT / "docs/explanation/ownership.md").read_text(), flags=re.M
    )
    section_numbers: set[str] = set()
    for number, body in zip(parts[1::2], parts[2::2], strict=True):
        section_numbers.add(number)
        section_numbers |= {f"{number}.{point}" for point in re.findall(r"^(\d+)\. ", body, re.M)}
    return section_numbers


def cited_sections(source: str) -> list[str]:
    """Return the numbers that follow "protocol", with or without "section"."""
    cited = re.findall(
        r"[Pp]rotocol,?\s+(?:sections?\s+)?(\d+(?:\.\d+)?(?:(?:, | to | and |-)\d+(?:\.\d+)?)*)",
        source,
    )
    return [number for numbers in cited for number in re.findall(r"\d+(?:\.\d+)?", numbers)]


def test_sections_are_numbered_without_gaps() -> None:
    numbers = sorted(int(number) for number in sections() if "." not in number)
    assert numbers == list(range(1, 18))


def test_cited_sections_exist() -> None:
    cited = set(cited_sections(all_sources()))
    assert len(cited) > 5
    assert cited - sections() == set()


def test_citation_is_found_in_every_form() -> None:
    text = "protocol section 9; (protocol 3, 6.8); (protocol, sections 6.3 to 6.5)"
    text += "; protocol 16, bounds"
    assert cited_sections(text) == ["9", "3", "6.8", "6.3", "6.5", "16"]


def test_stories_named_by_tests_exist() -> None:
    stories = {f"17.{int(n)}" for n in re.findall(r"test_story_(\d+)_", all_sources())}
    assert len(stories) > 10
    assert stories - sections() == set()
