import ml_dtypes
import numpy as np
import pytest

from nexar.arrays.compression.no_compression import NoCompression
from nexar.arrays.compression.terms import Terms


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_everything_travels_as_it_is(dtype: type) -> None:
    about = Terms(4, np.dtype(dtype), 0, feedback=False)
    array = np.array([1, -2, 0, 0.5], about.work)
    piece = NoCompression().compress(array, about)
    assert len(piece) == NoCompression().size_bytes(4, about.dtype) == 4 * about.dtype.itemsize
    back = NoCompression().decompress(piece, about)
    assert back.dtype == about.work
    assert back.tolist() == array.tolist()
    assert not any(np.may_share_memory(*pair) for pair in ((array, piece), (piece, back)))


def test_it_says_what_it_is() -> None:
    assert NoCompression().name == "NoCompression()"
    assert NoCompression.linear
