"""One layer of experts as test data: operands, the fused forms, and a loop over experts, in float64 the truth."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_inductor import ops
from moe_inductor.spec import Combine, ExpertsSpec, Halves, Layout

CONSTS = [1.702, 7.0]

#: What each activation means, written without the package: (gate, up) -> a.
ACTIVATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "swiglu": lambda g, u: g / (1 + torch.exp(-g)) * u,
    "geglu": lambda g, u: 0.5 * g * (1 + torch.erf(g / math.sqrt(2))) * u,
    "geglu_tanh": lambda g, u: 0.5 * g * (1 + torch.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))) * u,
    "reglu": lambda g, u: torch.where(g > 0, g, 0.0) * u,
    "mul(mul(add(clamp_max(clamp_min(u, neg(c1)), c1), 1.0), clamp_max(g, c1)), sigmoid(mul(clamp_max(g, c1), c0)))": (
        lambda g, u: (u.clamp(-7, 7) + 1) * g.clamp(max=7) * torch.sigmoid(1.702 * g.clamp(max=7))
    ),
}
#: gpt-oss's, its constants in the text.
CLAMPED = (
    "mul(mul(sigmoid(mul(clamp_max(g, 7.0), 1.702)), clamp_max(g, 7.0)), add(clamp_max(clamp_min(u, -7.0), 7.0), 1.0))"
)
ACTIVATIONS[CLAMPED] = lambda g, u: (u.clamp(-7, 7) + 1) * g.clamp(max=7) * torch.sigmoid(1.702 * g.clamp(max=7))
SINGLE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": lambda g, u: g * torch.sigmoid(g),
    "gelu": lambda g, u: 0.5 * g * (1 + torch.erf(g / math.sqrt(2))),
    "relu2": lambda g, u: torch.where(g > 0, g * g, 0.0),
}

SPEC = ExpertsSpec(
    experts=4,
    top_k=2,
    activation="swiglu",
    halves=Halves.GATE_UP,
    w1=Layout.OUT_IN,
    w2=Layout.OUT_IN,
    combine=Combine.WEIGHTED_SUM,
    weight_dtype=torch.float32,
    combine_dtype=torch.float32,
    out_dtype=torch.float32,
)


def spec_of(dtype: torch.dtype, **changes: object) -> ExpertsSpec:
    """:data:`SPEC` in ``dtype`` with ``changes``."""
    return dataclasses.replace(SPEC, **{"weight_dtype": dtype, "combine_dtype": dtype, "out_dtype": dtype} | changes)


@dataclass
class Operands:
    """The operators' operands; ``grads`` are the names of those that require a gradient."""

    x: Tensor
    idx: Tensor
    weights: Tensor | None
    w1: Tensor
    b1: Tensor | None
    w2: Tensor
    b2: Tensor | None

    NAMES = ("x", "weights", "w1", "b1", "w2", "b2")

    def floats(self) -> dict[str, Tensor]:
        """The differentiable operands that there are."""
        return {name: t for name in self.NAMES if (t := getattr(self, name)) is not None}

    def copied(self, dtype: torch.dtype | None = None, only: frozenset[str] | None = None) -> Operands:
        """Fresh leaves, all (or those in ``only``) requiring gradients."""
        return dataclasses.replace(
            self,
            **{
                name: t.detach()
                .to(t.dtype if dtype is None else dtype, copy=True)
                .requires_grad_(only is None or name in only)
                for name, t in self.floats().items()
            },
        )


def make(
    spec: ExpertsSpec,
    dtype: torch.dtype,
    *,
    tokens: int = 7,
    hidden: int = 16,
    inter: int = 8,
    biases: bool = False,
    dropped: bool = False,
    device: str = "cpu",
    weights_dtype: torch.dtype | None = None,
) -> Operands:
    """Random operands. The last expert gets no row; with ``dropped`` some slots choose -1, E or beyond."""
    e, k = spec.experts, spec.top_k
    width = 2 * inter if spec.gated else inter

    def weight(layout: Layout, inside: int, outside: int) -> Tensor:
        shape = (e, outside, inside) if layout is Layout.OUT_IN else (e, inside, outside)
        return torch.randn(shape, device=device) / math.sqrt(inside)

    choices = [torch.randperm(max(e - 1, 1), device=device)[:k] for _ in range(tokens)]
    if k >= e:
        choices = [torch.randperm(e, device=device)[:k] for _ in range(tokens)]
    idx = torch.stack(choices) if tokens else torch.zeros(0, k, dtype=torch.int64, device=device)
    if dropped and tokens:
        idx.view(-1)[::3] = torch.tensor([-1, e, e + 3], device=device)[torch.arange(len(idx.view(-1)[::3])) % 3]
    combined = spec.combine is Combine.WEIGHTED_SUM
    return Operands(
        x=torch.randn(tokens, hidden, device=device).to(dtype),
        idx=idx,
        weights=torch.rand(tokens, k, device=device).to(weights_dtype or dtype) if combined else None,
        w1=weight(spec.w1, hidden, width).to(dtype),
        b1=torch.randn(e, width, device=device).to(dtype) if biases else None,
        w2=weight(spec.w2, inter, hidden).to(dtype),
        b2=torch.randn(e, hidden, device=device).to(dtype) if biases else None,
    )


