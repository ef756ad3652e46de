"""The operators as PyTorch sees them: schema, fake form, autograd, compile, autocast, FLOPs, errors, the digest."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from experts_case import (
    CONSTS,
    Operands,
    assert_close,
    bound,
    cut,
    cut_by_key,
    make,
    run,
    spec_of,
    truth,
    whole,
    whole_by_key,
)
from torch.utils.flop_counter import FlopCounterMode

from moe_inductor import digest as digests
from moe_inductor import ops
from moe_inductor.spec import Combine

FAMILIES = ["reference", "cpu", "library"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_opcheck(tokens: int, dtype: torch.dtype, family: str) -> None:
    for combine in Combine if family == "cpu" else [Combine.WEIGHTED_SUM]:
        spec = spec_of(dtype, combine=combine)
        o = make(spec, dtype, tokens=tokens, hidden=8, inter=8, biases=True).copied()
        key = (str(spec), f"{family}/auto", "d")
        order, inverse, offsets, _ = ops.route_metadata(o.idx, *key)
        rows = (order, inverse, offsets)
        a, h = ops.experts_up(o.x.detach(), *rows, o.w1.detach(), o.b1.detach(), CONSTS, *key)
        y = ops.experts_down(a, h, *rows, o.weights, o.w2, o.b2, CONSTS, *key).detach()
        leaf = h.detach().requires_grad_()
        plain = dataclasses.replace(o, **{name: t.detach() for name, t in o.floats().items()})
        calls = [
            (ops.route_metadata, (o.idx, *key)),
            (ops.experts_up, (o.x, *rows, o.w1, o.b1, CONSTS, *key)),
            (ops.experts_up_backward, (h, plain.x, *rows, plain.w1, *key, "x,w1,b1")),
            (ops.experts_up_backward, (h, plain.x, *rows, plain.w1, *key, "w1")),
            (ops.experts_down, (a, leaf, *rows, o.weights, o.w2, o.b2, CONSTS, *key)),
            (
                ops.experts_down_backward,
                (y, h, *rows, plain.weights, plain.w2, plain.b2, CONSTS, *key, "x,weights,w2,b2"),
            ),
            (ops.experts_down_backward, (y, h, *rows, plain.weights, plain.w2, plain.b2, CONSTS, *key, "x")),
            (ops.experts, (o.x, o.idx, o.weights, o.w1, o.b1, o.w2, o.b2, CONSTS, *key)),
            (
                ops.experts_backward,
                (y, plain.x, o.idx, *[getattr(plain, n) for n in o.NAMES[1:]], CONSTS, *key, "x,w1,b1,w2,b2"),
            ),
        ]
        for op, args in calls:
            # outputs may hold rounding differences between two runs of float16 kernels, never between families
            torch.library.opcheck(op, args, rtol=1e-2, atol=1e-2)


def test_route_metadata_sorts_stably_and_puts_dropped_slots_last() -> None:
    idx = torch.tensor([[2, 0], [4, 2], [-1, 0], [9, 2]])
    order, inverse, offsets, counts = ops.route_metadata(idx, str(spec_of(torch.float32)), "cpu/auto", "")
    assert order.tolist() == [1, 5, 0, 3, 7, 2, 4, 6]
    assert inverse[order].tolist() == list(range(8))
    assert (offsets.tolist(), offsets.dtype) == ([2, 2, 5, 5], torch.int32)
    assert (counts.tolist(), counts.dtype) == ([2, 0, 3, 0], torch.int64)
    narrow = ops.route_metadata(idx.int(), str(spec_of(torch.float32)), "cpu/auto", "")
    assert all(torch.equal(a, b) for a, b in zip(narrow, (order, inverse, offsets, counts), strict=True))


@pytest.mark.parametrize("form", [cut_by_key, whole_by_key])
def test_one_graph_for_any_number_of_tokens(form) -> None:
    spec = spec_of(torch.float32)
    key = (str(spec), "cpu/auto", "")
    compiled = torch.compile(form, backend="aot_eager", dynamic=True, fullgraph=True)
    for stance, tokens in (("default", 7), ("fail_on_recompile", 2), ("fail_on_recompile", 40)):
        o = make(spec, torch.float32, tokens=tokens, biases=True)
        with torch.compiler.set_stance(stance):
            got = run(lambda o, s, p: compiled(o, key), o.copied(), spec)
        assert_close(got, run(truth, o.copied(torch.float64), spec), bound(torch.float32, 100))


def test_backward_holds_the_asked_kernels_only() -> None:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.compilers import nop

    spec = spec_of(torch.float32)
    backward: list[str] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        backward.append(graph.code)
        return nop(graph, inputs)

    o = make(spec, torch.float32).copied(only=frozenset({"x", "weights"}))
    compiled = torch.compile(cut, backend=aot_autograd(fw_compiler=nop, bw_compiler=keep), fullgraph=True)
    run(lambda o, s, p: compiled(o, s, p), o, spec, "cpu/auto")
    assert "'x,weights')" in backward[0] and "'x')" in backward[0]


def test_checkpointing_recomputes_the_up_projection_only() -> None:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.compilers import nop
    from torch.utils.checkpoint import checkpoint

    spec = spec_of(torch.float32)
    backward: list[str] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        backward.append(graph.code)
        return nop(graph, inputs)

    def step(o: Operands) -> torch.Tensor:
        return checkpoint(lambda x, w: cut(dataclasses.replace(o, x=x, weights=w), spec, "cpu/auto"), o.x, o.weights,
                          use_reentrant=False)  # fmt: skip

    o = make(spec, torch.float32).copied()
    compiled = torch.compile(step, backend=aot_autograd(fw_compiler=nop, bw_compiler=keep), fullgraph=True)
    got = run(lambda o, s, p: compiled(o), o, spec)
    assert_close(got, run(truth, o.copied(torch.float64), spec), bound(torch.float32, 100))
    assert "megamoe.experts_up.default" in backward[0] and "megamoe.experts_down.default" not in backward[0]


@pytest.mark.parametrize("form", [cut, whole])
def test_autocast_does_not_reach_inside(form) -> None:
    spec = spec_of(torch.float32)
    o = make(spec, torch.float32, biases=True)
    plain = run(form, o.copied(), spec, "cpu/auto")

    def under(o, spec, plan):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return form(o, spec, plan)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = run(under, o.copied(), spec, "cpu/auto")
    assert all(torch.equal(plain[name], cast[name]) for name in plain)


def test_a_is_not_differentiable() -> None:
    spec = spec_of(torch.float32)
    o = make(spec, torch.float32).copied()
    key = (str(spec), "cpu/auto", "")
    rows = ops.route_metadata(o.idx, *key)[:3]
    a, h = ops.experts_up(o.x, *rows, o.w1, None, CONSTS, *key)
    assert h.requires_grad and not a.requires_grad


def test_inference_mode_and_no_grad_save_nothing() -> None:
    spec = spec_of(torch.float32)
    o = make(spec, torch.float32)
    want = run(truth, o.copied(torch.float64), spec)["y"]
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            y = whole(o.copied(), spec, "cpu/auto")
        assert y.grad_fn is None
        torch.testing.assert_close(y.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_have_the_dtype_and_layout_of_their_parameter(dtype: torch.dtype) -> None:
    spec = spec_of(dtype)
    o = make(spec, dtype, biases=True).copied()
    run(cut, o, spec, "cpu/auto")
    for t in o.floats().values():
        assert (t.grad.dtype, t.grad.shape, t.grad.stride()) == (t.dtype, t.shape, t.stride())


def test_flops() -> None:
    t, k, h, i = 6, 2, 16, 8
    spec = spec_of(torch.float32, top_k=k)
    matmul = 2 * t * k * h * i

    def count(form, *, only: str | None = None) -> int:
        o = make(spec, torch.float32, tokens=t, hidden=h, inter=i)
        with FlopCounterMode(display=False) as counter:
            run(form, o.copied(only=None if only is None else frozenset(only.split())), spec, "cpu/auto")
        return counter.get_total_flops()

    with torch.no_grad():
        assert count(cut, only="") == count(whole, only="") == 3 * matmul  # 6 T k H I
    assert count(cut) == 9 * matmul
    assert count(whole) == 3 * matmul + 6 * matmul + 2 * matmul  # the up projection runs twice
    assert count(cut, only="x") == 3 * matmul + matmul + 2 * matmul
    assert count(cut, only="weights") == 3 * matmul + matmul
    assert count(cut, only="w2") == 3 * matmul + matmul


def test_wrong_operands_are_named() -> None:
    spec = spec_of(torch.float32)
    o = make(spec, torch.float32)
    with pytest.raises(TypeError, match="operands of one dtype, but x is torch.bfloat16, w1 is torch.float32"):
        whole(dataclasses.replace(o, x=o.x.bfloat16()), spec, "cpu/auto")
    with pytest.raises(ValueError, match="no kernel family 'cpp'; there are reference, cpu, library"):
        whole(o, spec, "cpp/auto")
    with pytest.raises(ValueError, match="combine=weighted_sum needs topk_weights"):
        ops.experts_down(*[torch.empty(0)] * 5, None, o.w2, None, [], str(spec), "cpu/auto", "")


def test_digest_follows_the_code(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    first = digests.digest()
    assert len(first) == 12 and int(first, 16) >= 0
    copy = tmp_path / "package"
    copy.mkdir()
    for name in digests._FILES:
        shutil.copy(digests._PACKAGE / name, copy / name)
    shutil.copytree(digests._PACKAGE / "kernels", copy / "kernels")
    monkeypatch.setattr(digests, "_PACKAGE", copy)
    digests.digest.cache_clear()
    assert digests.digest() == first
    with open(copy / "kernels" / "cpu.py", "a") as f:
        f.write("\n")
    digests.digest.cache_clear()
    assert digests.digest() != first
    digests.digest.cache_clear()
