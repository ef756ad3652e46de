"""The shadow of a window: what every node of a piece of a Dynamo graph computes, as :class:`~.values.Value`.

The nodes run once more on their own fake tensors, forward only and without gradients, under a recorder that sees ATen
operations. Mutation is followed by storage: an in-place operation gives its tensor, and every view related to it, a
new value, so a value never changes after the fact and "what a node held when it ran" is well defined.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .. import _torch
from . import aten
from .effects import Effects, acts_unseen, writes
from .runner import Unsupported, call_node, run_nodes
from .values import Table, Value, dim

Derive = Callable[[Value], Value]


class NeedsGuard(Exception):
    """Running the window would add a guard."""


@dataclass(slots=True)
class _Tracked:
    """A tensor of the run, its present value, and how it follows from the tensor that it is a view of."""

    tensor: torch.Tensor
    value: Value
    parent: _Tracked | None = None
    derive: Derive | None = None
    invert: Derive | None = None
    children: list[_Tracked] = field(default_factory=list)


class Recorder(TorchDispatchMode):
    """Names every tensor that passes by with a value of ``table``."""

    def __init__(self, table: Table) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.table = table
        self.blocked = False  #: gradients are switched off in the graph here, though not around it
        self._leaves = 0
        self._tracked: dict[int, _Tracked] = {}
        self._storages: dict[int, list[_Tracked]] = {}
        self._born: dict[int, torch.fx.Node | None] = {}  #: the node that first held a storage
        self.wrote: dict[torch.fx.Node, frozenset[int]] = {}  #: storages of other nodes that a node wrote into
        self.random: set[torch.fx.Node] = set()  #: nodes that draw random numbers

    def track(self, tensor: torch.Tensor, value: Value, view: aten.View | None = None) -> None:
        """Bind ``value`` to ``tensor``; ``view`` says of which tensor it is a view."""
        entry = _Tracked(tensor, value)
        if view is not None and (parent := self._tracked.get(id(view.base))) and storage(tensor) == storage(view.base):
            entry.parent, entry.derive, entry.invert = parent, view.derive, view.invert
            parent.children.append(entry)
        self._tracked[id(tensor)] = entry
        self._storages.setdefault(storage(tensor), []).append(entry)
        self._born.setdefault(storage(tensor), self.table.at)

    def value(self, tensor: torch.Tensor) -> Value:
        """The present value of ``tensor``."""
        entry = self._tracked.get(id(tensor))
        if entry is None:  # a constant that the graph holds as an attribute
            self.track(tensor, self.table.fresh("constant", (), [dim(s) for s in tensor.shape], tensor.dtype))
            entry = self._tracked[id(tensor)]
        return entry.value

    def enter(self, example: Any) -> Any:
        """``example`` as an input of the window: aliases of its tensors, each a leaf."""
        if isinstance(example, (tuple, list)) and not isinstance(example, torch.Size):
            return type(example)(map(self.enter, example))
        if isinstance(example, torch.Tensor):
            alias = example.detach()
            self._leaves += 1
            self.track(alias, self.table.leaf(self._leaves, [dim(s) for s in alias.shape], alias.dtype))
            return alias
        return example

    def mutate(self, tensor: torch.Tensor, value: Value) -> None:
        """``tensor`` was overwritten with ``value``: its views and what it is a view of follow, the rest of its
        storage becomes unknown."""
        self.value(tensor)
        entry = self._tracked[id(tensor)]
        entry.value, done = value, {id(entry)}
        while entry.parent is not None:
            parent, new = entry.parent, entry.value
            parent.value = entry.invert(new) if entry.invert else self._unknown(parent)
            done.add(id(parent))
            entry = parent
        self._rederive(entry, done)
        for other in self._storages[storage(tensor)]:
            if id(other) not in done:
                other.value = self._unknown(other)

    def _rederive(self, entry: _Tracked, done: set[int]) -> None:
        for child in entry.children:
            if id(child) not in done:
                assert child.derive is not None
                child.value = child.derive(entry.value)
                done.add(id(child))
            self._rederive(child, done)

    def _unknown(self, entry: _Tracked) -> Value:
        return self.table.fresh("overwritten", (), entry.value.shape, entry.value.dtype)

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        written = [
            a
            for schema_arg, a in _bind(func, args, kwargs)
            if schema_arg.alias_info is not None and schema_arg.alias_info.is_write
        ]
        at = self.table.at
        if at is not None and written:
            into = {storage(t) for t in _tensors(written)}
            self.wrote[at] = self.wrote.get(at, frozenset()) | {s for s in into if self._born.get(s) is not at}
        if at is not None and torch.Tag.nondeterministic_seeded in func.tags:
            self.random.add(at)
        values = aten.translate(self.table, func, args, kwargs, self.value)
        out = func(*args, **kwargs)
        if written:
            if len(written) == 1 and isinstance(written[0], torch.Tensor):
                self.mutate(written[0], self._block(values.inplace(written[0])))
            else:
                for tensor in _tensors(written):
                    self.mutate(tensor, self._unknown(self._tracked[id(tensor)]))
        known = {id(t) for t in written}
        results = out if isinstance(out, (tuple, list)) else (out,)
        for i, tensor in enumerate(results):
            if isinstance(tensor, torch.Tensor) and id(tensor) not in known:
                value, view = values.output(i, tensor)
                self.track(tensor, self._block(value), view)
        return out

    def _block(self, value: Value) -> Value:
        """A differentiable value computed with gradients off is not the same to autograd."""
        if self.blocked and value.dtype.is_floating_point:
            return self.table.make("detach", (value,), value.shape, value.dtype)
        return value


def _bind(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    for i, schema_arg in enumerate(func._schema.arguments):
        if i < len(args):
            yield schema_arg, args[i]
        elif schema_arg.name in kwargs:
            yield schema_arg, kwargs[schema_arg.name]


def _tensors(items: Sequence[Any]) -> Iterator[torch.Tensor]:
    for item in items:
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, (tuple, list)):
            yield from _tensors(item)


def storage(tensor: torch.Tensor) -> int:
    """What tensors that share memory have in common."""
    return int(tensor.untyped_storage()._cdata)


@dataclass(slots=True)
class Shadow:
    """The result of a run.

    ``ran`` has the value of each node when it ran (tuples for nodes with several outputs; nodes without a tensor are
    absent); ``now`` the value at the window's end: a node can be named as an operand there only if both agree.
    """

    table: Table
    ran: dict[torch.fx.Node, Value | tuple[Value | None, ...]]
    now: dict[torch.fx.Node, Value]
    scalars: dict[torch.fx.Node, torch.SymFloat]
    effects: Effects

    def carrier(self, value: Value) -> torch.fx.Node | None:
        """The first node that holds ``value`` at the window's end."""
        for node, present in self.now.items():
            if present is value:
                return node
        return None


