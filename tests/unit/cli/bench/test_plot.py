import pytest

from nexar.cli.bench import plot


class Recorded:
    """A library for drawing that only remembers."""

    def __init__(self):
        self.lines, self.saved = {}, None

    def use(self, name):
        pass

    def subplots(self, height, width, **kwargs):
        return self, [[self] * width]

    def plot(self, sizes, values, *, label, **kwargs):
        self.lines[label] = (sizes, values)

    def savefig(self, path, **kwargs):
        self.saved = path

    def __getattr__(self, name):
        return lambda *_, **__: None


def row(size, **busbw):
    figures = {system: {"busbw": value} for system, value in busbw.items()}
    return {"measure": "all_reduce", "size_bytes": size, "figures": figures}


def test_there_is_a_line_for_each_system_over_the_sizes_it_was_measured_at(monkeypatch):
    drawn = Recorded()
    monkeypatch.setattr(plot, "import_module", lambda _: drawn)
    plot.draw({"title": "", "rows": [row(8, nexar=1.0, gloo=0.5), row(16, nexar=2.0)]}, "out.png")
    assert drawn.lines == {"nexar": ((8, 16), (1.0, 2.0)), "gloo": ((8,), (0.5,))}
    assert drawn.saved == "out.png"


def test_what_has_no_size_cannot_be_drawn(monkeypatch):
    monkeypatch.setattr(plot, "import_module", lambda _: Recorded())
    with pytest.raises(SystemExit, match="has a size"):
        plot.draw({"title": "", "rows": [row(0, nexar=0.0)]}, "out.png")
