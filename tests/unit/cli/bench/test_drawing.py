import sys

import pytest

from nexar.cli.bench import drawing
from nexar.errors import UsageError


def test_this_interpreter_draws_if_it_has_matplotlib(monkeypatch, tmp_path):
    monkeypatch.setattr(drawing.importlib.util, "find_spec", lambda _: object())
    assert drawing.artist(tmp_path) == sys.executable


def test_another_one_draws_where_this_has_none(monkeypatch, tmp_path):
    monkeypatch.setattr(drawing.importlib.util, "find_spec", lambda _: None)
    (tmp_path / "gloo" / "bin").mkdir(parents=True)
    (tmp_path / "gloo" / "bin" / "python").touch()
    assert drawing.artist(tmp_path) == str(tmp_path / "gloo" / "bin" / "python")


def test_where_none_has_it_the_remedy_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(drawing.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match="pip install matplotlib"):
        drawing.artist(tmp_path)


def test_a_picture_that_was_not_drawn_is_an_error_with_the_reason(tmp_path):
    with pytest.raises(UsageError, match="Expecting value"):
        drawing.draw(sys.executable, "no json", tmp_path / "plot.png")
