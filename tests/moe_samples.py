"""Samples by seed: random choices at every seam, and whose turn it is to be changed."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, fields

import torch

import tests.moe_mutations_experts
import tests.moe_mutations_region
import tests.moe_mutations_routing
import tests.moe_respellings  # noqa: F401  (the four register their changes)
from tests.moe_block import BATCHED, GROUPED, HAS_FALLBACK, Block, Config
from tests.moe_changes import CHANGES, Change, Kind
from tests.moe_forms import ACTIVATIONS, UNGATED, steps_of
from tests.moe_routers import ROUTERS

BY_NAME = {change.name: change for change in CHANGES}


@dataclass(frozen=True, slots=True)
class Sample:
    """A block to build: a config and the changes to it."""

    config: Config
    changes: tuple[Change, ...]

    @property
    def label(self) -> str:
        """positive, mutant or respelled."""
        return self.changes[0].kind.value if self.changes else "positive"

    @property
    def must_refuse(self) -> bool:
        """Whether no correct rewrite of the block exists in this version."""
        return any(change.must_refuse for change in self.changes)

    def build(self) -> Block:
        """The block with its seeded parameters."""
        steps = steps_of(self.config)
        for change in self.changes:
            change.apply(steps)
        return Block(self.config, tuple(step for seam in steps.values() for step in seam))

    def __str__(self) -> str:
        c = self.config
        values = " ".join(f"{f.name}={getattr(c, f.name)}" for f in fields(c))
        return f"{self.label} [{', '.join(change.name for change in self.changes)}] {values}"


def random_config(seed: int, rng: random.Random) -> Config:
    """A positive sample's choices; sizes are odd where the kernels of eager allow them."""
    form = rng.choice(GROUPED + BATCHED)
    bf16 = rng.random() < 0.5 or (form in GROUPED and not HAS_FALLBACK)
    aligned = bf16 and form in GROUPED  # torch._grouped_mm wants strides in multiples of 16 bytes
    router = rng.choice(list(ROUTERS))
    experts = rng.choice((4, 5, 6, 7, 8))
    top_k = 1 if router == "argmax_top1" else rng.choice((1, 2, 2, 3, 4 if rng.random() < 0.5 else 2))
    halves = rng.choice(("gate_up", "gate_up", "gate_up", "up_gate", "interleaved", "single"))
    train = rng.random() < 0.8
    return Config(
        seed=seed,
        form=form,
        router=router,
        T=rng.choice((3, 5, 9, 13)),
        H=rng.choice((8, 16, 24) if aligned else (6, 9, 13, 16)),
        I=rng.choice((8, 16) if aligned else (5, 7, 12, 16)),
        E=experts,
        K=top_k,
        halves=halves,
        out_in=rng.random() < 0.6,
        bias=rng.random() < 0.3,
        activation=rng.choice(list(UNGATED if halves == "single" else ACTIVATIONS)),
        combine=rng.choice(("model", "wide", "rows_cast")),
        dtype=torch.bfloat16 if bf16 else torch.float32,
        shared=rng.choice(("none", "none", "plain", "gated", "inplace")),
        aux=rng.random() < 0.3,
        dynamic=rng.random() < 0.3,
        train=train,
        rank3=rng.random() < 0.3,
    )


def _config_for(change: Change, seed: int, rng: random.Random) -> Config:
    for _ in range(5000):
        config = random_config(seed, rng)
        if change.applies(config):
            return config
    raise LookupError(f"no config for {change.name}")


#: Of so many seeds in a row the first is a positive, the second is respelled, the others are mutants.
CYCLE = 5


def _turn(seed: int) -> Change | None:
    """What a seed changes. Mutants take the attacked proofs in rotation, and the mutations of each in turn, so that
    every proof is attacked the same number of times."""
    turn, place = divmod(seed, CYCLE)
    if place == 0:
        return None
    if place == 1:
        respellings = [c for c in CHANGES if c.kind is Kind.RESPELLED]
        return respellings[turn % len(respellings)]
    by_proof: dict[str, list[Change]] = defaultdict(list)
    for c in CHANGES:
        if c.kind is Kind.MUTANT:
            by_proof[c.attacks].append(c)
    turn = (CYCLE - 2) * turn + place - 2
    mutations = list(by_proof.values())[turn % len(by_proof)]
    return mutations[turn // len(by_proof) % len(mutations)]


def sample(seed: int, change: str | None = None) -> Sample:
    """The sample of a seed, or one of a named change."""
    rng = random.Random(seed)
    first = BY_NAME[change] if change is not None else _turn(seed)
    if first is None:
        return Sample(random_config(seed, rng), ())
    config = _config_for(first, seed, rng)
    changes = [first]
    if first.kind is Kind.RESPELLED:
        for other in rng.sample(CHANGES, k=len(CHANGES)):
            taken = {c.seam for c in changes}
            if len(changes) == 3 or rng.random() < 0.8:
                continue
            if other.kind is Kind.RESPELLED and other.applies(config) and other.seam not in taken:
                changes.append(other)
    return Sample(config, tuple(changes))
