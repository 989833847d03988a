"""The shared memory: what is checked before it is believed, and that nothing of it stays."""

import fcntl
import os
from pathlib import Path

import pytest

from nexar.transport.shm.ring import RingCorrupt
from nexar.transport.shm.ring_frames import SegmentGeometry, attach_segment, create_segment

SMALL = SegmentGeometry(ring_bytes=1 << 14, chunk_bytes=4096, slots=2)


def test_both_sides_see_the_same_memory() -> None:
    dialer, descriptor = create_segment(SMALL)
    listener = attach_segment(descriptor)
    os.close(descriptor)
    dialer.write_nonce(b"d" * 32)
    listener.write_nonce(b"l" * 32)
    assert listener.read_nonce() == b"d" * 32
    assert dialer.read_nonce() == b"l" * 32
    assert dialer.writer.write(b"to the listener", (), 15)
    assert listener.reader.refresh()
    assert not dialer.reader.refresh()
    dialer.release()
    listener.release()


def test_it_cannot_be_truncated_by_anybody() -> None:
    segment, descriptor = create_segment(SMALL)
    for size in (0, SMALL.total_bytes + 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    segment.release()
    os.close(descriptor)


def test_all_its_memory_is_there_from_the_start() -> None:
    segment, descriptor = create_segment(SMALL)
    assert os.fstat(descriptor).st_blocks * 512 >= SMALL.total_bytes
    segment.release()
    os.close(descriptor)


def refuse(descriptor: int, words: str) -> None:
    with pytest.raises(RingCorrupt, match=words):
        attach_segment(descriptor)
    os.close(descriptor)


def memory_file(size: int, seals: int) -> int:
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.posix_fallocate(descriptor, 0, size)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


SEALED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def test_a_file_is_refused(tmp_path: Path) -> None:
    refuse(os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT), "not a memory segment")


def test_a_pipe_is_refused() -> None:
    reading, writing = os.pipe()
    os.close(writing)
    refuse(reading, "not a memory segment")


def test_memory_that_could_still_shrink_is_refused() -> None:
    refuse(memory_file(SMALL.total_bytes, fcntl.F_SEAL_GROW), "truncated")


def test_memory_of_another_size_than_it_says_is_refused() -> None:
    segment, other = create_segment(SMALL)
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.posix_fallocate(descriptor, 0, SMALL.total_bytes + 4096)
    os.pwrite(descriptor, bytes(segment.words[:3]), 0)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALED)
    refuse(descriptor, "its geometry needs")
    segment.release()
    os.close(other)


def test_memory_with_an_impossible_geometry_is_refused() -> None:
    refuse(memory_file(1 << 16, SEALED), "ring_bytes 0")


def test_memory_that_is_only_promised_is_refused() -> None:
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 1 << 30)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALED)
    refuse(descriptor, "allocated")


def maps() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:nexar" in line]


def test_a_released_segment_is_unmapped() -> None:
    segment, descriptor = create_segment(SMALL)
    os.close(descriptor)
    assert maps()
    segment.release()
    segment.release()
    assert not maps()


def test_a_view_that_somebody_kept_keeps_the_mapping_and_no_longer() -> None:
    segment, descriptor = create_segment(SMALL)
    os.close(descriptor)
    kept = segment.reader.data[:10]
    segment.release()
    assert maps()
    assert bytes(kept) == bytes(10)
    del kept
    assert not maps()


@pytest.mark.parametrize("wrong", [{"ring_bytes": 100_000}, {"ring_bytes": 1 << 30}, {"chunk_bytes": 1}, {"slots": 0}])
def test_a_geometry_the_arithmetic_cannot_hold_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="allowed"):
        SegmentGeometry(**wrong)
