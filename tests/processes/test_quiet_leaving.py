"""Ranks close and end, one after another: who does not need them is not disturbed, and the votes of the rest count."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from tests.processes.story import Story, causes

RANK = Path(__file__).with_name("leaving_rank.py")


class Parting(Story):
    """The ranks 0 and 1 talk to each other alone, until all that are left come together."""

    script = RANK

    def close(self, rank: int, others: Sequence[int]) -> None:
        """It closes and ends well, and the others' world has moved on without it."""
        (self.folder / f"close-{rank}").touch()
        assert self.ranks[rank].end() == 0, self.ranks[rank].stderr
        self.killed.add(rank)
        self.await_all(others, lambda other: self.world(other) == list(others), f"world without {rank}")

    def world(self, rank: int) -> list[int]:
        """Its newest membership."""
        adopted = self.reported(rank, "adopted")
        return adopted[-1]["ranks"] if adopted else list(range(self.size))

    def talk_more(self, times: int) -> None:
        before = {rank: len(self.reported(rank, "talked")) for rank in (0, 1)}
        self.await_all((0, 1), lambda rank: len(self.reported(rank, "talked")) >= before[rank] + times, "further talk")

    def come_together(self) -> None:
        (self.folder / "together").touch()

    def changes(self, ranks: Iterable[int]) -> list[dict[int, str]]:
        """Whom the first successor of each has lost, and why."""
        return [causes(self.reported(rank, "changed")[0]) for rank in ranks]


def test_who_does_not_need_who_closed_is_not_disturbed_and_the_votes_have_moved_on(tmp_path: Path) -> None:
    with Parting(tmp_path, 4) as story:
        story.close(3, [0, 1, 2])
        story.talk_more(10)
        for rank in (0, 1, 2):
            assert not story.reported(rank, "changed"), "no communicator has changed"
            assert not story.reported(rank, "raised")
        assert {line["world"] for rank in (0, 1) for line in story.reported(rank, "talked")} == {1}
        story.come_together()
        story.await_sum([0, 1, 2])
        assert story.changes([0, 1, 2]) == [{3: "it left"}] * 3
        story.kill(1)
        story.await_sum([0, 2])
        story.await_more([0, 2])
        story.finish()


@pytest.mark.full
def test_one_of_the_last_two_is_killed_and_the_other_goes_on_with_the_seed(tmp_path: Path) -> None:
    """Of five, three have closed: their votes would be missing for ever."""
    with Parting(tmp_path, 5) as story:
        left = [0, 1, 2, 3, 4]
        for rank in (4, 2, 3):
            left.remove(rank)
            story.close(rank, left)
        story.talk_more(2)
        story.come_together()
        story.await_sum([0, 1])
        assert story.changes([0, 1]) == [{2: "it left", 3: "it left", 4: "it left"}] * 2
        story.kill(0)
        story.await_sum([1])
        story.await_more([1])
        assert not story.reported(1, "raised"), "neither NoQuorum nor anything else"
        story.finish()
