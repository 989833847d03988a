"""Where the chunks of a relayed payload land."""

import pytest

from nexar.links.relay.landing import Landings, Unexpected
from nexar.transport.base import Redirected
from nexar.wire.codec import encode_chunk
from nexar.wire.frame import Frame, decode


def chunk(transfer: int, offset: int, size: int) -> Frame:
    return decode(encode_chunk(transfer, offset, size), 0)


def test_chunks_land_one_behind_the_other() -> None:
    landings, into = Landings(), bytearray(5)
    landings.expect(1, memoryview(into))
    assert not landings.take(chunk(1, 0, 3), memoryview(b"abc"))
    assert landings.take(chunk(1, 3, 2), memoryview(b"de"))
    assert into == b"abcde"
    assert landings.bytes == 5
    assert landings.redirect(1, None) is Redirected.LANDED


def test_an_empty_payload_lands_at_once() -> None:
    landings = Landings()
    landings.expect(1, memoryview(bytearray()))
    assert landings.take(chunk(1, 0, 0), memoryview(b""))


def test_the_rest_lands_elsewhere_and_the_old_memory_is_free() -> None:
    landings, old, new = Landings(), bytearray(4), bytearray(4)
    landings.expect(1, memoryview(old))
    landings.take(chunk(1, 0, 2), memoryview(b"ab"))
    assert landings.redirect(1, memoryview(new)) is Redirected.MOVED
    assert landings.take(chunk(1, 2, 2), memoryview(b"cd"))
    assert old == b"ab\0\0"
    assert new == b"abcd"


def test_what_is_discarded_is_not_reported_and_harms_nobody() -> None:
    landings = Landings()
    landings.expect(1, memoryview(bytearray(4)))
    assert landings.redirect(1, None) is Redirected.MOVED
    assert not landings.take(chunk(1, 0, 4), memoryview(b"abcd"))
    assert landings.redirect(1, None) is Redirected.UNKNOWN


def test_what_nobody_expects_breaks_the_protocol() -> None:
    landings = Landings()
    with pytest.raises(Unexpected, match="nobody expects"):
        landings.take(chunk(1, 0, 1), memoryview(b"a"))
    landings.expect(1, memoryview(bytearray(2)))
    with pytest.raises(Unexpected, match="at byte 1"):
        landings.take(chunk(1, 1, 1), memoryview(b"a"))
    with pytest.raises(Unexpected):
        landings.take(chunk(1, 0, 3), memoryview(b"abc"))


def test_memory_that_cannot_be_written_or_is_expected_already_is_refused() -> None:
    landings = Landings()
    with pytest.raises(ValueError, match="read-only"):
        landings.expect(1, memoryview(b"abc"))
    landings.expect(1, memoryview(bytearray(1)))
    with pytest.raises(ValueError, match="already"):
        landings.expect(1, memoryview(bytearray(1)))


def test_what_has_stopped_writes_nothing() -> None:
    landings, into = Landings(), bytearray(1)
    landings.expect(1, memoryview(into))
    landings.stop()
    assert landings.redirect(1, None) is Redirected.UNKNOWN
