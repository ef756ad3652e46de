"""Activation expressions: reading, normal form, value and derivative of every operation."""

from __future__ import annotations

import pytest
import torch
from experts_case import ACTIVATIONS, CONSTS, SINGLE
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_inductor.activation import NAMED, OPERATIONS, canonical, name_of, parse, swap_halves, variables
from moe_inductor.kernels import activations

CONSTANT_SECOND = {"clamp_min", "clamp_max"}


def test_every_operation_has_a_rule() -> None:
    assert set(activations.RULES) == set(OPERATIONS)
    for name, count in OPERATIONS.items():
        assert len(activations.RULES[name].grads) == (1 if name in CONSTANT_SECOND else count)


@pytest.mark.parametrize("op", OPERATIONS)
def test_derivative_of_every_operation(op: str) -> None:
    second = "0.7" if op in CONSTANT_SECOND else "u"
    text = f"{op}(g, {second})" if OPERATIONS[op] == 2 else f"{op}(g)"
    g = torch.rand(5, 4, dtype=torch.float64) + 0.3
    u = torch.rand(5, 4, dtype=torch.float64) + 0.3
    check_against_autograd(text, g, u)


EXPRESSIONS = [*ACTIVATIONS, *SINGLE, "mul(mul(g, 2.0), add(c0, c1))", "sub(1.0, g)", "div(2.0, exp(u))"]


@pytest.mark.parametrize("text", EXPRESSIONS)
def test_derivative_of_expressions(text: str) -> None:
    check_against_autograd(text, torch.randn(6, 4, dtype=torch.float64) * 4, torch.randn(6, 4, dtype=torch.float64) * 4)


def check_against_autograd(text: str, g: torch.Tensor, u: torch.Tensor) -> None:
    """Run forward, the rules are differentiable PyTorch code: autograd is an oracle for the backward ones."""
    g, u = g.clone().requires_grad_(), u.clone().requires_grad_()
    value = activations.evaluate(text, g, u, CONSTS)
    if text in ACTIVATIONS | SINGLE:
        torch.testing.assert_close(value, (ACTIVATIONS | SINGLE)[text](g, u))
    grad = torch.randn_like(value)
    want = torch.autograd.grad(value, (g, u), grad, allow_unused=True)
    again, pull = activations.differentiate(text, g.detach(), u.detach(), CONSTS)
    torch.testing.assert_close(again, value.detach())
    for mine, autograd, half in zip(pull(grad), want, (g, u), strict=True):
        torch.testing.assert_close(mine, torch.zeros_like(half) if autograd is None else autograd)


@pytest.mark.parametrize("text", ["clamp_max(g, 1.0)", "clamp_min(g, 1.0)", "relu(g)", "abs(g)", "softplus(g)"])
def test_kinks_and_nan_follow_pytorch(text: str) -> None:
    g = torch.tensor([[1.0, 0.0, float("nan"), float("inf"), 25.0, -1.0]], requires_grad=True)
    value = activations.evaluate(text, g, None, [])
    value.sum().backward()
    _, pull = activations.differentiate(text, g.detach(), None, [])
    torch.testing.assert_close(pull(torch.ones_like(value))[0], g.grad, equal_nan=True)


def test_missing_constant_and_half_are_named() -> None:
    g = torch.ones(1, 2)
    with pytest.raises(ValueError, match="reads c1, but 1 constants are given"):
        activations.evaluate("mul(g, c1)", g, None, [1.0])
    with pytest.raises(ValueError, match="reads u, but these experts have no such half"):
        activations.evaluate("mul(g, u)", g, None, [])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "ends too early"),
        ("sine(g)", "unknown operation 'sine'"),
        ("mul(g)", "mul takes 2 operands, not 1"),
        ("mul(g, u) g", "unexpected 'g'"),
        ("mul(g, u", r"missing '\)'"),
        ("mul(g, x)", "unknown name 'x'"),
    ],
)
def test_malformed_expressions_are_named(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse(text)


def test_names_and_spellings() -> None:
    assert all(name_of(parse(name)) == name for name in NAMED)
    assert name_of(parse("mul(u, mul(sigmoid(g), g))")) == "swiglu"
    assert name_of(parse("mul(relu(g), relu(g))")) == "relu2"
    assert name_of(swap_halves(parse("mul(silu(u), g)"))) == "swiglu"
    assert name_of(parse("mul(silu(u), g)")) != "swiglu"
    assert variables(parse("add(mul(g, c0), 1.0)")) == {"g", "c0"}


leaves = st.sampled_from(["g", "u", "c0", "c1", "2.0", "0.5"])
smooth = [name for name in OPERATIONS if name not in {*CONSTANT_SECOND, "div", "log", "log1p", "sqrt", "rsqrt", "exp"}]
expressions = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.tuples(st.sampled_from([n for n in smooth if OPERATIONS[n] == 1]), inner).map("{0[0]}({0[1]})".format),
        st.tuples(st.sampled_from([n for n in smooth if OPERATIONS[n] == 2]), inner, inner).map(
            "{0[0]}({0[1]}, {0[2]})".format
        ),
    ),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(expressions)
def test_any_expression_reads_back_and_differentiates(text: str) -> None:
    expr = parse(text)
    assert parse(str(expr)) == expr
    g = torch.linspace(-1.3, 1.7, 6, dtype=torch.float64).view(2, 3)
    u = torch.linspace(0.9, -1.1, 6, dtype=torch.float64).view(2, 3)
    value = activations.evaluate(text, g, u, CONSTS)
    torch.testing.assert_close(activations.evaluate(str(canonical(expr)), g, u, CONSTS), value)
    if variables(expr) & {"g", "u"}:
        check_against_autograd(text, g, u)
