import warnings
from collections.abc import Callable

import numpy as np
import pytest

from nexar.arrays import quiet as module
from nexar.arrays.quiet import quiet, quiet_ufunc

LARGEST = np.full(3, np.finfo(np.float32).max)


@pytest.fixture(params=["context", "errstate"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "errstate":
        monkeypatch.setattr(module, "_CONTEXT", None)


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize(
    "add", [lambda: quiet_ufunc(np.add), lambda: quiet(lambda out, left, right: np.add(left, right, out))]
)
def test_an_overflow_is_infinite_and_nobody_is_told(add: Callable[[], Callable[..., None]]) -> None:
    out = np.zeros_like(LARGEST)
    with np.errstate(all="raise"), warnings.catch_warnings(action="error"):
        add()(out, LARGEST, LARGEST)
    assert np.isposinf(out).all()


@pytest.mark.usefixtures("_way")
def test_the_callers_settings_stay_as_they_were() -> None:
    with np.errstate(over="raise", invalid="call"):
        before = np.geterr()
        quiet_ufunc(np.add)(np.zeros_like(LARGEST), LARGEST, LARGEST)
        assert np.geterr() == before


@pytest.mark.usefixtures("_way")
def test_a_quiet_call_may_be_made_within_another() -> None:
    out = np.zeros_like(LARGEST)
    quiet(quiet_ufunc(np.add))(out, LARGEST, LARGEST)
    assert np.isposinf(out).all()


@pytest.mark.usefixtures("_way")
def test_errors_that_are_no_arithmetic_come_out() -> None:
    with pytest.raises(ValueError, match="could not be broadcast"):
        quiet_ufunc(np.add)(np.zeros(3), np.zeros(2), np.zeros(3))
