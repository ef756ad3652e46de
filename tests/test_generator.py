"""Generated blocks: nothing wrong is ever fused, what is right is, and every refusal says why."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from moe_inductor.report import report, reset
from tests.generator import EACH, OF, UNREACHED, refusal_codes, summary
from tests.moe_changes import CHANGES, Kind
from tests.moe_oracle import Result, check, difference, fused_backend, hidden_states, plain, run
from tests.moe_samples import BY_NAME, Sample, sample
from tests.near_misses import NEAR_MISSES, Batched, Grouped, H, NearMiss, T

#: Of five seeds one is a positive, one is respelled and three are mutants.
SEEDS = range(150)
SAMPLE = {0, 1, 2, 3, 5, 6, 10, 11, 15, 16, 20, 21, 25, 30}
MUST_REFUSE = sorted(c.name for c in CHANGES if c.must_refuse)
RESPELLINGS = sorted(c.name for c in CHANGES if c.kind is Kind.RESPELLED)


@pytest.mark.parametrize("seed", [pytest.param(s, marks=[pytest.mark.sample] if s in SAMPLE else []) for s in SEEDS])
def test_generated_block_equals_eager_and_is_fused_exactly_where_it_may_be(seed: int) -> None:
    s = sample(seed)
    result = check(s, fused_backend())
    assert not result.error, f"{result.error}\n{s}\npython -m tests.generator --seed {seed}"


@pytest.mark.parametrize("name", RESPELLINGS)
def test_equivalent_spelling_is_fused(name: str) -> None:
    s = sample(11, name)
    s = Sample(s.config, (BY_NAME[name],))
    result = check(s, fused_backend())
    assert not result.error, f"{result.error}\n{s}"
    assert result.fused, f"refused with {result.codes}: {s}\npython -m tests.generator --change {name}"


def test_dynamo_captures_every_sample_in_one_graph() -> None:
    for seed in range(24):
        assert not check(sample(seed), plain, ours=False).error, sample(seed)


def test_every_proof_is_attacked_often_enough() -> None:
    attacks = Counter(c.attacks for seed in range(OF) for c in sample(seed).changes if c.kind is Kind.MUTANT)
    assert set(attacks) == {c.attacks for c in CHANGES if c.kind is Kind.MUTANT}
    assert min(attacks.values()) >= EACH, attacks


def test_summary_names_what_too_few_mutants_reach() -> None:
    results = [Result(i, "mutant", ("unsorted",), "order", 0, 1, ("order",), "") for i in range(OF)]
    report = summary(results)
    assert report["mutants_by_refusal_code"] == dict.fromkeys(refusal_codes() - UNREACHED, 0) | {"order": OF}
    assert "order" not in report["too_few"]
    assert report["too_few"]["mask"] == report["too_few"]["inverse"] == 0


@pytest.mark.parametrize("name", MUST_REFUSE)
def test_mutation_changes_what_is_computed(name: str) -> None:
    """Else refusing it would prove nothing. One of a few seeds suffices: a tie or an idle clamp may hide a change."""
    for seed in range(6):
        mutant = sample(seed, name)
        original = Sample(mutant.config, ())
        changed, unchanged = mutant.build(), original.build()
        x = hidden_states(mutant.config, mutant.config.T)
        if difference(run(changed, changed, x), run(unchanged, unchanged, x), None):
            return
        if BY_NAME[name].attacks == "interior" and len(changed(x)) > len(unchanged(x)):
            return
    pytest.fail(f"{name} computes the same as the block it mutates")


@pytest.mark.parametrize("name", RESPELLINGS)
def test_respelling_computes_the_same(name: str) -> None:
    mutant = sample(5, name)
    respelled, plain_block = Sample(mutant.config, (BY_NAME[name],)).build(), Sample(mutant.config, ()).build()
    x = hidden_states(mutant.config, mutant.config.T)
    ours, theirs = run(respelled, respelled, x), run(plain_block, plain_block, x)
    # two low-precision orders of the same sums: a few eps of the largest value
    for key, reference in theirs.items():
        value = ours[key]
        assert (value is None) == (reference is None), key
        if value is not None and reference is not None:
            bound = 16 * torch.finfo(value.dtype).eps * reference.abs().max().item()
            torch.testing.assert_close(value, reference, rtol=0, atol=bound, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("form", [Grouped, Batched])
def test_plain_form_is_fused(form: type[torch.nn.Module]) -> None:
    reset()
    torch.compile(form(), backend=fused_backend(), fullgraph=True)(torch.randn(T, H))
    assert [len(g.fused) for g in report().graphs] == [1], str(report())


@pytest.mark.parametrize("miss", NEAR_MISSES, ids=lambda m: f"{m.form}-{m.name}")
def test_near_miss_is_refused_in_words(miss: NearMiss) -> None:
    reset()
    module, args = miss.make(), miss.args()
    compiled = torch.compile(module, backend=fused_backend(), fullgraph=True, dynamic=miss.dynamic)
    torch.manual_seed(0)
    ours = compiled(*args)
    torch.manual_seed(0)
    assert torch.equal(ours, module(*args))
    assert not report().fused, str(report())
    assert report().refused
    for refusal in report().refused:
        assert all(word in refusal.why for word in miss.words), refusal.why
        file, _, line = refusal.where.rpartition(":")
        assert refusal.code not in ("", "internal"), refusal
        assert file.endswith(".py"), refusal
        assert line.isdigit(), refusal
