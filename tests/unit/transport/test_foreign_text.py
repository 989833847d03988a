from nexar.transport.foreign_text import one_line


def test_what_prints_stays() -> None:
    assert one_line("plain words, ünïcode too") == "plain words, ünïcode too"


def test_whatever_moves_the_cursor_or_begins_a_line_is_a_space() -> None:
    assert one_line("a\nb\x1b[2Jc\u2028d\u202ee") == "a b [2Jc d e"
