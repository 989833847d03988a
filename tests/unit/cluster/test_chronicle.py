import logging

import pytest

from nexar.cluster.chronicle import MAX_NOTES, Chronicle, describe_note
from nexar.cluster.decisions.admission_events import Note


def test_the_newest_notes_are_kept() -> None:
    chronicle = Chronicle()
    for number in range(MAX_NOTES + 3):
        chronicle.add(Note("knocked", f"10.0.0.1:{number}"))
    assert len(chronicle.notes) == MAX_NOTES
    assert chronicle.notes[0].address == "10.0.0.1:3"


def test_each_note_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "nexar.seed"):
        chronicle = Chronicle()
        chronicle.add(Note("refused", "10.0.0.1:7", 42, None, "because\nof this"))
        chronicle.add(Note("committed", reason="4 members"))
    assert [record.getMessage() for record in caplog.records] == [
        "refused: node 000000000000002a at 10.0.0.1:7: because of this",
        "committed: 4 members",
    ]
    assert caplog.records[0].levelno == logging.WARNING


def test_a_long_cause_is_shortened() -> None:
    assert len(describe_note(Note("child died", rank=3, reason="x" * 10_000))) == 500


def test_who_listens_is_told_and_may_fail(caplog: pytest.LogCaptureFixture) -> None:
    told: list[Note] = []

    def listen(note: Note) -> None:
        told.append(note)
        raise RuntimeError("a bug of theirs")

    chronicle = Chronicle(listen)
    chronicle.add(Note("knocked", "10.0.0.1:7"))
    chronicle.add(Note("failed"))
    assert told == chronicle.notes
    assert "a bug of theirs" in caplog.text


def test_strangers_without_a_name_make_no_warnings(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "nexar.seed"):
        Chronicle().add(Note("refused", "10.0.0.1:7", reason="it does not speak TLS"))
    assert caplog.records[0].levelno == logging.INFO


def test_a_stranger_that_is_refused_again_and_again_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    chronicle = Chronicle(clock=lambda: now)

    def warnings(count: int) -> int:
        caplog.clear()
        for number in range(count):
            chronicle.add(Note("refused", "10.0.0.1:7", number + 1, None, "it left"))
        return sum(record.levelno == logging.WARNING for record in caplog.records)

    with caplog.at_level(logging.DEBUG, "nexar.seed"):
        assert warnings(64) == 64  # ranks of one host with a wrong token
        assert warnings(1000) == 0
        now = 2.5
        assert warnings(1000) == 2
        now = 1000.0
        assert warnings(1000) == 64
