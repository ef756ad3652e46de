"""One test for each private name of torch that ``_torch.py`` uses: a new torch breaks here first."""

import contextlib

import pytest
import torch

from moe_inductor import _torch


def test_version_gate(monkeypatch):
    assert _torch.unsupported() is None
    assert _torch.version() == tuple(int(p) for p in torch.__version__.split(".")[:2])
    for outside in ((2, 10), (2, 16), (3, 0)):
        monkeypatch.setattr(_torch, "version", lambda outside=outside: outside)
        assert "supported range 2.11 to 2.15" in (_torch.unsupported() or "")


def test_inductor_modes():
    modes = _torch.inductor_modes()
    assert {"default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"} <= set(modes)
    assert modes["reduce-overhead"] == {"triton.cudagraphs": True}


def test_inductor_config_keys():
    assert {"max_autotune", "triton.cudagraphs", "epilogue_fusion"} <= _torch.inductor_config_keys()


def test_counters():
    _torch.counters("megamoe_test")["a"] += 2
    assert torch._dynamo.utils.counters["megamoe_test"]["a"] == 2
    del torch._dynamo.utils.counters["megamoe_test"]


def test_list_backends():
    assert "inductor" in _torch.list_backends()


def test_compile_id():
    seen = []

    def backend(graph, inputs):
        seen.append(_torch.compile_id())
        return graph.forward

    _torch.compile_isolated(lambda x: x + 1, backend)(torch.ones(2))
    assert _torch.compile_id() is None
    assert seen[0].split("/")[1].startswith("0")


def test_trace_artifact(monkeypatch):
    import torch._logging._internal as internal

    written = []
    monkeypatch.setattr(
        internal,
        "trace_structured",
        lambda name, metadata_fn, payload_fn: written.append((name, metadata_fn(), payload_fn())),
    )
    _torch.trace_artifact("report", {"a": 1})
    assert written == [("artifact", {"name": "report", "encoding": "json"}, '{"a": 1}')]


def test_break_reason():
    seen = []

    def backend(graph, inputs):
        seen.append(_torch.break_reason(graph))
        return graph.forward

    def broken(x):
        y = x.sin()
        torch._dynamo.graph_break(msg="told so")
        return y.cos()

    _torch.compile_isolated(broken, backend)(torch.ones(2))
    assert seen[1] is None
    where, why = seen[0]
    assert "test_torch_symbols.py:" in where
    assert "told so" in why and "Hint" not in why and "http" not in why


def test_compile_isolated_keeps_other_compiles():
    calls = []

    def backend(graph, inputs):
        calls.append(graph)
        return graph.forward

    def f(x):
        return x + 1

    mine = torch.compile(f, backend=backend)
    mine(torch.ones(2))
    for _ in range(20):  # more than Dynamo's recompile limit of 8
        _torch.compile_isolated(f, lambda graph, inputs: graph.forward)(torch.ones(2))
    mine(torch.ones(2))
    assert len(calls) == (1 if _torch.isolates_recompiles() else 2)


def test_compiled_call():
    module = torch.nn.Linear(2, 2)
    assert _torch.compiled_call(module) is None
    module.compile(backend="eager")
    call = _torch.compiled_call(module)
    assert callable(call)
    _torch.set_compiled_call(module, None)
    assert _torch.compiled_call(module) is None
    _torch.set_compiled_call(module, call)
    assert _torch.compiled_call(module) is call


def test_original_module():
    module = torch.nn.Linear(2, 2)
    assert _torch.original_module(torch.compile(module, backend="eager")) is module
    assert _torch.original_module(module) is module


def test_fake_mode():
    with _torch.fake_mode():
        weight = torch.empty(1 << 20, 1 << 20)
        out = _torch.compile_isolated(lambda w: w[:2, :2] + 1, lambda graph, inputs: graph.forward)(weight)
    assert out.shape == (2, 2) and out.device.type == "cpu"


