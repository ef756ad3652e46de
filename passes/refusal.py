"""How a proof fails: the seams raise :class:`Refused`, and ``recognise`` turns it into a ``Reject`` value."""

from __future__ import annotations

from .values import Value


class Refused(Exception):
    """``why`` the value ``at`` is not what it should be; ``code`` names the proof."""

    def __init__(self, code: str, why: str, at: Value | None = None) -> None:
        super().__init__(why)
        self.code, self.why, self.at = code, why, at


def require(fact: object, code: str, why: str, at: Value | None = None) -> None:
    """Refuse unless ``fact`` holds."""
    if not fact:
        raise Refused(code, why, at)


def describe(value: Value) -> str:
    """``value`` for a person: its operation and shape."""
    name = value.args[0] if value.op == "opaque" else value.op
    return f"{name} [{', '.join(map(str, value.shape))}]"
