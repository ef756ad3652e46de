"""How a change of a sample is declared: which seam it replaces, what it attacks, where it applies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch

from tests.moe_block import BATCHED, GROUPED, Config, Step


class Kind(Enum):
    """What a change does to the meaning of a block."""

    MUTANT = "mutant"  # something else is computed: must stay equal to its own eager
    RESPELLED = "respelled"  # the same is computed: should be fused as before


@dataclass(frozen=True, slots=True)
class Change:
    """One edit of a sample's steps: ``seam``'s last step is replaced, or ``after`` it one is inserted."""

    name: str
    kind: Kind
    seam: str
    step: Step
    insert: bool
    forms: tuple[str, ...]
    needs: Callable[[Config], bool]
    attacks: str  #: the proof that must stop it; "meaning" where a correct rewrite of the changed block exists
    must_refuse: bool

    def applies(self, config: Config) -> bool:
        """Whether the change makes sense in a sample."""
        return config.form in self.forms and self.needs(config)

    def apply(self, steps: dict[str, list[Step]]) -> None:
        """Edit ``steps`` in place."""
        if self.insert:
            steps[self.seam].append(self.step)
        else:
            steps[self.seam][0] = self.step


CHANGES: list[Change] = []
ANY = GROUPED + BATCHED
#: Where rows are sorted by torch.sort, so that a changed sort is the only difference.
SORTED = ("grouped", "grouped_sentinel")
PLAIN = ("grouped", "grouped_argsort")


def always(config: Config) -> bool:
    return True


def gated(config: Config) -> bool:
    return config.gated


def halved(config: Config) -> bool:
    """Gate and up are contiguous halves."""
    return config.halves in ("gate_up", "up_gate")


def fp32(config: Config) -> bool:
    return config.dtype == torch.float32


def several(config: Config) -> bool:
    """More than one expert a token, else order and sums over K say nothing."""
    return config.K > 1


def inference(config: Config) -> bool:
    """No backward: autograd refuses a change in place of what it saved."""
    return not config.train


def biased(config: Config) -> bool:
    return config.bias


def _register(
    kind: Kind,
    seam: str,
    *,
    insert: bool,
    forms: tuple[str, ...],
    needs: Callable[[Config], bool],
    attacks: str,
    must_refuse: bool,
) -> Callable[[Step], Step]:
    def add(step: Step) -> Step:
        CHANGES.append(Change(step.__name__, kind, seam, step, insert, forms, needs, attacks, must_refuse))
        return step

    return add


def mutation(
    seam: str = "",
    *,
    after: str = "",
    attacks: str,
    forms: tuple[str, ...] = ANY,
    needs: Callable[[Config], bool] = always,
    must_refuse: bool = True,
) -> Callable[[Step], Step]:
    """Declare the decorated step as a mutation of ``seam``, or of what stands ``after`` it."""
    return _register(
        Kind.MUTANT,
        after or seam,
        insert=bool(after),
        forms=forms,
        needs=needs,
        attacks=attacks,
        must_refuse=must_refuse,
    )


def respelling(
    seam: str = "",
    *,
    after: str = "",
    forms: tuple[str, ...] = ANY,
    needs: Callable[[Config], bool] = always,
) -> Callable[[Step], Step]:
    """Declare the decorated step as another spelling of ``seam``, or of what stands ``after`` it."""
    return _register(
        Kind.RESPELLED,
        after or seam,
        insert=bool(after),
        forms=forms,
        needs=needs,
        attacks="",
        must_refuse=False,
    )
