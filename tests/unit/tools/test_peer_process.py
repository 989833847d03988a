"""How the failure of a peer process reads."""

from nexar_tools.peer_process import PeerFailed


def test_a_failure_shows_what_happened_then_the_traceback_then_standard_error():
    failure = PeerFailed("it raised:", "Traceback …\nValueError: no\n", "a warning", 1)
    assert str(failure).splitlines() == [
        "it raised:",
        "Traceback …",
        "ValueError: no",
        "its standard error:",
        "a warning",
    ]
    assert (failure.traceback, failure.stderr, failure.exit_code) == ("Traceback …\nValueError: no\n", "a warning", 1)


def test_a_failure_without_details_is_one_line():
    assert str(PeerFailed("it is gone")) == "it is gone"
