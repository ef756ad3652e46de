"""A fixed sample of the support table, its age, and the means by which it judges."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch._dynamo.backends.debugging import aot_eager

from tests import families, truth
from tests.cells import IMPLEMENTATIONS, Cell, Mode, Result, Status, run_cell
from tests.table import grid
from tests.table_text import Header, as_json, as_markdown

DOCS = Path(__file__).parent.parent / "docs"
MAX_AGE_DAYS = 60
#: Families that differ in router, gate function, layout, biases, weight or combine dtype, or post-expert norm.
SAMPLED = (
    "qwen3_moe", "qwen2_moe", "mixtral", "mixtral_jitter", "olmoe", "deepseek_v2", "deepseek_v2_group", "deepseek_v3",
    "deepseek_v4", "gpt_oss", "glm4_moe", "granitemoe", "granitemoehybrid", "phimoe", "phimoe_jitter", "ernie4_5_moe",
    "ernie4_5_vl_moe", "jamba", "lfm2_moe", "hunyuan_v1_moe", "hy_v3", "qwen3_next", "qwen3_vl_moe", "minimax",
    "minimax_m2", "minimax_m3_vl", "aria", "afmoe", "dots1", "nemotron_h", "openai_privacy_filter", "exaone_moe",
    "cohere2_moe", "laguna", "zaya", "inkling", "kolibri1", "muse_spark", "kimi_linear", "gemma4_experts",
)  # fmt: skip


def sample() -> list[Cell]:
    """40 cells, each family once; 7 is coprime to the 16 columns, so every column comes up two or three times."""
    columns = grid([""])
    return [Cell(name, *_column(columns[7 * i % len(columns)])) for i, name in enumerate(SAMPLED)]


def _column(cell: Cell) -> tuple[str, str, Mode]:
    return cell.implementation, cell.dtype, cell.mode


@pytest.mark.parametrize("cell", sample(), ids=str)
def test_block_is_fused_and_as_close_to_the_truth_as_eager(cell: Cell) -> None:
    if not families.available(cell.family):
        pytest.skip("not in this transformers")
    result = run_cell(cell, aot_eager)
    again = (
        f"python -m tests.table --families {cell.family} --implementations {cell.implementation}"
        f" --dtypes {cell.dtype} --modes {cell.mode.value}"
    )
    assert result.status is Status.FUSED, f"{result.status.value} [{result.code}] {result.why}\n{again}"


def test_sample_has_forty_cells_in_all_columns() -> None:
    cells = sample()
    assert len(cells) == len({c.family for c in cells}) == 40
    assert {c.column for c in cells} == {c.column for c in grid([""])}


def test_committed_table_is_recent() -> None:
    table = json.loads((DOCS / "support.json").read_text())
    made = datetime.date.fromisoformat(table["date"])
    age = (datetime.datetime.now(datetime.timezone.utc).date() - made).days
    assert age <= MAX_AGE_DAYS, f"docs/support.json is {age} days old: run `python -m tests.table` and commit docs/"


def test_committed_table_is_whole_and_nothing_in_it_is_wrong() -> None:
    table = json.loads((DOCS / "support.json").read_text())
    bad = [c for c in table["cells"] if c["status"] not in (Status.FUSED.value, Status.EAGER_FAILS.value)]
    assert not bad, bad[:3]
    assert len(table["cells"]) == 63 * len(IMPLEMENTATIONS) * 2 * len(Mode)
    assert f"Made on {table['date']} at commit {table['commit']}" in (DOCS / "support.md").read_text()


def _spoiled(spoil: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """An inner compiler whose graphs return something else."""

    def inner(gm: torch.fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        return lambda *args: tuple(spoil(o) for o in gm.forward(*args))

    return inner


def test_output_off_by_three_roundings_is_wrong() -> None:
    cell = Cell("qwen3_moe", "grouped_mm", "bf16", Mode.NO_GRAD)
    result = run_cell(cell, _spoiled(lambda y: y * (1 + 3 * torch.finfo(y.dtype).eps)))
    assert result.status is Status.WRONG and "output 0" in result.why


def test_gradient_that_eager_has_and_ours_has_not_is_wrong() -> None:
    cell = Cell("qwen3_moe", "grouped_mm", "fp32", Mode.TRAIN)
    result = run_cell(cell, _spoiled(lambda y: y.detach() + torch.zeros_like(y).requires_grad_()))
    assert result.status is Status.WRONG and "no gradient, unlike eager" in result.why


def test_family_without_implementations_is_not_in_this_form() -> None:
    assert run_cell(Cell("doge", "grouped_mm", "fp32", Mode.TRAIN)).status in (Status.NOTHING, Status.REFUSED)


def test_eager_failure_is_no_failure_of_ours() -> None:
    if not families.available("inkling2"):
        pytest.skip("not in this transformers")
    result = run_cell(Cell("inkling2", "grouped_mm", "bf16", Mode.TRAIN))
    assert result.status is Status.EAGER_FAILS and "dtype" in result.why


def test_truth_repeats_the_choice_and_its_gradient() -> None:
    """bf16 cannot tell 1 from 1 + 2**-10 and takes the first; float64 alone would take the second."""

    def run(x: torch.Tensor) -> torch.Tensor:
        value, index = (x + 2**-10 * torch.arange(3, dtype=x.dtype)).topk(1)
        return value * (1 + index)

    x = torch.ones(3, dtype=torch.bfloat16, requires_grad=True)
    with truth.Recorder() as recorder:
        low = run(x)
    exact = x.detach().double().requires_grad_()
    with truth.Exact(recorder.decisions):
        high = run(exact)
        high.backward()
    index = int(low.item()) - 1
    assert high.item() == (1 + index * 2**-10) * (1 + index)
    assert exact.grad is not None and exact.grad.tolist() == [(1.0 + index) * (i == index) for i in range(3)]


def test_truth_repeats_random_numbers_and_rounds_nowhere() -> None:
    x = torch.full((64,), 1 / 3)
    with truth.Recorder() as recorder:
        low = x.to(torch.bfloat16) * torch.empty_like(x).uniform_()
    with truth.Exact(recorder.decisions):
        high = x.double().to(torch.bfloat16) * torch.empty_like(x.double()).uniform_()
    assert high.dtype is torch.float64 and torch.allclose(high, low.double(), rtol=2**-8)


def test_truth_says_where_it_diverged() -> None:
    with truth.Recorder() as recorder:
        torch.rand(3).topk(2)
    with pytest.raises(truth.Diverged, match=r"aten.sort.default \(3,\).*aten.topk.default"):
        with truth.Exact(recorder.decisions[1:]):
            torch.arange(3.0).sort()


def test_cancelled_gradient_is_measured_by_its_terms() -> None:
    exact = {"grad big": torch.ones(8).double(), "grad cancels": torch.zeros(8).double()}
    noise = {"grad big": torch.ones(8), "grad cancels": torch.full((8,), 1e-9)}
    none = {"grad big": torch.ones(8), "grad cancels": torch.zeros(8)}
    assert truth.compare(noise, none, exact, torch.float32, terms=8).used < 1
    wrong = noise | {"grad cancels": torch.full((8,), 1e-6)}
    assert truth.compare(wrong, none, exact, torch.float32, terms=8).used > 1


def test_gradient_of_one_element_is_measured_by_the_terms_of_its_sum() -> None:
    """The scale of 512 terms whose sum happens to be 30 times smaller than their norm: bf16 cannot do better."""
    terms = torch.randn(512, dtype=torch.float64)
    terms -= terms.mean() - terms.norm() / 30 / 512

    def gradient(dtype: torch.dtype) -> torch.Tensor:
        scale = torch.ones(1, dtype=dtype, requires_grad=True)
        (terms.to(dtype) * scale).backward(torch.ones(512, dtype=dtype))
        assert scale.grad is not None
        return scale.grad

    with truth.Exact([]) as exact:
        true = gradient(torch.float64)
    norm = exact.summed(true)
    assert norm == float(terms.norm()) and abs(30 * float(true) / norm - 1) < 0.01
    good, bad = (true + c * torch.finfo(torch.bfloat16).eps * norm for c in (1.0, 4.0))
    luck = {"grad s": true.bfloat16()}
    for value, passes in ((gradient(torch.bfloat16), True), (good.bfloat16(), True), (bad.bfloat16(), False)):
        found = truth.compare(
            {"grad s": value}, luck, {"grad s": true}, torch.bfloat16, terms=512, summed={"grad s": norm}
        )
        assert (found.used < 1) == passes, found


def test_nan_is_wrong_wherever_it_stands() -> None:
    exact = {"output 0": torch.ones(2).double(), "output 1": torch.ones(2).double()}
    right = {"output 0": torch.ones(2), "output 1": torch.ones(2)}
    for name in exact:
        assert truth.compare(right | {name: torch.full((2,), torch.nan)}, right, exact, torch.float32, terms=2).used > 1


HEADER = Header("2030-01-02", "0123456789ab", False, "2.13.0", "5.24.0", "python -m tests.table")


def _results() -> list[Result]:
    fused, dynamic, bf16 = grid(["a"], implementations=["grouped_mm"], modes=[Mode.TRAIN, Mode.DYNAMIC])[:3]
    return [
        Result(fused, Status.FUSED, 1, 1, used=0.25, worst="grad x: off by 1e-7"),
        Result(dynamic, Status.REFUSED, code="combine", why="K is not fixed (moe.py:1)"),
        Result(bf16, Status.EAGER_FAILS, code="RuntimeError", why="no kernel"),
    ]


def test_page_lists_every_cell_that_is_not_fused_with_its_reason() -> None:
    rest = [Result(Cell("b", "grouped_mm", "fp32", Mode.TRAIN), Status.NOTHING, code="unseen", why="no matmul")]
    page = as_markdown(HEADER, _results(), rest, ["c"])
    assert_expected_inline(
        page[page.index("1 fused") :],
        """\
1 fused, 1 refused, 1 eager fails, 3 cells
closest to its bound, 0.25 of it: a grouped_mm fp32 train, grad x: off by 1e-7.

| family | grouped_mm fp32 train | grouped_mm fp32 dynamic | grouped_mm bf16 train |
|---|---|---|---|
| a | 1 | refused (combine) | eager fails (RuntimeError) |

## Cells that are not fused

* a: refused [combine], K is not fixed (moe.py:1). Met in grouped_mm fp32 dynamic.
* a: eager fails [RuntimeError], no kernel. Met in grouped_mm bf16 train.

## Families without an experts implementation to choose

* b: not in this form, nothing found [unseen], no matmul.

## Families that this transformers does not have

c.
""",
    )


def test_json_holds_the_cells_as_plain_values() -> None:
    table = json.loads(as_json(HEADER, _results(), [], []))
    assert table["counts"] == {"fused": 1, "refused": 1, "eager fails": 1}
    assert table["cells"][1]["mode"] == "dynamic" and table["cells"][1]["code"] == "combine"
