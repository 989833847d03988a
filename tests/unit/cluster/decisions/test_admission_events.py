"""The vocabulary of admission is values: they compare by what they say, and nobody changes them on the way."""

from dataclasses import FrozenInstanceError, fields
from typing import get_args

import pytest

from nexar.cluster.decisions import admission_events
from nexar.cluster.decisions.admission_events import AdmissionAction, AdmissionEvent, AdmissionTick, ConnectionEnded

WORDS = [*get_args(AdmissionEvent), *get_args(AdmissionAction)]


def test_every_type_is_an_event_or_an_action() -> None:
    defined = {each for each in vars(admission_events).values() if getattr(each, "__module__", "").endswith("_events")}
    assert {each for each in defined if isinstance(each, type)} == set(WORDS)


@pytest.mark.parametrize("message", WORDS)
def test_events_and_actions_are_immutable(message: type) -> None:
    said = message(*(None for _ in fields(message)))
    with pytest.raises((FrozenInstanceError, TypeError)):
        said.connection = 1


def test_events_and_actions_compare_by_value() -> None:
    assert ConnectionEnded(1, "killed") == ConnectionEnded(1, "killed") != ConnectionEnded(2, "killed")
    assert AdmissionTick() == AdmissionTick()
