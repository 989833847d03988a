import os
from pathlib import Path

from nexar.observe.rank_files import WorldNode, read_rank_files, world_ranks


def upper(content: bytes) -> str:
    if content == b"bad":
        raise ValueError("it is bad")
    return content.decode().upper()


def test_what_can_be_read_is_read_in_the_order_of_names_and_the_rest_is_named(tmp_path: Path) -> None:
    (tmp_path / "b.x").write_bytes(b"two")
    (tmp_path / "a.x").write_bytes(b"one")
    (tmp_path / "c.x").write_bytes(b"bad")
    (tmp_path / "d.x").write_bytes(b"longer than that")
    (tmp_path / "e.y").write_bytes(b"another")
    (tmp_path / "f.x").mkdir()
    found = read_rank_files(tmp_path, ".x", upper, 5)
    assert found.read == ("ONE", "TWO")
    assert found.unreadable.keys() == {"c.x", "d.x", "f.x"}
    assert (found.unreadable["c.x"], found.unreadable["d.x"]) == ("it is bad", "it is larger than 5 bytes")


def test_a_pipe_to_which_nobody_writes_holds_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.x")
    assert read_rank_files(tmp_path, ".x", upper, 5) == ((), {"pipe.x": "it is not a regular file"})


SEEN = [WorldNode(4, "b", 0), WorldNode(1, "a", 0), WorldNode(1, "b", 1), WorldNode(9, "c", 1)]


def test_what_counts_is_the_last_generation_of_the_world_up_to_that_one() -> None:
    assert world_ranks(SEEN, 3)["b"] == 1
    assert world_ranks(SEEN, 4)["b"] == 0
    assert world_ranks(SEEN, 20)["b"] == 0


def test_who_came_later_has_its_first_rank_and_who_is_gone_its_last() -> None:
    assert world_ranks([*SEEN, WorldNode(12, "c", 0)], 3) == {"a": 0, "b": 1, "c": 1}
    assert world_ranks(SEEN, 9)["a"] == 0


def test_nobody_seen_has_no_rank() -> None:
    assert world_ranks([], 1) == {}
