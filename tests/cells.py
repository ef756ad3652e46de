"""One cell of the support table: a family's block in one implementation, dtype and mode, fused and compared."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from moe_inductor.backend import with_inner
from moe_inductor.report import report, reset
from tests import families, truth
from tests.sizes import SIZES

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
IMPLEMENTATIONS = ("grouped_mm", "batched_mm")
#: Standard deviation of biases and of additive router corrections: large enough to change who is chosen.
BIAS = 0.05
#: Every rewrite is checked on numbers as well: "first" would not check again what passed in an earlier process, and a
#: table would depend on the cache that it was made beside.
OPTIONS = {"moe.strict": True, "moe.verify": "all"}


class Mode(Enum):
    """How the block is called. All but NO_GRAD record gradients."""

    TRAIN = "train"
    EVAL = "eval"
    DYNAMIC = "dynamic"  # training, compiled with dynamic=True and called with a second number of tokens too
    NO_GRAD = "no_grad"  # evaluation without gradients: the operator for inference


class Status(Enum):
    """What became of a cell."""

    FUSED = "fused"
    REFUSED = "refused"
    WRONG = "wrong"
    ERROR = "error"  # ours: the block compiles without us
    EAGER_FAILS = "eager fails"
    NOTHING = "nothing found"
    COMPILE_FAILS = "compile fails"  # torch.compile(backend="eager") does too


@dataclass(frozen=True, slots=True)
class Cell:
    """What to run. ``size`` is a name in ``SIZES``, ``seed`` decides weights, biases and inputs."""

    family: str
    implementation: str
    dtype: str
    mode: Mode
    size: str = "tiny"
    seed: int = 0

    @property
    def column(self) -> str:
        """The table's column."""
        return f"{self.implementation} {self.dtype} {self.mode.value}"

    def __str__(self) -> str:
        return f"{self.family} {self.column}"


@dataclass(frozen=True, slots=True)
class Result:
    """What happened. ``why`` is empty for a fused cell; ``used`` is the part of the error bound that was needed."""

    cell: Cell
    status: Status
    fused: int = 0
    compiles: int = 0
    code: str = ""
    why: str = ""
    used: float = 0.0
    worst: str = ""
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        place = {k: v for k, v in asdict(self.cell).items() if k not in ("size", "seed")}  # the same in every cell
        found = {"status": self.status.value, "fused": self.fused, "compiles": self.compiles}
        why = {} if self.status is Status.FUSED else {"code": self.code, "why": self.why}
        return place | {"mode": self.cell.mode.value} | found | {"bound_used": round(self.used, 3)} | why


Inner = Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]


