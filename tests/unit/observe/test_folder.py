import os
from pathlib import Path

from nexar.observe.folder import read_folder


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
    found = read_folder(tmp_path, ".x", upper, 5)
    assert found.read == ("ONE", "TWO")
    assert found.unreadable.keys() == {"c.x", "d.x", "f.x"}
    assert (found.unreadable["c.x"], found.unreadable["d.x"]) == ("it is bad", "it is larger than 5 bytes")


def test_a_pipe_to_which_nobody_writes_holds_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.x")
    assert read_folder(tmp_path, ".x", upper, 5) == ((), {"pipe.x": "it is no regular file"})