def cut(o: Operands, spec: ExpertsSpec, plan: str) -> Tensor:
    """y through route_metadata, experts_up and experts_down."""
    return cut_by_key(o, (str(spec), plan, ""))


def whole(o: Operands, spec: ExpertsSpec, plan: str) -> Tensor:
    """y through the single operator."""
    return whole_by_key(o, (str(spec), plan, ""))


def cut_by_key(o: Operands, key: tuple[str, str, str]) -> Tensor:
    """:func:`cut` for ``key`` = (spec, plan, digest)."""
    order, inverse, offsets, _ = ops.route_metadata(o.idx, *key)
    a, h = ops.experts_up(o.x, order, inverse, offsets, o.w1, o.b1, CONSTS, *key)
    return ops.experts_down(a, h, order, inverse, offsets, o.weights, o.w2, o.b2, CONSTS, *key)


def whole_by_key(o: Operands, key: tuple[str, str, str]) -> Tensor:
    """:func:`whole` for ``key`` = (spec, plan, digest)."""
    return ops.experts(o.x, o.idx, o.weights, o.w1, o.b1, o.w2, o.b2, CONSTS, *key)


def truth(o: Operands, spec: ExpertsSpec, plan: str = "") -> Tensor:
    """y in the operands' dtype, expert by expert, on the operands' device."""
    act = (ACTIVATIONS | SINGLE)[spec.activation]
    (tokens, top_k), hidden, flat = o.idx.shape, o.x.shape[1], o.idx.flatten()
    # every operand takes part, so that gradients are zeros and not missing where no row is left
    rows = o.x.new_zeros(flat.shape[0], hidden) + 0 * sum(t.sum() for t in o.floats().values())
    for e, (w1, w2) in enumerate(zip(o.w1.unbind(), o.w2.unbind(), strict=True)):
        slots = (flat == e).nonzero()[:, 0]
        h = o.x[slots // top_k] @ (w1 if spec.w1 is Layout.IN_OUT else w1.t())
        h = h if o.b1 is None else h + o.b1[e]
        i = h.shape[1] // 2
        g, u = {
            Halves.GATE_UP: (h[:, :i], h[:, i:]),
            Halves.UP_GATE: (h[:, i:], h[:, :i]),
            Halves.INTERLEAVED: (h[:, ::2], h[:, 1::2]),
            Halves.SINGLE: (h, h),
        }[spec.halves]
        part = act(g, u) @ (w2 if spec.w2 is Layout.IN_OUT else w2.t())
        part = part if o.b2 is None else part + o.b2[e]
        part = part if o.weights is None else part * o.weights.flatten()[slots, None]
        rows = rows.index_add(0, slots, part)
    return rows if spec.combine is Combine.ROWS else rows.view(tokens, top_k, hidden).sum(1)


def run(
    form: Callable[[Operands, ExpertsSpec, str], Tensor], o: Operands, spec: ExpertsSpec, plan: str = ""
) -> dict[str, Tensor | None]:
    """The output, and the gradient of every float operand (None where it has none) for a fixed output gradient."""
    y = form(o, spec, plan)
    dy = torch.cos(torch.arange(y.numel())).view(y.shape).to(y.device, spec.out_dtype)
    if y.requires_grad:
        y.backward(dy.to(y.dtype))
    return {"y": y.detach()} | {f"d{name}": t.grad for name, t in o.floats().items()}


def bound(dtype: torch.dtype, *lengths: int) -> float:
    """Relative to the largest entry: 2 eps sqrt(sum of reduction lengths). Between two results there are up to five
    roundings (h, a, dA, dh, the result), each of at most eps/2 and amplified by a derivative of at most 1.1."""
    return 2 * torch.finfo(dtype).eps * math.sqrt(sum(lengths))


def assert_close(got: dict[str, Tensor | None], want: dict[str, Tensor | None], tolerance: float) -> None:
    """Every entry within ``tolerance`` of the largest true one, or of 1, about one term of a sum, where that cancels.
    None exactly where the truth has None."""
    for name, true in want.items():
        value = got[name]
        assert (value is None) == (true is None), f"{name}: {value} instead of {true}"
        if value is None or true is None:
            continue
        assert value.shape == true.shape, name
        if true.numel():
            value, true = value.double().cpu(), true.double().cpu()
            error = float((value - true).abs().max())
            scale = max(float(true.abs().max()), 1.0)
            assert error <= tolerance * scale, f"{name}: error {error / scale:.2e}, allowed {tolerance:.2e}"
