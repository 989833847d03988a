"""Collectives between real processes: against NumPy over each transport and layout of hosts, long rows of them, large
ones, and Ctrl-C in the middle.
"""

from pathlib import Path
from typing import Any

import pytest

from tests.conformance.collectives.cases import CaseResult, wrong_results
from tests.processes.collectives_rank import GIB, sample
from tests.processes.launcher import EVENT_TIMEOUT
from tests.processes.nexar_command import Nexar, introductions
from tests.processes.scale import FULL, measured, schemes, sized
from tests.processes.test_link_huge import available_bytes

RANK = Path(__file__).with_name("collectives_rank.py")
ROOT = Path(__file__).parents[2]
LAYOUTS = ("3", "1+1+1", "2+1")
LONG = 500.0  # seconds for what is many or large
TRANSPORTS = {"shm": "shm,tls", "quic": "quic", "tls": "tls", "shm+quic": "shm,quic"}


def run(
    task: str, hosts: str, scheme: str, *numbers: object, folder: Path, patience: float = EVENT_TIMEOUT
) -> dict[int, Any]:
    """What each rank got."""
    size = sum(int(each) for each in hosts.split("+"))
    arguments = ("run", "-n", size, RANK, task, hosts, TRANSPORTS[scheme], *numbers)
    with Nexar(*arguments, cwd=folder, PYTHONPATH=str(ROOT), PYTHONWARNINGS="error") as running:
        found = introductions(running, patience=patience)
    return {rank: found[rank]["got"] for rank in range(size)}


# ---------------------------------------------------------------- right


def assert_right(hosts: str, scheme: str, folder: Path) -> dict[int, Any]:
    found = run("cases", hosts, scheme, folder=folder)
    judged = [[CaseResult(*each) for each in found[rank]["judged"]] for rank in sorted(found)]
    assert wrong_results(sample(len(found), hosts.count("+") + 1), judged) == []
    return found


@pytest.mark.parametrize("size", sized([4], [2, 4, 7]))
@schemes("shm")
def test_ranks_of_one_host_are_right_through_shared_memory(scheme: str, size: int, tmp_path: Path) -> None:
    found = assert_right(str(size), scheme, tmp_path)
    assert {(each["arena"], each["hosts"], "shm" in each["schemes"]) for each in found.values()} == {(True, 1, True)}


@pytest.mark.parametrize("hosts", sized(["1+1"], ["1+1", "1+1+1+1"]))
@schemes("quic", "tls")
def test_ranks_of_several_hosts_are_right_through_the_network(scheme: str, hosts: str, tmp_path: Path) -> None:
    found = assert_right(hosts, scheme, tmp_path)
    assert {(each["arena"], tuple(each["schemes"])) for each in found.values()} == {(False, (scheme,))}


@pytest.mark.parametrize("hosts", ["2+2", "2+1", "3+1"])
@schemes(*sized(["shm+quic"], ["shm+quic", "shm"]))
def test_ranks_of_several_hosts_are_right_on_two_levels(scheme: str, hosts: str, tmp_path: Path) -> None:
    found = assert_right(hosts, scheme, tmp_path)
    assert {each["hosts"] for each in found.values()} == {2}
    alone = {rank for rank, each in found.items() if not each["arena"]}
    assert alone == ({len(found) - 1} if hosts.endswith("+1") else set())


# ---------------------------------------------------------------- many


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("task", "count"), [("in_a_row", sized(3000, 100_000)), ("in_flight", sized(1000, 10_000))])
@schemes(*sized(["shm", "quic"], ["shm", "quic", "tls"]))
def test_many_small_ones_do_not_grow_or_slow_down(
    scheme: str, task: str, count: int, tmp_path: Path, record_property: Any
) -> None:
    found = run(task, "2" if scheme == "shm" else "1+1", scheme, count, folder=tmp_path, patience=LONG)
    medians = [round(each["median"] * 1e6, 1) for each in found.values()]
    ratios = [round(each["last"] / each["first"], 2) for each in found.values()]
    grown = [round(each["grown_mib"], 1) for each in found.values()]
    measured(record_property, scheme=scheme, task=task, count=count, microsecs=medians, slower=ratios, grown_mib=grown)
    assert max(grown) < 8
    if FULL:  # a tenth of few is over in milliseconds, in which anything may happen on a busy machine
        assert max(ratios) < 2


# ---------------------------------------------------------------- large


@pytest.mark.timeout(600)
@pytest.mark.parametrize("size", sized([3], [2, 3, 4, 7]))
@schemes(*sized(["shm", "quic"], ["shm", "quic", "tls"]))
def test_the_gradient_of_a_resnet_50_is_reduced(scheme: str, size: int, tmp_path: Path, record_property: Any) -> None:
    count = sized(2_555_703, 25_557_032)
    found = run(
        "large", str(size) if scheme == "shm" else "+".join("1" * size), scheme, count, folder=tmp_path, patience=LONG
    )
    measured(record_property, scheme=scheme, size=size, count=count, seconds=round(found[0]["seconds"], 3))
    assert [each["wrong"] for each in found.values()] == [0] * size


@pytest.mark.full
@pytest.mark.timeout(900)
@schemes(*sized(["tls"], ["shm", "quic", "tls"]))
def test_more_than_4_gib_are_reduced(scheme: str, tmp_path: Path, record_property: Any) -> None:
    size = sized(GIB // 16 + 5, 5 * GIB + 5)
    if available_bytes() < 3 * size:
        pytest.skip(f"needs {3 * size // GIB} GiB of free memory")
    found = run("huge", "2" if scheme == "shm" else "1+1", scheme, size, folder=tmp_path, patience=LONG)
    measured(record_property, scheme=scheme, size_bytes=size, seconds=round(found[0]["seconds"], 2))
    assert [each["wrong"] for each in found.values()] == [0, 0]


# ---------------------------------------------------------------- interrupted


@pytest.mark.parametrize("turn", range(sized(1, 3)))
@schemes("shm", "tls", "shm+quic")
def test_ctrl_c_ends_a_collective_at_once_and_the_others_are_notified(scheme: str, turn: int, tmp_path: Path) -> None:
    """The last rank, for whom the others wait, may have all that it needs when it comes."""
    hosts = LAYOUTS[(["shm", "tls", "shm+quic"].index(scheme) + turn) % 3]
    found = run("interrupted", hosts, scheme, folder=tmp_path)
    assert [found[rank]["said"] for rank in range(2)] == ["KeyboardInterrupt", "Cancelled by rank 0"]
    assert found[2]["said"] in {"Cancelled by rank 0", "the right result"}
    assert [each["after"] for each in found.values()] == [3, 3, 3]
    assert max(each["seconds"] for each in found.values()) < 10
