import pytest

from nexar.cli.config import _words


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "-"),
        (True, "true"),
        (2.5, "2.5"),
        (31_536_000.0, "31536000"),
        (("shm", "quic"), "shm,quic"),
        ("auto", "auto"),
        (7, "7"),
    ],
)
def test_values_are_shown_as_people_write_them(value, words):
    assert _words(value) == words
