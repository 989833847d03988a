import os
import subprocess
import sys

import pytest

from nexar.collectives import arena_memory
from nexar.collectives.arena_memory import SLOT_BYTES, TOTAL_BYTES, Geometry, create_memory, open_memory


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 16, 64, 200])
def test_the_whole_is_bounded_whatever_the_number_of_ranks(size: int) -> None:
    geometry = Geometry.of(size)
    assert 0 < geometry.slot_bytes <= SLOT_BYTES
    assert geometry.total_bytes <= TOTAL_BYTES * 1.05


def test_what_one_writes_another_reads_and_no_name_is_left() -> None:
    before = set(os.listdir("/dev/shm"))
    made = create_memory(2)
    opened = open_memory(made.offer, 2)
    assert made.mapping is not None
    assert opened.mapping is not None
    made.mapping[5000] = 7
    assert opened.mapping[5000] == 7
    assert set(os.listdir("/dev/shm")) == before
    made.close()
    made.close()
    assert opened.mapping[5000] == 7
    opened.close()


def test_another_process_can_open_it_until_the_door_is_closed() -> None:
    made = create_memory(2)
    script = "import sys; from nexar.collectives.arena_memory import open_memory; open_memory(sys.argv[1], 2).close()"
    subprocess.run([sys.executable, "-c", script, made.offer], check=True, timeout=60)
    made.close_door()
    made.close_door()
    with pytest.raises(FileNotFoundError):
        open_memory(made.offer, 2)
    made.close()


def test_it_is_refused_with_another_size_or_nonce_and_where_it_is_something_else(tmp_path) -> None:  # type: ignore[no-untyped-def]
    made = create_memory(2)
    with pytest.raises(OSError, match="expected"):
        open_memory(made.offer, 3)
    process, descriptor, slot, nonce = made.offer.split()
    with pytest.raises(OSError, match="another segment"):
        open_memory(" ".join([process, descriptor, slot, "00" * (len(nonce) // 2)]), 2)
    with (tmp_path / "file").open("w+b") as file, pytest.raises(OSError, match="not a memory segment"):
        open_memory(f"{process} {file.fileno()} {slot} {nonce}", 2)
    made.close()


def test_where_memory_cannot_be_shared_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_memory, "missing_support", lambda: "this CPU cannot")
    with pytest.raises(OSError, match="this CPU cannot"):
        create_memory(2)
    with pytest.raises(OSError, match="this CPU cannot"):
        open_memory("1 2 3 4", 2)


def test_whoever_keeps_an_array_keeps_the_mapping() -> None:
    made = create_memory(1)
    kept = made.records()
    made.close()
    assert kept[0] == 0
    kept.release()