def run(
    nodes: Sequence[torch.fx.Node],
    leaves: Sequence[torch.fx.Node],
    blocked: Callable[[torch.fx.Node], bool],
    autocasts: Sequence[torch.fx.Node] = (),
) -> Shadow:
    """Run ``nodes``, in order, on the example values of ``leaves``, inside the autocast regions that
    ``autocasts`` open.

    Raises NeedsGuard where a guard would be needed and Unsupported where an operation cannot run on fake tensors.
    """
    table = Table()
    recorder = Recorder(table)
    env: dict[torch.fx.Node, Any] = {}
    fake_mode = next((m for leaf in leaves if (m := _fake_mode(leaf)) is not None), None)
    if fake_mode is None:
        raise Unsupported("no fake tensor enters the window")
    ran: dict[torch.fx.Node, Value | tuple[Value | None, ...]] = {}
    with contextlib.ExitStack() as stack:
        stack.enter_context(_torch.tracing_detached())
        stack.enter_context(torch.no_grad())
        stack.enter_context(_torch.no_new_guards(fake_mode.shape_env, NeedsGuard))
        if any(
            isinstance(s, torch.SymInt) for leaf in leaves for s in getattr(leaf.meta.get("example_value"), "shape", ())
        ):
            stack.enter_context(_torch.uncached(fake_mode))
        stack.enter_context(fake_mode)
        for leaf in leaves:
            table.at = leaf
            env[leaf] = recorder.enter(leaf.meta.get("example_value"))
            _note(recorder, ran, leaf, env[leaf])
        stack.enter_context(recorder)

        def call(node: torch.fx.Node, env: dict[torch.fx.Node, Any]) -> Any:
            table.at = node
            recorder.blocked = blocked(node)
            known = node.meta.get("example_value")
            if isinstance(known, _SCALARS):
                return known
            if isinstance(node.target, torch._ops.HigherOrderOperator):
                _require_functional(node)
                out = recorder.enter(known)
            else:
                out = call_node(node, env)
            _note(recorder, ran, node, out)
            return out

        run_nodes(nodes, env, autocasts, call)
    now = {
        node: recorder.value(out)
        for node, out in env.items()
        if isinstance(out, torch.Tensor) and recorder.value(out) is ran[node]
    }
    scalars = {node: out for node, out in env.items() if isinstance(out, torch.SymFloat)}
    storages = {node: frozenset(storage(t) for t in _tensors([out])) for node, out in env.items()}
    other = frozenset(n for n in nodes if n in recorder.random or acts_unseen(n))
    return Shadow(table, ran, now, scalars, Effects(storages, recorder.wrote, other))


def _require_functional(node: torch.fx.Node) -> None:
    """A higher-order operator is not followed: its results are new values, if its bodies write into no input."""
    for arg in node.all_input_nodes:
        module = node.graph.owning_module
        if arg.op != "get_attr" or module is None:
            continue
        for part in str(arg.target).split("."):
            module = getattr(module, part)
        if not isinstance(module, torch.fx.GraphModule):
            continue
        inputs = {_example_storage(n) for n in module.graph.nodes if n.op == "placeholder"}
        for inner in module.graph.nodes:
            if writes(inner) and any(_example_storage(n) in inputs | {None} for n in inner.all_input_nodes[:1]):
                raise Unsupported(f"a body of {node.name} may write into its inputs ({inner.name})")


def _example_storage(node: torch.fx.Node) -> int | None:
    value = node.meta.get("example_value")
    return storage(value) if isinstance(value, torch.Tensor) else None


#: Sizes and numbers are what they were when the graph was traced: running them again could only ask for guards.
_SCALARS = (bool, int, float, torch.SymBool, torch.SymInt, torch.SymFloat, torch.Size)


def _note(
    recorder: Recorder, ran: dict[torch.fx.Node, Value | tuple[Value | None, ...]], node: torch.fx.Node, out: Any
) -> None:
    if isinstance(out, torch.Tensor):
        ran[node] = recorder.value(out)
    elif isinstance(out, (tuple, list)):
        ran[node] = tuple(recorder.value(o) if isinstance(o, torch.Tensor) else None for o in out)


def _fake_mode(node: torch.fx.Node) -> Any:
    return getattr(node.meta.get("example_value"), "fake_mode", None)
