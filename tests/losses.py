"""Losses for tests that do not depend on how the loss was noticed."""

from nexar.cluster.decisions.membership_events import Loss, LossKind


def silent(text: str = "silence") -> Loss:
    return Loss(LossKind.NO_ANSWER, text)


def ended(text: str = "its process has ended") -> Loss:
    return Loss(LossKind.ENDED, text)


def left(text: str = "bye") -> Loss:
    return Loss(LossKind.LEFT, text)
