"""Every private name of torch that the package uses, and the versions for which they were tried."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

#: Lowest supported version, and the first one above the supported range.
SUPPORTED: tuple[tuple[int, int], tuple[int, int]] = ((2, 11), (2, 16))


def version() -> tuple[int, int]:
    """(major, minor) of the running torch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def unsupported() -> str | None:
    """Why this torch is outside the supported range, None where it is inside."""
    low, high = SUPPORTED
    if low <= version() < high:
        return None
    return f"torch {torch.__version__} is outside the supported range {low[0]}.{low[1]} to {high[0]}.{high[1] - 1}"


def inductor_modes() -> dict[str, dict[str, Any]]:
    """Inductor's modes and the configuration each stands for."""
    from torch._inductor import list_mode_options

    return list_mode_options()


def inductor_config_keys() -> frozenset[str]:
    """Every key that Inductor accepts in ``options``."""
    from torch._inductor import list_options

    return frozenset(list_options())


def counters(group: str) -> Counter[str]:
    """The counter group of ``torch._dynamo.utils.counters`` named ``group``."""
    from torch._dynamo.utils import counters as groups

    return groups[group]


def list_backends() -> list[str]:
    """Names that ``torch.compile(backend=...)`` takes."""
    import torch._dynamo

    return torch._dynamo.list_backends()


def compile_id() -> str | None:
    """``frame/recompile`` of the compile in progress, for example ``"0/1"``; None outside of one."""
    from torch._guards import CompileContext

    current = CompileContext.current_compile_id()
    return None if current is None else str(current)


def trace_artifact(name: str, value: Mapping[str, Any]) -> None:
    """Write ``value`` as a JSON artifact to the structured trace; costs nothing where no trace is taken."""
    from torch._logging._internal import trace_structured

    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "json"},
        payload_fn=lambda: json.dumps(value),
    )


def break_reason(graph: torch.fx.GraphModule) -> tuple[str, str] | None:
    """(``file:line``, reason) of the graph break that ended ``graph``; None where it ended at a return."""
    reason = getattr(graph, "compile_subgraph_reason", None)
    if reason is None or not reason.graph_break:
        return None
    frame = reason.user_stack[-1] if reason.user_stack else None
    why = re.split(r"\s+(?:Hint|Developer debug context):", str(reason.reason))[0]
    why = " ".join(why.replace("\n  Explanation:", ":", 1).split())
    return f"{frame.filename}:{frame.lineno}" if frame else "", why


