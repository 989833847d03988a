import pytest

from nexar.transport import payload_table as inbox_module
from nexar.transport.base import CarrierLost, Redirected
from nexar.transport.payload_table import PayloadTable
from nexar.wire.frame import Frame, FrameKind


def chunk(transfer: int, offset: int, size: int) -> Frame:
    return Frame(kind=FrameKind.CHUNK, transfer=transfer, count=offset, body=size)


def receive(inbox: PayloadTable, frame: Frame, data: bytes, came_along: int = 0) -> int | None:
    """A chunk of which `came_along` bytes came with the header."""
    done = inbox.begin(frame, memoryview(data[:came_along]))
    while inbox.missing:
        rest = data[-inbox.missing :]
        place = inbox.destination()
        if place is not None:
            place[: len(rest)] = rest
        done = inbox.took(len(rest))
    return done


@pytest.mark.parametrize("came_along", [0, 1, 4])
def test_chunks_land_where_they_were_expected(came_along: int) -> None:
    inbox, memory = PayloadTable(), bytearray(10)
    inbox.expect(5, memoryview(memory)[1:9])
    assert receive(inbox, chunk(5, 0, 4), b"abcd", came_along) is None
    assert receive(inbox, chunk(5, 4, 4), b"efgh", came_along) == 5
    assert memory == b"\0abcdefgh\0"


def test_an_empty_payload_is_complete_with_its_empty_chunk() -> None:
    inbox = PayloadTable()
    inbox.expect(5, memoryview(bytearray()))
    assert receive(inbox, chunk(5, 0, 0), b"") == 5


def test_payloads_may_arrive_interleaved() -> None:
    inbox, one, two = PayloadTable(), bytearray(4), bytearray(2)
    inbox.expect(1, memoryview(one))
    inbox.expect(2, memoryview(two))
    assert receive(inbox, chunk(1, 0, 2), b"ab") is None
    assert receive(inbox, chunk(2, 0, 2), b"xy") == 2
    assert receive(inbox, chunk(1, 2, 2), b"cd") == 1
    assert (one, two) == (b"abcd", b"xy")


@pytest.mark.parametrize(
    "frame",
    [
        chunk(9, 0, 1),
        chunk(1, 1, 1),
        chunk(1, 0, 5),
        chunk(1, 0, 0),
        chunk(1, 0, (1 << 20) + 1),
        chunk(1, 2**63, 1),
    ],
    ids=["unknown", "gap", "too long", "empty", "above the limit", "far away"],
)
def test_a_chunk_that_was_not_expected_is_misbehaviour_and_touches_nothing(frame: Frame) -> None:
    inbox, memory = PayloadTable(), bytearray(4)
    inbox.expect(1, memoryview(memory))
    with pytest.raises(CarrierLost) as lost:
        inbox.begin(frame, memoryview(b"z" * min(frame.body, 4)))
    assert lost.value.misbehaved
    assert memory == bytes(4)


def test_a_payload_cannot_be_expected_twice_or_in_read_only_memory() -> None:
    inbox = PayloadTable()
    inbox.expect(1, memoryview(bytearray(4)))
    with pytest.raises(ValueError, match="expected already"):
        inbox.expect(1, memoryview(bytearray(4)))
    with pytest.raises(ValueError, match="read-only"):
        inbox.expect(2, memoryview(bytes(4)))


def test_a_redirected_payload_takes_along_what_has_arrived_and_frees_the_old_memory() -> None:
    inbox, old, new = PayloadTable(), bytearray(4), bytearray(4)
    inbox.expect(1, memoryview(old))
    receive(inbox, chunk(1, 0, 2), b"ab")
    assert inbox.redirect(1, memoryview(new)) is Redirected.MOVED
    old.clear()
    assert receive(inbox, chunk(1, 2, 2), b"cd") == 1
    assert new == b"abcd"


def test_a_payload_can_be_redirected_in_mid_chunk() -> None:
    inbox, old, new = PayloadTable(), bytearray(4), bytearray(4)
    inbox.expect(1, memoryview(old))
    inbox.begin(chunk(1, 0, 4), memoryview(b"ab"))
    inbox.redirect(1, memoryview(new))
    place = inbox.destination()
    assert place is not None
    place[:] = b"cd"
    assert inbox.took(2) == 1
    assert new == b"abcd"


def test_a_discarded_payload_is_swallowed_and_not_reported() -> None:
    inbox, memory = PayloadTable(), bytearray(4)
    inbox.expect(1, memoryview(memory))
    inbox.begin(chunk(1, 0, 4), memoryview(b"a"))
    assert inbox.redirect(1, None) is Redirected.MOVED
    memory.clear()
    assert inbox.destination() is None
    assert inbox.took(3) is None
    assert inbox.redirect(1, None) is Redirected.UNKNOWN
    inbox.expect(1, memoryview(bytearray(1)))


def test_a_payload_that_is_complete_or_unknown_cannot_be_redirected() -> None:
    inbox = PayloadTable()
    assert inbox.redirect(1, None) is Redirected.UNKNOWN
    inbox.expect(1, memoryview(bytearray(1)))
    receive(inbox, chunk(1, 0, 1), b"a")
    assert inbox.redirect(1, memoryview(bytearray(1))) is Redirected.COMPLETE
    inbox.expect(1, memoryview(bytearray(1)))
    assert inbox.redirect(1, None) is Redirected.MOVED


def test_a_cleared_inbox_holds_nothing() -> None:
    inbox, memory = PayloadTable(), bytearray(4)
    inbox.expect(1, memoryview(memory))
    inbox.expect(2, memoryview(bytearray(4)))
    inbox.redirect(2, None)
    inbox.begin(chunk(1, 0, 4), memoryview(b"ab"))
    inbox.clear()
    memory.clear()  # nobody holds a view of it
    assert inbox.missing == 0
    assert inbox.destination() is None
    assert [inbox.redirect(transfer, None) for transfer in (1, 2)] == [Redirected.UNKNOWN] * 2


def test_only_a_bounded_number_of_discarded_payloads_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox_module, "MAX_DISCARDED", 2)
    inbox = PayloadTable()
    for transfer in range(3):
        inbox.expect(transfer, memoryview(bytearray(4)))
        inbox.redirect(transfer, None)
    inbox.begin(chunk(2, 0, 4), memoryview(b""))
    with pytest.raises(CarrierLost, match="was not expected"):
        inbox.begin(chunk(0, 0, 4), memoryview(b""))
