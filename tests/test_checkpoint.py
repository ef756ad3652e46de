"""What runs again in the backward pass of a checkpointed layer, plain and under a selective policy."""

import functools

import pytest
import torch
from expecttest import assert_expected_inline
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from moe_inductor.backend import with_inner
from moe_inductor.passes.selective import ContextFn
from tests import models

AGAIN = "experts_up"
LIBRARY = {"grouped_mm": "transformers.grouped_mm_fallback", "batched_mm": "aten.bmm"}


class Checkpointed(models.Residual):
    """Residual blocks, each under ``checkpoint`` with the given settings."""

    def __init__(self, layers=1, *, form="grouped_mm", dtype=torch.float32, **settings):
        super().__init__(layers, form=form, dtype=dtype)
        self.settings = {"use_reentrant": False} | settings

    def forward(self, x):
        for block in self.blocks:
            x = x + checkpoint(block, x, **self.settings)
        return x


@pytest.fixture
def graphs():
    """A backend that keeps the calls of the forward and the backward graphs, in ``.calls``."""
    calls = {"forward": [], "backward": []}

    def keep(direction):
        def compiler(graph, inputs):
            for node in graph.graph.nodes:
                name = str(node.target).removesuffix(".default").removeprefix("megamoe.")
                ours = str(node.target).startswith("megamoe.")
                if node.op == "call_function" and (ours or name in ("aten.mm", "aten.addmm", *LIBRARY.values())):
                    calls[direction].append(name)
            return make_boxed_func(graph.forward)

        return compiler

    # the partitioner that Inductor uses
    inner = aot_autograd(
        fw_compiler=keep("forward"),
        bw_compiler=keep("backward"),
        partition_fn=functools.partial(min_cut_rematerialization_partition, compiler="inductor"),
    )
    backend = with_inner(inner)
    backend.calls = calls
    return backend


def trained(model, backend):
    """Compiled and eager steps agree; nothing is left unfused."""
    twin = models.eager_twin(model)
    x = models.rows(2, 5, models.HIDDEN)
    torch._dynamo.utils.counters.clear()
    mine = models.pull(torch.compile(model, backend=backend, fullgraph=True), model, x)
    models.assert_equal(mine, models.pull(twin, twin, x))
    assert models.matched() == len(model.blocks)


def listed(calls):
    return "\n".join(f"{direction}: {' '.join(names)}" for direction, names in calls.items())


def saving(*ops):
    """A selective policy that saves ``ops`` and says so by list."""
    return functools.partial(create_selective_checkpoint_contexts, list(ops))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("form", LIBRARY)
def test_backward_runs_up_again_and_down_never(graphs, form, reentrant):
    trained(Checkpointed(form=form, use_reentrant=reentrant), graphs)
    assert_expected_inline(
        listed(graphs.calls),
        """\
forward: aten.mm route_metadata experts_up experts_down
backward: aten.mm route_metadata experts_up experts_down_backward experts_up_backward aten.mm aten.mm""",
    )


def test_without_a_checkpoint_nothing_runs_again(graphs):
    trained(models.Residual(), graphs)
    assert_expected_inline(
        listed(graphs.calls),
        """\
forward: aten.mm route_metadata experts_up experts_down
backward: experts_down_backward experts_up_backward aten.mm aten.mm""",
    )


MATMULS = {
    "grouped_mm": lambda: torch.ops.transformers.grouped_mm_fallback.default,
    "batched_mm": lambda: torch.ops.aten.bmm.default,
}


@pytest.mark.parametrize("form", MATMULS)
def test_a_list_with_the_experts_matmul_saves_the_pre_activation(graphs, form):
    trained(Checkpointed(2, form=form, context_fn=saving(MATMULS[form]())), graphs)
    assert_expected_inline(
        listed(graphs.calls),
        """\
forward: aten.mm route_metadata experts_up experts_down aten.mm route_metadata experts_up experts_down
backward: aten.mm route_metadata experts_down_backward experts_up_backward aten.mm aten.mm aten.mm route_metadata experts_down_backward experts_up_backward aten.mm aten.mm""",  # noqa: E501
    )


def test_a_list_with_another_matmul_recomputes_the_experts(graphs):
    trained(Checkpointed(context_fn=saving(torch.ops.aten.mm.default)), graphs)
    assert_expected_inline(
        listed(graphs.calls),
        """\
forward: aten.mm route_metadata experts_up experts_down
backward: route_metadata experts_up experts_down_backward experts_up_backward aten.mm aten.mm""",
    )


