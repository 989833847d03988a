"""What is sent or stored stays what it is, byte for byte, whatever is renamed or moved."""

import msgspec
import pytest

from nexar.wire.frame import Frame
from tests.architecture.golden.filling import Filler
from tests.architecture.golden.record import ADD, complaint, differences, golden, samples
from tests.architecture.golden.structs import KEYS, struct_samples, structs_of_the_package


def test_what_is_sent_or_stored_has_the_bytes_it_always_had():
    found = differences(golden(), samples())
    if found:
        pytest.fail(complaint(found), pytrace=False)


def test_everything_that_is_sent_or_stored_is_in_the_golden_file():
    missing = sorted(set(samples()) - set(golden()))
    assert not missing, f"new on the wire or on disk: {missing}; add it to the golden file with: {ADD}"


def test_every_struct_has_golden_bytes():
    missing = [f"{kind.__module__}.{kind.__qualname__}" for kind in structs_of_the_package() if kind not in KEYS]
    assert not missing, (
        f"{missing}: give it a key in tests/architecture/golden/structs.py, with the functions that write and read it, "
        f"then: {ADD}"
    )
    entries = tuple(golden())
    assert all(any(entry.startswith(key) for entry in entries) for key in KEYS.values())


def test_every_struct_is_read_as_it_was_written():
    for sample in struct_samples():
        assert sample.codec.decode(sample.data) == sample.value, sample.key


def test_every_field_of_a_full_sample_differs_from_its_default():
    filler = Filler(KEYS)
    for kind in KEYS:
        if kind is not Frame:  # its samples are written by hand
            full = filler.full(kind)
            defaults = msgspec.inspect.type_info(kind).fields
            assert [field.name for field in defaults if getattr(full, field.name) == field.default] == [], kind


class _Map(msgspec.Struct):
    sent: int
    received: int


class _MapRenamed(msgspec.Struct):
    sent: int
    heard: int


class _MapRenamedButNotOnTheWire(msgspec.Struct):
    sent: int
    heard: int = msgspec.field(name="received")


class _Array(msgspec.Struct, array_like=True):
    sent: int
    received: int
    loud: bool = False
    quiet: bool = False


class _ArrayReordered(msgspec.Struct, array_like=True):
    received: int
    sent: int
    loud: bool = False
    quiet: bool = False


class _ArrayFlagsReordered(msgspec.Struct, array_like=True):
    sent: int
    received: int
    quiet: bool = False
    loud: bool = False


class _ArrayRenamed(msgspec.Struct, array_like=True):
    sent: int
    heard: int
    loud: bool = False
    quiet: bool = False


def _bytes_of(kind, first_names=None):
    filler = Filler({kind: "key"}, {"key": first_names or {}})
    values = {"": filler.full(kind), "defaults": filler.least(kind), **dict(filler.variants(kind))}
    return {words: msgspec.msgpack.encode(value) for words, value in values.items()}


def test_a_field_of_a_map_that_is_renamed_changes_its_bytes_unless_it_keeps_its_name_on_the_wire():
    assert _bytes_of(_MapRenamed) != _bytes_of(_Map)
    assert _bytes_of(_MapRenamedButNotOnTheWire) == _bytes_of(_Map)


@pytest.mark.parametrize("kind", [_ArrayReordered, _ArrayFlagsReordered])
def test_fields_of_one_type_that_change_places_in_an_array_change_its_bytes(kind):
    assert _bytes_of(kind) != _bytes_of(_Array)


def test_a_field_of_an_array_that_is_renamed_keeps_its_bytes_by_its_first_name():
    assert _bytes_of(_ArrayRenamed, {"heard": "received"}) == _bytes_of(_Array)
