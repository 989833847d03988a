"""A team of real processes under random kills: survivors agree on every result, and on how many rounds there were."""

from pathlib import Path

import pytest

from tests.processes.nexar_command import Nexar
from tests.processes.resilient_rank import doom
from tests.processes.scale import sized

RANK = Path(__file__).with_name("resilient_rank.py")
ROOT = Path(__file__).parents[2]
ROUNDS = 500


def rounds_of(folder: Path, size: int) -> list[list[str]]:
    return [(folder / f"rounds-{rank}").read_text().splitlines() for rank in range(size)]


def assert_right(line: str, number: int) -> None:
    """The sum of a round is that of its contributors, whole and in every element."""
    reported, lowest, highest, members = line.split()
    expected = sum(2 ** int(rank) for rank in members.split("+"))
    assert (int(reported), int(lowest), int(highest)) == (number, expected, expected), line


@pytest.mark.full
@pytest.mark.parametrize("transports", ["shm,tls", "tls"])
@pytest.mark.parametrize("seed", sized([1], [1, 2, 3, 4, 5]))
def test_survivors_of_random_kills_have_the_same_500_rounds(transports: str, seed: int, tmp_path: Path) -> None:
    size, losses = 6, 3
    arguments = ("run", "-n", size, "--on-failure", "continue", RANK, ROUNDS, seed, losses)
    with Nexar(*arguments, cwd=tmp_path, PYTHONPATH=str(ROOT), NEXAR_TRANSPORTS=transports) as running:
        assert running.end() == 0, running.stderr
    rounds, lost = rounds_of(tmp_path, size), doom(size, ROUNDS, seed, losses)
    survivors = [rounds[rank] for rank in range(size) if rank not in lost]
    assert [len(each) for each in survivors] == [ROUNDS] * (size - losses)
    assert all(each == survivors[0] for each in survivors)
    for number, line in enumerate(survivors[0]):
        assert_right(line, number)
    for rank in lost:  # what the dead had, the others have too
        assert rounds[rank] == survivors[0][: len(rounds[rank])]
    assert {line.split()[3].count("+") + 1 for line in survivors[0]} >= {size, size - losses}
