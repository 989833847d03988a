from nexar.transport.foreign_text import one_line, several_lines


def test_what_prints_stays() -> None:
    assert one_line("plain words, ünïcode too") == "plain words, ünïcode too"


def test_whatever_moves_the_cursor_or_begins_a_line_is_a_space() -> None:
    assert one_line("a\nb\x1b[2Jc\u2028d\u202ee") == "a b [2Jc d e"


def test_a_text_of_several_lines_keeps_them_and_nothing_else() -> None:
    assert several_lines("Traceback:\n  \x1b[31mred\x07\r\n\tend\n") == "Traceback:\n   [31mred  \n end\n"
    assert several_lines("plain, über") == "plain, über"
