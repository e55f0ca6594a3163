"""Goal: a cut loses packets silently in the given directions until it is healed.

Method: pairs by name; then a process in a private network, in which one node serves and the others
and the hub connect to it. The network of the machine stays as it is.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.cluster import REPO
from tools.faults.network import both_ways, bridge, found_launcher, halves, ring

NAMES = ["a", "b", "c", "d", "e"]


def test_halves_are_cut_from_each_other_and_connected_inside() -> None:
    cut = halves(NAMES)
    assert cut == both_ways("ab", "cde")
    assert ("a", "b") not in cut
    assert ("c", "e") not in cut


def test_bridge_node_reaches_both_halves() -> None:
    cut = bridge(NAMES)
    assert cut == both_ways("bc", "de")


@pytest.mark.parametrize("count", range(3, 18))
def test_each_node_of_a_ring_reaches_a_different_majority(count: int) -> None:
    names = [f"{number}" for number in range(count)]
    cut = ring(names)
    seen = {one: frozenset(other for other in names if (one, other) not in cut) for one in names}
    assert all(len(group) > count / 2 for group in seen.values())
    assert {(b, a) for a, b in cut} == cut
    if count > 4:
        assert len(set(seen.values())) == count


SCRIPT = """
import asyncio, socket, subprocess
from tools.faults.network import HUB, Network, both_ways

network = Network()
launchers = {name: network.place(name).launcher for name in "abc"}
serve = "import socket; s = socket.create_server(('0.0.0.0', 9000)); print(flush=True)\\n"
server = subprocess.Popen(
    [*launchers["b"], "python3", "-c", serve + "while True: s.accept()"], stdout=subprocess.PIPE
)
server.stdout.readline()
ask = f"import socket; socket.create_connection(('{network.place('b').address}', 9000), 4)"


def reach():
    froms = {"a": launchers["a"], "c": launchers["c"], HUB: ()}
    asked = {
        name: subprocess.Popen([*launcher, "python3", "-c", ask], stderr=subprocess.PIPE, text=True)
        for name, launcher in froms.items()
    }
    found = []
    for name, process in asked.items():
        errors = process.communicate()[1]
        if process.returncode == 0:
            found.append(name)
        else:
            assert "timed out" in errors, errors  # not refused, not reset
    print("".join(name[0] for name in found) or "-")


async def main():
    reach()
    both = both_ways("a", "b")
    await network.cut(both)
    await network.cut({("b", HUB)})
    reach()
    await network.cut(both)
    await network.heal(both)
    reach()
    await network.heal(both)
    await network.heal({("b", HUB)})
    reach()
    network.unplug("b")
    reach()
    network.plug("b")
    reach()


asyncio.run(main())
server.kill()
server.wait()
"""


@pytest.mark.long
@pytest.mark.e2e
def test_packets_are_lost_during_a_cut() -> None:
    launcher = found_launcher()
    if not launcher:
        pytest.skip("NOT TESTED: no network of its own can be made here")
    before = subprocess.run(["ip", "link"], check=True, capture_output=True).stdout
    env = ["/usr/bin/env", f"PYTHONPATH={REPO}"]
    done = subprocess.run(
        [*launcher, *env, sys.executable, "-W", "ignore", "-c", SCRIPT],
        cwd=REPO, check=False, capture_output=True, text=True,
    )  # fmt: skip
    assert done.stderr == ""
    assert done.stdout.split() == ["ach", "c", "c", "ach", "-", "ach"]
    assert subprocess.run(["ip", "link"], check=True, capture_output=True).stdout == before
