"""What a graph does beside its values stays: writes, hooks, random draws and operators with effects, in and around a
region. Values, gradients and buffers are compared with eager's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_inductor.backend import with_inner
from moe_inductor.passes import fuse
from moe_inductor.report import report, reset
from tests.near_misses import Batched, Grouped, H, I, K, T

TENSORS = {"ws_rows": (T * K, I), "ws_wide": (T * K, 2 * I), "ws_out": (T * K, H), "ws_long": (T * K + 3, 2 * I)}
VERIFY = {"moe.verify": "all"}
seen: list[str] = []


@torch.library.custom_op("megamoe_tests::load", mutates_args=("into",))
def load(into: Tensor, value: Tensor) -> Tensor:
    """Writes into its first argument and gives a tensor that nobody has to read."""
    into.copy_(value)
    return value.clone()


load.register_fake(lambda into, value: value.clone())


@torch.library.custom_op("megamoe_tests::note", mutates_args=())
def note(value: Tensor) -> Tensor:
    """Has an effect that no schema tells."""
    seen.append("note")
    return value.clone()


note.register_fake(lambda value: value.clone())


def make(base: type[nn.Module], **methods: Callable[..., Any]) -> nn.Module:
    """A form with some methods replaced, and workspaces as buffers."""
    module = type("Changed", (base,), methods)()
    for name, shape in TENSORS.items():
        module.register_buffer(name, torch.zeros(shape))
    module.register_buffer("ws_sum", torch.zeros(2 * I))
    return module


def outcome(module: nn.Module, call: Any, *, training: bool) -> dict[str, Tensor]:
    """Output, gradients and buffers of one step."""
    torch.manual_seed(5)
    x = torch.randn(T, H, generator=torch.Generator().manual_seed(1)).requires_grad_(training)
    with torch.set_grad_enabled(training):
        found = call(x)
    outs = found if isinstance(found, tuple) else (found,)
    got = {f"out {i}": t.detach() for i, t in enumerate(outs)}
    if training:
        sum((t * torch.linspace(-1, 1, t.numel()).view(t.shape)).sum() for t in outs if t.requires_grad).backward()
        got |= {f"grad {n}": p.grad for n, p in [("x", x), *module.named_parameters()] if p.grad is not None}
    return got | {f"buffer {n}": b.clone() for n, b in module.named_buffers()}


def check(module: nn.Module, *, training: bool = False, fused: int | None = None) -> None:
    """The compiled module does what the eager one does; ``fused`` regions, any number where None. The check at compile
    time is always made: it must not write into the model's buffers either."""
    torch._dynamo.reset()
    reset()
    twin = copy.deepcopy(module)
    want = outcome(twin, twin, training=training)
    got = outcome(module, torch.compile(module, backend=with_inner(run_graph), options=VERIFY), training=training)
    assert got.keys() == want.keys()
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
    if fused is not None:
        assert len(report().fused) == fused, report().refused


def run_graph(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """The inner backend: the edited graph as it is, node by node."""
    return graph.forward


def swiglu(h: Tensor) -> Tensor:
    g, u = h.chunk(2, dim=-1)
    return F.silu(g) * u


def into(buffer: str, value: Tensor, self: nn.Module) -> Tensor:
    return getattr(self, buffer).copy_(value)


@pytest.mark.parametrize("base", [Grouped, Batched])
def test_a_workspace_on_the_way(base: type[nn.Module]) -> None:
    check(make(base, act=lambda self, h, xs: into("ws_rows", swiglu(h), self)), fused=0)
    check(make(base, act=lambda self, h, xs: swiglu(into("ws_wide", h, self))), fused=0)
    check(make(base, act=lambda self, h, xs: swiglu(self.ws_long[: T * K].copy_(h))), fused=0)


class ReadsItsWorkspace(Grouped):
    """A workspace made in the graph, read after the region."""

    def down(self, a: Tensor, ends: Tensor) -> Tensor:
        self.ws = torch.zeros(T * K, H)
        return self.ws.copy_(super().down(a, ends))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), self.ws.clone()


def test_a_workspace_made_in_the_graph_and_read_later() -> None:
    check(ReadsItsWorkspace(), fused=0)


