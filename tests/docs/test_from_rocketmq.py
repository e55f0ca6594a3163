"""Goal: the defaults and names that the page for RocketMQ users gives are those of the code.

Method: every `name=value` in a section about a settings class is compared with the class; every
argument and method on the page is looked up in the code.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

import batonmq
from batonmq import Consumer, Durability, Producer, ReceivedMessage, RetryLater, Suspend
from tools.docs.pages import ROOT, Page

PAGE = Page(
    Path("docs/how-to/from-rocketmq.md"),
    (ROOT / "docs" / "how-to" / "from-rocketmq.md").read_text(),
)
VALUES = {"Durability": Durability}


def section(heading: str) -> str:
    """Return the text below a heading, up to the next heading."""
    _, _, rest = PAGE.text.partition(f"{heading}\n")
    return re.split(r"^##", rest, maxsplit=1, flags=re.MULTILINE)[0]


@pytest.mark.parametrize("name", ["ProducerSettings", "ConsumerSettings"])
def test_defaults_are_those_of_the_code(name: str) -> None:
    kind = getattr(batonmq, name)
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    documented = re.findall(r"`(\w+)=([^`]+)`", section(f"### `{name}`"))
    assert len(documented) > 5
    for setting, value in documented:
        assert eval(value, VALUES) == defaults[setting], setting


@pytest.mark.parametrize(
    ("heading", "calls"),
    [
        ("## Sending", (Producer.send, Producer.submit, Producer.cancel)),
        ("## Receiving", (RetryLater, Suspend, batonmq.ConsumerSettings)),
    ],
)
def test_arguments_exist(heading: str, calls: tuple[object, ...]) -> None:
    arguments = re.findall(r"(\w+)=", "".join(re.findall(r"`([^`]*=[^`]*)`", section(heading))))
    known = {name for call in calls for name in inspect.signature(call).parameters}  # type: ignore[arg-type]
    assert len(arguments) > 3
    assert set(arguments) <= known


def test_methods_exist() -> None:
    objects = {"producer": Producer, "consumer": Consumer, "message": ReceivedMessage}
    methods = [
        (name, method)
        for code in PAGE.inline()
        for name, method in re.findall(r"(\w+)\.(\w+)", code)
        if name in objects
    ]
    assert len(methods) > 5
    assert [pair for pair in methods if not hasattr(objects[pair[0]], pair[1])] == []
