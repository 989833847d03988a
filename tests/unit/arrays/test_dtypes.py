import ml_dtypes
import numpy as np
import pytest

from nexar.arrays.dtypes import DTYPES, RAW, _kind_name, allowed, code_of, describe, dtype_of, is_supported, kind_of
from nexar.errors import UsageError

NAMES = [
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64",
    "complex64", "complex128", "bfloat16", "float8_e4m3fn", "float8_e5m2",
]  # fmt: skip


def test_numbers_on_the_wire_never_change() -> None:
    assert [str(dtype_of(code)) for code in range(1, 18)] == NAMES
    assert list(map(str, DTYPES)) == NAMES
    assert allowed() == ", ".join(NAMES)


@pytest.mark.parametrize("code", range(1, 18))
def test_a_dtype_and_its_number_belong_together(code: int) -> None:
    dtype = dtype_of(code)
    assert dtype is not None
    assert code_of(dtype) == code
    assert is_supported(dtype)


@pytest.mark.parametrize("code", [RAW, 18, 255])
def test_raw_and_unknown_numbers_have_no_dtype(code: int) -> None:
    assert dtype_of(code) is None


@pytest.mark.parametrize("dtype", ["O", ">f4", "U1", np.longdouble, "M8[s]"])
def test_what_cannot_travel_is_named(dtype: str) -> None:
    assert not is_supported(np.dtype(dtype))
    with pytest.raises(TypeError, match="cannot be sent"):
        code_of(np.dtype(dtype))
    with pytest.raises(UsageError, match=r"cannot be sent or reduced; allowed: bool, .*, in native byte order"):
        kind_of(np.dtype(dtype))


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        (np.bool_, "bool"),
        (np.uint8, "integer"),
        (np.int64, "integer"),
        (np.float16, "float"),
        (ml_dtypes.bfloat16, "float"),
        (ml_dtypes.float8_e5m2, "float"),
        (ml_dtypes.float8_e4m3fn, "float"),
        (np.complex64, "complex"),
    ],
)
def test_a_dtype_is_of_one_kind(dtype: type, kind: str) -> None:
    assert kind_of(np.dtype(dtype)) == kind


@pytest.mark.parametrize(
    ("dtype", "kind"), [(ml_dtypes.int4, "integer"), (ml_dtypes.uint4, "integer"), (ml_dtypes.bfloat16, "float")]
)
def test_integers_of_ml_dtypes_are_no_floats(dtype: type, kind: str) -> None:
    assert _kind_name(np.dtype(dtype)) == kind


def test_a_dtype_whose_kind_is_unknown_is_no_float() -> None:
    with pytest.raises(TypeError, match="neither an integer nor a float"):
        _kind_name(np.dtype("V2"))


def test_bytes_are_described_as_elements_where_they_are_some() -> None:
    assert describe(11, 16) == "float32[4]"
    assert describe(11, 15) == "15 bytes"
    assert describe(RAW, 8) == "8 bytes"
