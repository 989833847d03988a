import os
from pathlib import Path

import pytest

from nexar.collectives.dump import encode
from nexar.errors import UsageError
from nexar.observe.dumps import read_dumps
from tests.unit.observe.recorded import done, dump


def test_the_dumps_of_a_directory_are_read_in_the_order_in_which_they_were_written(tmp_path: Path) -> None:
    for rank, written in ((0, 3.0), (1, 1.0), (2, 2.0)):
        (tmp_path / f"rank-{rank}.json").write_bytes(encode(dump(rank, done(2), written=written)))
    (tmp_path / "rank-9.draft").write_bytes(b"half of it")
    found = read_dumps(tmp_path)
    assert [each.rank for each in found.dumps] == [1, 2, 0]
    assert found.unreadable == {}


def test_what_is_no_dump_is_told_and_does_not_hide_the_others(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(encode(dump(0)))
    (tmp_path / "b.json").write_text("{}")
    os.mkfifo(tmp_path / "pipe.json")
    found = read_dumps(tmp_path)
    assert [each.rank for each in found.dumps] == [0]
    assert "no dump" in found.unreadable["b.json"]


def test_nothing_to_read_is_said_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="NEXAR_DUMP_DIR"):
        read_dumps(tmp_path)
    (tmp_path / "b.json").write_text("{}")
    with pytest.raises(UsageError, match="1 files there are none"):
        read_dumps(tmp_path)
    with pytest.raises(UsageError, match="is no directory"):
        read_dumps(tmp_path / "b.json")
