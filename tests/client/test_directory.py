"""Goal: a directory without a nameserver is refused where it is made.

Method: directories made by hand; no call is sent.
"""

from __future__ import annotations

from random import Random

import pytest

from batonmq.admin import Admin
from batonmq.common.errors import InvalidArgument
from batonmq.directory import Directory


@pytest.mark.parametrize("nameserver", ["", " ", ",", " , ,"])
def test_list_without_an_address_is_refused(nameserver: str) -> None:
    with pytest.raises(InvalidArgument, match="names no nameserver") as refused:
        Directory(nameserver, Random(1))
    assert refused.value.facts == {"field": "nameserver"}
    with pytest.raises(InvalidArgument):
        Admin(nameserver)