def compile_isolated(fn: torch.nn.Module | Callable[..., Any], backend: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compile(fn, backend=backend)`` that neither fills nor drops the caches of other compiles.

    Before torch 2.13 caches cannot be kept apart; there all of them are dropped first.
    """
    settings: dict[str, Any] = {"isolate_recompiles": True}
    if not isolates_recompiles():
        torch._dynamo.reset()
        settings = {}
    compiled: Callable[..., Any] = torch.compile(fn, backend=backend, **settings)
    return compiled


def isolates_recompiles() -> bool:
    """Whether ``torch.compile`` can keep the caches of one call apart, as it can since torch 2.13."""
    return "isolate_recompiles" in inspect.signature(torch.compile).parameters


def compiled_call(module: torch.nn.Module) -> Callable[..., Any] | None:
    """What ``module.compile()`` has installed, None where it was not called."""
    found: Callable[..., Any] | None = module._compiled_call_impl
    return found


def set_compiled_call(module: torch.nn.Module, call: Callable[..., Any] | None) -> None:
    """Install ``call`` as ``module.compile()`` would, or None to take it away."""
    module._compiled_call_impl = call


def original_module(module: torch.nn.Module) -> torch.nn.Module:
    """The module under ``torch.compile``'s wrapper; ``module`` itself where it has none."""
    from torch._dynamo.eval_frame import OptimizedModule

    return module._orig_mod if isinstance(module, OptimizedModule) else module


@contextlib.contextmanager
def tracing_detached() -> Iterator[None]:
    """Work on fake tensors inside a backend without touching the compile in progress."""
    from torch._guards import tracing
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with tracing(None), unset_fake_temporarily():
        yield


@contextlib.contextmanager
def no_new_guards(shape_env: Any, error: type[Exception]) -> Iterator[None]:
    """Raise ``error`` where code inside would add a guard to ``shape_env`` (None: nothing is symbolic)."""
    if shape_env is None:
        yield
        return

    def refuse(expr: Any, value: Any) -> None:
        raise error(f"{expr} == {value}")

    # asked before every guard, and before its answer is cached; torch 2.12 has error_on_new_guards() for this
    shape_env._check_frozen = refuse
    try:
        yield
    finally:
        del shape_env._check_frozen


def enters_autocast(node: torch.fx.Node) -> bool:
    """Whether ``node`` opens an autocast region of the graph."""
    return node.target is torch.amp.autocast_mode._enter_autocast


def exits_autocast(node: torch.fx.Node) -> bool:
    """Whether ``node`` closes one; its argument is the node that opened it."""
    return node.target is torch.amp.autocast_mode._exit_autocast


def switches(node: torch.fx.Node) -> bool:
    """Whether ``node`` opens or closes a mode, such as inference mode, or a transform of ``torch.func``."""
    name = getattr(node.target, "__name__", "")
    return name.startswith(("_enter_", "_exit_")) or name.endswith(("_increment_nesting", "_decrement_nesting"))


def sets_grad_enabled(node: torch.fx.Node) -> bool:
    """Whether ``node`` switches gradient recording for the nodes after it."""
    return node.target is torch._C._set_grad_enabled


def fake_mode() -> contextlib.AbstractContextManager[Any]:
    """A context in which tensors are made without storage; Dynamo compiles under it."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode: contextlib.AbstractContextManager[Any] = FakeTensorMode()
    return mode


def inductor(options: Mapping[str, Any]) -> Callable[..., Any]:
    """Inductor as a backend with ``options``, checked as ``torch.compile(..., options=options)`` does."""
    return torch._TorchCompileInductorWrapper(None, dict(options) or None, None)


@contextlib.contextmanager
def eager() -> Iterator[None]:
    """Run on real tensors inside a backend, as outside of any compile: no fake mode, no other dispatch mode, no
    inference mode."""
    from torch.utils._python_dispatch import _disable_current_modes

    with tracing_detached(), _disable_current_modes(), torch.inference_mode(mode=False):
        yield


def decompose_in_inductor(op: torch._ops.OpOverload, composition: Callable[..., Any]) -> None:
    """Let Inductor trace ``composition`` in place of ``op``, and call ``op`` where it returns NotImplemented."""
    from torch._inductor import decomposition

    def traced(*args: Any) -> Any:
        result = composition(*args)
        if result is NotImplemented:
            from torch._inductor.lowering import FALLBACK_ALLOW_LIST

            FALLBACK_ALLOW_LIST.add(op.name())  # else Inductor refuses an operator that has a decomposition
        return result

    decomposition.decompositions[op] = traced
    decomposition.fast_random_decomps.cache_clear()  # a copy of the table


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` has no data because it is being traced."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def cache_dir() -> str:
    """Inductor's cache folder, where what is known across processes is kept."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir as folder

    return folder()


def device_name(device: torch.device) -> str:
    """The GPU's name, or the device type."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def free_memory(device_type: str) -> int:
    """Free bytes of the current device of that type, of the machine for the CPU."""
    if device_type == "cuda":
        return torch.cuda.mem_get_info()[0]
    pages, size = os.sysconf("SC_AVPHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return pages * size


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is wrapped by a transform of ``torch.func``."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def seeded_devices() -> list[int]:
    """The CUDA devices whose random state ``torch.manual_seed`` would change."""
    return list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []


def untraced() -> contextlib.AbstractContextManager[Any]:
    """Make fake tensors while a graph is being traced without putting them into it."""
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode

    if get_proxy_mode() is None:
        return contextlib.nullcontext()
    mode: contextlib.AbstractContextManager[Any] = disable_proxy_modes_tracing()
    return mode


@contextlib.contextmanager
def uncached(fake_mode: Any) -> Iterator[None]:
    """Run operations on the fake tensors of ``fake_mode`` without its cache. Putting a result with symbolic sizes into
    the cache compares storage sizes, which asks for guards that the operation itself does not need."""
    was = fake_mode.cache_enabled
    fake_mode.cache_enabled = False
    try:
        yield
    finally:
        fake_mode.cache_enabled = was


def before_ddp_split(see: Callable[[Callable[..., Any], dict[str, Any], torch.fx.GraphModule, Any], Any]) -> None:
    """Call ``see(backend, its keyword arguments, graph, inputs)`` with each whole graph that DDP is about to cut into
    one graph a bucket; the context manager that it returns is open while the pieces are compiled."""
    from torch._dynamo.backends.distributed import DDPOptimizer

    original = DDPOptimizer.compile_fn

    @functools.wraps(original)
    def compile_fn(self: Any, gm: torch.fx.GraphModule, example_inputs: Any, *args: Any, **kwargs: Any) -> Any:
        backend, options = self.backend_compile_fn, {}
        while hasattr(backend, "_torchdynamo_orig_backend"):
            backend = backend._torchdynamo_orig_backend
        if hasattr(backend, "compiler_fn"):
            backend, options = backend.compiler_fn, backend.kwargs
        with see(backend, options, gm, example_inputs):
            return original(self, gm, example_inputs, *args, **kwargs)

    DDPOptimizer.compile_fn = compile_fn  # type: ignore[method-assign]
