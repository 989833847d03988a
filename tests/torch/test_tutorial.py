"""The tutorial is followed as it stands, where torch is."""

from tests.architecture import sessions
from tests.architecture.sources import ROOT


def test_a_reader_who_types_what_the_tutorial_says_sees_what_it_promises(tmp_path, monkeypatch):
    here = {words: reason for words, reason in sessions.NOT_RUN.items() if "torch is not" not in reason}
    monkeypatch.setattr(sessions, "NOT_RUN", here)
    sessions.Session(ROOT / "docs" / "tutorial" / "pytorch-ddp.md", tmp_path).follow()