def _beside(write: Callable[[nn.Module, Tensor, Tensor], Any]) -> Callable[..., Tensor]:
    def act(self: nn.Module, h: Tensor, xs: Tensor) -> Tensor:
        write(self, h, xs)
        return swiglu(h)

    return act


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(
    ("write", "fused"),
    [
        (lambda self, h, xs: F.relu(self.ws_wide, inplace=True), 1),
        (lambda self, h, xs: F.hardtanh(self.ws_wide, -1.0, 1.0, True), 1),
        (lambda self, h, xs: torch.add(self.ws_wide, 1, out=self.ws_wide), 1),
        (lambda self, h, xs: torch.sum(h.detach(), 0, out=self.ws_sum), 0),
        (lambda self, h, xs: torch.ops.megamoe_tests.load(self.ws_out, xs.detach()), 1),
        (lambda self, h, xs: self.ws_out.copy_(xs.detach()), 1),
        (lambda self, h, xs: self.ws_wide.add_(1), 1),
    ],
)
def test_writes_beside_the_region(write: Any, fused: int, training: bool) -> None:
    check(make(Grouped, act=_beside(write)), training=training, fused=fused)


class ReadsTheRowsLater(Grouped):
    """Gathered rows changed in place by a function, and read after the region."""

    def act(self, h: Tensor, xs: Tensor) -> Tensor:
        self.rows = F.relu(xs, inplace=True)
        return super().act(h, xs)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), self.rows * 2


def test_rows_changed_in_place_and_read_later() -> None:
    check(ReadsTheRowsLater())


@pytest.mark.parametrize("of", ["rows", "hidden", "gate"])
def test_hooks_on_what_the_region_computes(of: str) -> None:
    def act(self: nn.Module, h: Tensor, xs: Tensor) -> Tensor:
        g, u = h.chunk(2, dim=-1)
        a = F.silu(g) * u
        {"rows": xs, "hidden": h, "gate": g}[of].register_hook(lambda grad: grad * 2)
        return a

    check(make(Grouped, act=act), training=True, fused=0)


class HookedInput(Grouped):
    """A hook on the tokens themselves, after their first use."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        out = super().forward(x)
        x.register_hook(lambda grad: grad * 3)
        return out


def test_a_hook_on_the_tokens_stays_and_the_region_is_fused() -> None:
    check(HookedInput(), training=True, fused=1)


def test_random_draws_nobody_reads_move_the_generator() -> None:
    class Draws(Grouped):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            out = super().forward(x)
            return out, torch.rand_like(out)

    check(type("Draws", (Draws,), {"act": _beside(lambda self, h, xs: torch.rand_like(xs))})(), fused=1)


def test_operators_of_unknown_kind_run_once() -> None:
    module = make(Grouped, act=_beside(lambda self, h, xs: torch.ops.megamoe_tests.note(xs)))
    call = torch.compile(module, backend=with_inner(run_graph), options={"moe.verify": "off"})
    x = torch.randn(T, H)
    with torch.no_grad():
        call(x)
        seen.clear()
        call(x)
    assert seen == ["note"]


def test_negative_ids_count_from_the_last_expert() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        w, idx = F.linear(x, self.router).softmax(-1).topk(K, dim=-1)
        ids = (idx - 1).reshape(-1)
        xs = self.rows(x, w)
        h = torch.bmm(self.w1[ids], xs.unsqueeze(-1)).squeeze(-1)
        y = torch.bmm(self.w2[ids], self.act(h, xs).unsqueeze(-1)).squeeze(-1)
        return self.total(y, w)

    for training in (False, True):
        check(make(Batched, forward=forward), training=training, fused=1)


def test_a_failure_while_writing_leaves_the_users_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    def replace(*args: Any) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(fuse, "replace", replace)
    check(Grouped(), training=True, fused=0)
    assert [r.code for r in report().refused] == ["internal"]


def test_a_cast_to_no_float_stays_behind_the_region() -> None:
    check(make(Grouped, total=lambda self, z: z.view(-1, K, H).sum(dim=1).to(torch.complex64)), fused=1)


class TwoLayers(nn.Module):
    """Two layers of different classes with the same refusal."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([First(), Second()])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class First(Grouped):
    def act(self, h: Tensor, xs: Tensor) -> Tensor:
        return F.relu6(h.chunk(2, dim=-1)[0])


class Second(Grouped):
    def act(self, h: Tensor, xs: Tensor) -> Tensor:
        return F.relu6(h.chunk(2, dim=-1)[0])


def test_alike_refusals_name_their_own_line() -> None:
    check(TwoLayers(), fused=0)
    lines = [r.where for r in report().refused]
    assert len(lines) == 2 and lines[0] != lines[1] and all("test_effects.py" in line for line in lines)


def test_a_layer_under_vmap_is_refused_by_name() -> None:
    module = Batched().requires_grad_(requires_grad=False)
    x = torch.randn(3, T, H)
    torch._dynamo.reset()
    reset()
    call = torch.compile(torch.func.vmap(module), backend=with_inner(run_graph), options=VERIFY)
    torch.testing.assert_close(call(x), torch.stack([module(part) for part in x]), rtol=1e-4, atol=1e-5)
    assert report().refused and {r.code for r in report().refused} == {"transform"}
