import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexar.wire.join import MAX_JOIN_BYTES, MAX_STATUS_BYTES, StatusPageReply, encode_join
from nexar.wire.status import (
    MAX_PEERS,
    ROWS_PER_PAGE,
    PeerTraffic,
    StatusPage,
    StatusReport,
    StatusRow,
    decode_status_report,
    encode_status_report,
)
from nexar.wire.text import line
from tests.unit.wire.join_messages import bulletins

LONG = "\U0001f680" * 120
FULL = StatusReport(
    rank=2**20 - 1,
    epoch=2**60,
    host=LONG,
    operation=LONG,
    finished=LONG,
    waiting_for=tuple(range(16)),
    peers=tuple(PeerTraffic(2**19 + number, "quic+shm+tls", 2**60, 2**60) for number in range(MAX_PEERS)),
)


@given(bulletins)
def test_a_bulletin_comes_back_as_it_was(bulletin: StatusReport) -> None:
    assert decode_status_report(encode_status_report(bulletin)) == bulletin


@given(st.binary(max_size=300))
def test_what_is_no_bulletin_is_none_and_nobody_raises(body: bytes) -> None:
    found = decode_status_report(body)
    assert found is None or isinstance(found, StatusReport)


def test_the_largest_bulletin_fits_into_the_news() -> None:
    assert len(encode_status_report(FULL)) <= MAX_STATUS_BYTES


def test_a_page_full_of_the_largest_rows_a_member_can_make_fits_into_a_message_or_nobody_could_look() -> None:
    assert ROWS_PER_PAGE * (MAX_STATUS_BYTES + (4 << 10)) < MAX_JOIN_BYTES
    row = StatusRow(2**63, 2**20 - 1, "running", LONG, cause=LONG * 3, gone=1e9, heard=1e9, bulletin=FULL)
    assert len(encode_join(StatusPageReply(StatusPage("c" * 64, 1, rows=(row,) * ROWS_PER_PAGE)))) <= MAX_JOIN_BYTES


@pytest.mark.parametrize("text", ["two\nlines", "\x1b[31mred", "a\u2028b", "\x00", "a\u202eb", "a\u200bb"])
def test_a_text_with_more_than_one_line_is_refused_and_line_makes_it_one(text: str) -> None:
    body = msgspec.msgpack.encode({"rank": 0, "epoch": 1, "host": text})
    assert decode_status_report(body) is None
    assert decode_status_report(encode_status_report(StatusReport(0, 1, host=line(text)))) is not None


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e300, -1.0])
@pytest.mark.parametrize("field", ["began", "moved", "finished_ago", "seconds_waiting"])
def test_a_time_that_is_none_is_refused_for_it_could_not_be_shown_as_json(field: str, value: float) -> None:
    assert decode_status_report(msgspec.msgpack.encode({"rank": 0, "epoch": 1, field: value})) is None
    late = {"rank": 0, "epoch": 1, "late": [[0, value, 1.0, 0, 0.5]]}
    assert decode_status_report(msgspec.msgpack.encode(late)) is None
