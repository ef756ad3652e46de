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
    """One edit of a sample's steps: ``seam``'s first step is replaced, or one is added after its last."""

    name: str
    kind: Kind
    seam: str
    step: Step
    insert: bool
    also: tuple[tuple[str, Step], ...]  #: other seams whose first step is replaced
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
        for seam, step in self.also:
            steps[seam][0] = step


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


def bf16(config: Config) -> bool:
    return config.dtype == torch.bfloat16


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
    also: dict[str, Step],
    forms: tuple[str, ...],
    needs: Callable[[Config], bool],
    attacks: str,
    must_refuse: bool,
) -> Callable[[Step], Step]:
    def add(step: Step) -> Step:
        change = Change(
            step.__name__, kind, seam, step, insert, tuple(also.items()), forms, needs, attacks, must_refuse
        )
        CHANGES.append(change)
        return step

    return add


def mutation(
    seam: str = "",
    *,
    after: str = "",
    also: dict[str, Step] | None = None,
    attacks: str,
    forms: tuple[str, ...] = ANY,
    needs: Callable[[Config], bool] = always,
    must_refuse: bool = True,
) -> Callable[[Step], Step]:
    """Declare the decorated step as a mutation of ``seam``, or of what stands ``after`` it; ``also`` has the steps that
    the same mutation needs at other seams."""
    return _register(
        Kind.MUTANT,
        after or seam,
        insert=bool(after),
        also=also or {},
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
        also={},
        forms=forms,
        needs=needs,
        attacks="",
        must_refuse=False,
    )
