import re
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nexar.wire.text import FEW_LINES, ONE_LINE, few_lines, foreign_line, foreign_lines, line


def test_what_prints_stays() -> None:
    assert foreign_line("plain words, ünïcode too") == "plain words, ünïcode too"


def test_whatever_moves_the_cursor_or_begins_a_line_is_a_space() -> None:
    assert foreign_line("a\nb\x1b[2Jc\u2028d\u202ee") == "a b [2Jc d e"


def test_a_text_of_several_lines_keeps_them_and_nothing_else() -> None:
    assert foreign_lines("Traceback:\n  \x1b[31mred\x07\r\n\tend\n") == "Traceback:\n   [31mred  \n end\n"
    assert foreign_lines("plain, über") == "plain, über"


HIDDEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def test_no_character_that_does_not_show_itself_has_a_place_in_a_line() -> None:
    everything = map(chr, range(sys.maxunicode + 1))
    hidden = [each for each in everything if unicodedata.category(each) in HIDDEN]
    assert [each for each in hidden if re.search(ONE_LINE, each)] == []
    assert set(line("".join(hidden), len(hidden))) == {" "}


def test_what_people_write_may_stand_there() -> None:
    for text in ("", "rank-3.example.org", "Zürich №3 機械 הפעלה", "a  b", "\U0001f680"):
        assert re.search(ONE_LINE, text)
        assert line(text) == text


@given(st.text(), st.integers(1, 50))
def test_whatever_it_was_it_becomes_one_short_line(text: str, most: int) -> None:
    found = line(text, most)
    assert re.search(ONE_LINE, found)
    assert len(found) <= most


def test_a_long_text_is_cut() -> None:
    assert line("x" * 500) == "x" * 119 + "…"
    assert line("short") == "short"


@pytest.mark.parametrize("text", ["a\u202eb", "a\u200bb", "a\ufeffb", "a\u2066b", "a\nb"])
def test_a_character_that_is_hidden_leaves_a_space(text: str) -> None:
    assert line(text) == "a b"
    assert not re.search(ONE_LINE, text)


@given(st.text(), st.integers(1, 50))
def test_whatever_it_was_it_becomes_a_few_short_lines(text: str, most: int) -> None:
    found = few_lines(text, most)
    assert re.search(FEW_LINES, found)
    assert len(found) <= most


def test_line_breaks_stay_and_other_hidden_characters_do_not() -> None:
    assert few_lines("a\nb\x1b[2Jc") == "a\nb [2Jc"
    assert not re.search(FEW_LINES, "a\rb")
