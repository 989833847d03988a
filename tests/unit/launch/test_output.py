import errno
import io
import os
from pathlib import Path

import pytest

from nexar.launch.output import Console, StreamOutput
from nexar.launch.plan import RankPlan


class Terminal(io.BytesIO):
    def isatty(self):
        return True


class Closed(io.BytesIO):
    def write(self, text):
        raise BrokenPipeError


@pytest.fixture
def plan():
    return RankPlan(rank=3, local_rank=1, command=("x",), environment={})


def written(kind, plan, *pieces, log_dir=None, shown=True):
    output = kind()
    console = Console({"stdout": output, "stderr": kind()})
    stream = StreamOutput(plan, "stdout", console if shown else None, log_dir)
    for piece in pieces:
        stream.feed(piece)
    stream.close()
    stream.close()
    return output.getvalue()


def test_each_line_begins_with_the_rank(plan):
    assert written(io.BytesIO, plan, b"a\nb", b"c\nd") == b"[rank 3] a\n[rank 3] bc\n[rank 3] d\n"


def test_only_a_terminal_gets_colour(plan):
    assert written(Terminal, plan, b"a\n") == b"\x1b[32m[rank 3] \x1b[0ma\n"


def test_the_file_gets_the_bytes_as_they_were(plan, tmp_path):
    assert written(io.BytesIO, plan, b"a\nb", log_dir=tmp_path, shown=False) == b""
    assert (tmp_path / "rank_3.stdout.log").read_bytes() == b"a\nb"


def test_the_last_output_is_kept_whether_or_not_it_is_shown(plan):
    stream = StreamOutput(plan, "stderr", None, None)
    stream.feed(b"last ")
    stream.feed(b"words")
    assert stream.tail() == "last words"


def test_a_reader_that_went_away_is_noticed_once(plan):
    console = Console({"stdout": Closed(), "stderr": io.BytesIO()})
    console.show(plan, "stdout", b"a\n")
    assert console.gone
    console.show(plan, "stdout", b"b\n")


class Full(io.BytesIO):
    def write(self, text):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_an_output_that_takes_no_more_is_reported_once_and_ends_the_showing(plan, caplog):
    console = Console({"stdout": Full(), "stderr": io.BytesIO()})
    console.show(plan, "stdout", b"a\n")
    console.show(plan, "stdout", b"b\n")
    assert console.gone
    assert caplog.messages == ["stdout cannot be written (No space left on device); stopping"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
def test_a_file_that_takes_no_more_ends_and_the_rank_goes_on(plan, tmp_path, caplog):
    log = tmp_path / "rank_3.stdout.log"
    log.symlink_to("/dev/full")
    assert written(io.BytesIO, plan, b"a\n", b"b\n", log_dir=tmp_path) == b"[rank 3] a\n[rank 3] b\n"
    assert caplog.messages == [f"cannot write {log} (No space left on device); rank 3 continues without it"]


def test_what_nobody_reads_any_more_is_not_written_again_at_the_end() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    output = os.fdopen(writer, "wb")
    console = Console({"stdout": output, "stderr": io.BytesIO()})
    console.write("stdout", b"y\n")
    assert console.gone
    output.close()  # as the interpreter does at its end: it would raise BrokenPipeError, and exit with 120


def test_a_stream_that_takes_a_part_at_a_time_gets_all(plan):
    class Unbuffered(io.BytesIO):
        def write(self, text):
            return super().write(bytes(text[:3]))

    assert written(Unbuffered, plan, b"a long line\n") == b"[rank 3] a long line\n"