def test_is_fake_and_tracing_detached():
    with _torch.fake_mode():
        assert _torch.is_fake(torch.empty(2))
        with _torch.tracing_detached():
            assert not _torch.is_fake(torch.empty(2))
    assert torch._guards.TracingContext.try_get() is None


def test_eager_inside_a_backend():
    seen = []

    def backend(graph, inputs):
        with _torch.eager():
            made = torch.ones(2) * 3
            seen.append((_torch.is_fake(made), made.is_inference(), made.tolist()))
        return graph.forward

    with torch.inference_mode():
        _torch.compile_isolated(lambda x: x + 1, backend)(torch.ones(2))
    assert seen == [(False, False, [3.0, 3.0])]


def test_no_new_guards():
    class Needed(Exception):
        pass

    seen = []

    def backend(graph, inputs):
        size = next(x for x in inputs if isinstance(x, torch.SymInt))
        env = size.node.shape_env
        guards = len(env.guards)
        with _torch.no_new_guards(env, Needed):
            seen.append(isinstance(size * 2, torch.SymInt))
        with pytest.raises(Needed), _torch.no_new_guards(env, Needed):
            bool(size == 6)
        with _torch.no_new_guards(None, Needed):
            seen.append(len(env.guards) == guards)
        return graph.forward

    torch.compile(lambda x: x + 1, backend=backend, dynamic=True)(torch.ones(6, 2))
    assert seen == [True, True]


def test_nodes_that_switch_autocast_and_gradients():
    found = []

    def backend(graph, inputs):
        found.extend(
            test.__name__
            for node in graph.graph.nodes
            for test in (_torch.enters_autocast, _torch.exits_autocast, _torch.sets_grad_enabled)
            if test(node)
        )
        return graph.forward

    def f(x):
        with torch.autocast("cpu", torch.bfloat16):
            y = x @ x
        with torch.no_grad():
            return y, x + 1

    _torch.compile_isolated(f, backend)(torch.ones(2, 2, requires_grad=True))
    assert found == ["enters_autocast", "exits_autocast", "sets_grad_enabled", "sets_grad_enabled"]


def test_inductor_checks_its_options():
    assert callable(_torch.inductor({})) and callable(_torch.inductor({"max_autotune": False}))
    with pytest.raises(RuntimeError, match="Unexpected optimization option no_such_option"):
        _torch.inductor({"no_such_option": 1})


def test_cache_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert _torch.cache_dir() == str(tmp_path)


def test_device_facts():
    assert _torch.device_name(torch.device("cpu")) == "cpu"
    assert _torch.free_memory("cpu") > 0


def test_untraced_values_stay_out_of_the_graph():
    from torch.fx.experimental.proxy_tensor import make_fx

    def f(x):
        with _torch.untraced():
            x.new_empty(3).add_(1)
        return x + 1

    graph = make_fx(f)(torch.ones(2))
    assert [n.name for n in graph.graph.nodes if n.op == "call_function"] == ["add"]
    with _torch.untraced():
        assert torch.ones(1).item() == 1


def test_symbolic_results_are_not_cached(monkeypatch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode()
    with _torch.uncached(mode):
        assert not mode.cache_enabled
    assert mode.cache_enabled


def test_ddp_shows_the_graph_that_it_is_about_to_cut(monkeypatch):
    from torch._dynamo.backends.distributed import DDPOptimizer

    seen = []

    @contextlib.contextmanager
    def see(backend, options, graph, inputs):
        seen.append((backend, options, graph))
        yield

    def backend(graph, inputs, *, options):
        return graph.forward

    monkeypatch.setattr(DDPOptimizer, "compile_fn", lambda self, gm, inputs: "cut")
    _torch.before_ddp_split(see)
    wrapper = torch._TorchCompileWrapper(backend, None, {"moe.strict": True}, None)
    graph = torch.fx.symbolic_trace(lambda x: x + 1)
    optimizer = DDPOptimizer(25 << 20, wrapper)
    assert optimizer.compile_fn(graph, [torch.ones(1)]) == "cut"
    assert seen == [(backend, {"options": {"moe.strict": True}}, graph)]