def test_bfloat16_matmuls_are_those_of_torch(graphs):
    """Under compile ``torch._grouped_mm`` runs bfloat16 weights, an operator of transformers all others."""
    model = Checkpointed(dtype=torch.bfloat16, context_fn=saving(torch.ops.aten._grouped_mm.default))
    x = models.rows(2, 5, models.HIDDEN, dtype=torch.bfloat16)
    models.pull(torch.compile(model, backend=graphs, fullgraph=True), model, x)
    assert graphs.calls["forward"].count(AGAIN) == 1 and AGAIN not in graphs.calls["backward"]


@pytest.mark.parametrize("saved", ["up", "down", "neither"])
def test_a_policy_sees_both_matmuls_with_their_shapes(graphs, saved):
    rows, width = 2 * 5 * models.TOP_K, 2 * models.INTER
    up = (rows, models.HIDDEN), (models.EXPERTS, models.HIDDEN, width), (rows, width)
    down = (rows, models.INTER), (models.EXPERTS, models.INTER, models.HIDDEN), (rows, models.HIDDEN)
    asked = []

    def policy(ctx, op, *args, **kwargs):
        if op is not torch.ops.transformers.grouped_mm_fallback.default:
            return CheckpointPolicy.PREFER_RECOMPUTE
        asked.append((tuple(args[0].shape), tuple(args[1].shape), tuple(ctx.op_output.shape)))
        return asked[-1] == {"up": up, "down": down}.get(saved)  # a bool is an answer too

    trained(Checkpointed(context_fn=functools.partial(create_selective_checkpoint_contexts, policy)), graphs)
    assert asked[:2] == [up, down]
    assert (AGAIN in graphs.calls["backward"]) == (saved == "neither")


def test_a_policy_that_counts_is_asked_once_for_each_matmul(graphs):
    """Saving every second matmul saves one of a layer's two; eager's answers are not shifted by ours."""
    seen = []

    def contexts():
        count = iter(range(1000))

        def policy(ctx, op, *args, **kwargs):
            if op is torch.ops.aten.bmm.default and not ctx.is_recompute:
                seen.append(next(count))
                return CheckpointPolicy.MUST_SAVE if seen[-1] % 2 else CheckpointPolicy.MUST_RECOMPUTE
            return CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    trained(Checkpointed(2, form="batched_mm", context_fn=contexts), graphs)
    assert max(seen) == 1, "each body asks about its two matmuls"
    assert graphs.calls["forward"].count(AGAIN) == 2 and AGAIN not in graphs.calls["backward"]


def test_a_policy_may_name_the_operator_itself(graphs):
    trained(Checkpointed(context_fn=saving(torch.ops.megamoe.experts_up.default)), graphs)
    assert AGAIN not in graphs.calls["backward"]


def test_a_matmul_that_must_be_recomputed_is(graphs):
    def policy(ctx, op, *args, **kwargs):
        return {
            torch.ops.transformers.grouped_mm_fallback.default: CheckpointPolicy.MUST_RECOMPUTE,
            torch.ops.megamoe.experts_up.default: CheckpointPolicy.MUST_SAVE,
        }.get(op, CheckpointPolicy.PREFER_RECOMPUTE)

    trained(Checkpointed(context_fn=functools.partial(create_selective_checkpoint_contexts, policy)), graphs)
    assert AGAIN in graphs.calls["backward"]


def test_the_hash_of_a_context_fn_stays_and_names_what_was_replaced():
    class Contexts:
        cache_hash = "mine"

        def __call__(self):
            return create_selective_checkpoint_contexts([])

    ops = (torch.ops.aten._grouped_mm.default,) * 2
    named, other = (ContextFn.of(Contexts(), {spec: ops}) for spec in ("a", "b"))
    assert named.cache_hash == ContextFn.of(Contexts(), {"a": ops}).cache_hash != other.cache_hash
    assert "mine" in named.cache_hash
    assert not hasattr(ContextFn.of(lambda: None, {"a": ops}), "cache_hash")


def test_contexts_that_are_not_pytorchs_are_left_alone():
    contexts = (object(), object())
    assert ContextFn.of(lambda: contexts, {})() == contexts
