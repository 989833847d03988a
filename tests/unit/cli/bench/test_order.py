from nexar.cli.bench.order import Hello, Reply, parse_hello, parse_order, parse_reply
from tests.unit.cli.bench.orders import ORDER


def test_an_order_arrives_as_it_was_given():
    assert parse_order(ORDER.line()) == ORDER


def test_a_reply_arrives_as_it_was_given():
    reply = Reply(nanoseconds=(5, 7), wrong=1, problem="none")
    assert parse_reply(reply.line()) == reply


def test_a_hello_arrives_as_it_was_said():
    hello = Hello(rank=3, version="x 1.0")
    assert parse_hello(hello.line()) == hello


def test_each_of_them_is_one_line():
    for line in (ORDER.line(), Reply(problem="two\nlines").line(), Hello(rank=0, version="").line()):
        assert line.count(b"\n") == 1
        assert line.endswith(b"\n")