def plain(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """An inner compiler that runs the graph as it is."""
    return gm.forward


def run_cell(cell: Cell, inner: Inner = plain) -> Result:
    """Run a cell with ``inner`` in Inductor's place. Never raises."""
    began = time.monotonic()
    try:
        result = _run(cell, inner)
    except Exception as e:
        result = Result(cell, Status.ERROR, code=_kind(e), why=_line(e))
    return replace(result, seconds=time.monotonic() - began)


def _run(cell: Cell, inner: Inner) -> Result:
    eager, hidden = _block(cell)
    batches = _batches(cell, hidden)
    references, decisions = [], []
    for inputs in batches:
        try:
            with truth.Recorder() as recorder:
                references.append(_values(eager, eager, inputs, cell))
        except Exception as e:
            return Result(cell, Status.EAGER_FAILS, code=_kind(e), why=_line(e))
        decisions.append(recorder.decisions)
    try:
        values = _compiled(cell, with_inner(inner), batches, OPTIONS)
    except Exception as e:
        status = Status.ERROR if _compiles(cell, batches) else Status.COMPILE_FAILS
        return Result(cell, status, code=_kind(e), why=_line(e))
    found = report()
    size = SIZES[cell.size]
    terms = max(size.hidden, size.inter, size.batch * size.tokens * size.top_k)
    fused, worst = len(found.fused), truth.Worst("", 0.0, 0.0, 1.0)
    try:
        for mine, theirs, made, inputs in zip(values, references, decisions, batches, strict=True):
            exact, summed = _truth(cell, inputs, made)
            new = truth.compare(mine, theirs, exact, DTYPES[cell.dtype], terms=terms, summed=summed)
            worst = new if new.used >= worst.used else worst
    except AssertionError as e:
        return Result(cell, Status.WRONG, fused, found.compiles, "structure", _line(e))
    result = Result(cell, Status.FUSED, fused, found.compiles, used=worst.used, worst=str(worst))
    if worst.used > 1:
        return replace(result, status=Status.WRONG, code="values", why=str(worst))
    if found.refused:
        first = found.refused[0]
        return replace(result, status=Status.REFUSED, code=first.code, why=f"{first.why} ({Path(first.where).name})")
    if not fused:
        return replace(
            result,
            status=Status.NOTHING,
            code="unseen",
            why=f"{found.compiles} graph(s) hold no expert matmul of a known form",
        )
    return result


def _block(cell: Cell, implementation: str | None = None) -> tuple[nn.Module, int]:
    block, hidden = families.build(
        cell.family,
        implementation or cell.implementation,
        DTYPES[cell.dtype],
        size=SIZES[cell.size],
        seed=cell.seed,
        bias_scale=BIAS,
    )
    return block.train(cell.mode in (Mode.TRAIN, Mode.DYNAMIC)), hidden


def _batches(cell: Cell, hidden: int) -> list[tuple[Tensor, ...]]:
    """The inputs of each call. One token is a constant to Dynamo, so a dynamic cell starts at two."""
    size = SIZES[cell.size]
    lengths = [max(size.tokens, 2), size.tokens + 3] if cell.mode is Mode.DYNAMIC else [size.tokens]
    torch.manual_seed(cell.seed + 1)
    return [families.inputs(cell.family, hidden, DTYPES[cell.dtype], T=n, size=size) for n in lengths]


def _values(
    call: Callable[..., Any], block: nn.Module, inputs: tuple[Tensor, ...], cell: Cell
) -> dict[str, Tensor | None]:
    """Every output, what the call left in its inputs, and every gradient for a fixed cotangent.

    The block sees a copy of each input, as inside a model: jitter changes it in place, which a leaf would not allow.
    """
    grad = cell.mode is not Mode.NO_GRAD
    block.zero_grad(set_to_none=True)
    leaves = [x.detach().requires_grad_(grad and x.is_floating_point()) for x in inputs]
    torch.manual_seed(cell.seed + 2)
    with torch.set_grad_enabled(grad):
        passed = [x * 1 if x.is_floating_point() else x for x in leaves]
        for x in passed:  # H, and K of the blocks that are given their routing: parameters of a model, not of a batch
            torch._dynamo.mark_static(x, x.dim() - 1)
        out = call(*passed)
    outputs = [o for o in tree_leaves(out) if isinstance(o, Tensor)]
    values: dict[str, Tensor | None] = {f"output {i}": o.detach() for i, o in enumerate(outputs)}
    values |= {f"output input {i}": x.detach() for i, x in enumerate(passed)}
    if not grad:
        return values
    differentiable = [o for o in outputs if o.requires_grad]
    torch.autograd.backward(differentiable, [_cotangent(o, DTYPES[cell.dtype]) for o in differentiable])
    grads = {f"grad input {i}": x.grad for i, x in enumerate(leaves)}
    return values | grads | {f"grad {name}": p.grad for name, p in block.named_parameters()}


def _cotangent(output: Tensor, dtype: torch.dtype) -> Tensor:
    """The same numbers for a run and its truth: rounded to the run's dtype."""
    wave = torch.cos(torch.arange(output.numel(), dtype=torch.float64)).view(output.shape)
    return wave.to(dtype).to(output.dtype)


def _truth(
    cell: Cell, inputs: tuple[Tensor, ...], decisions: Sequence[truth.Decision]
) -> tuple[truth.Values, dict[str, float]]:
    """Float64 through ``batched_mm``, the implementation that is the same code in every dtype, and the norms of the
    terms that gradients of one element are sums of."""
    block, _ = _block(cell, "batched_mm")
    block = block.double()
    with truth.Exact(decisions) as exact:
        values = _values(block, block, truth.to_double(inputs), cell)
    return values, {name: exact.summed(value) for name, value in values.items() if name.startswith("grad")}


def _compiled(
    cell: Cell, backend: Any, batches: Sequence[tuple[Tensor, ...]], options: dict[str, Any] | None
) -> list[dict[str, Tensor | None]]:
    block, _ = _block(cell)
    torch._dynamo.reset()
    reset()
    dynamic = True if cell.mode is Mode.DYNAMIC else None
    compiled = torch.compile(block, backend=backend, dynamic=dynamic, options=options)
    return [_values(compiled, block, inputs, cell) for inputs in batches]


def _compiles(cell: Cell, batches: Sequence[tuple[Tensor, ...]]) -> bool:
    try:
        _compiled(cell, "eager", batches, None)
    except Exception:
        return False
    return True


def _kind(error: Exception) -> str:
    return type(getattr(error, "inner_exception", None) or error).__name__


def _line(error: Exception) -> str:
    """The first line of what went wrong, without Dynamo's wrappers: those say only that something raised."""
    error = getattr(error, "inner_exception", None) or error
    fake = re.search(r"got (\w+\(.*\))$", str(error), re.MULTILINE)  # under "Explanation:", where a fake call raised
    lines = [fake[1]] if fake else [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines or [type(error).__name__])[0][:240]
