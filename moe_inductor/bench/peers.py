"""The arms: what runs a layer, and why a known peer does not.

``eager`` and ``inductor:function`` run :func:`operands.grouped`, ``inductor:module`` transformers' experts module with
its ``grouped_mm`` form; a trailing ``:tune`` is Inductor's max-autotune-no-cudagraphs. ``megamoe`` is the same bare
function under ``torch.compile(backend="megamoe")``. The others are packages that must be installed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..backend import megamoe, with_inner
from ..spec import Layout
from .errors import BenchError
from .operands import Form, Operands, batched, grouped
from .shapes import Shape

#: Dynamo keeps 8 compiles of a function: training and inference of each of ours, of Inductor and of its tuning.
MOST_KERNELS = 2
#: In the order of capture: those that might break a capture come last.
PEERS = ("eager", "inductor", "megamoe", "sonic", "deep_gemm", "liger")


class Unavailable(Exception):
    """Why a peer does not run here or takes no layer of this form."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to run a layer. ``bind`` gives the call for some operands, with the leaves of its gradients by the names
    of :meth:`Operands.leaves`. ``fuses``: our report must show one fused region and none refused."""

    name: str
    bind: Callable[[Operands], tuple[Callable[[], Tensor], dict[str, Tensor]]]
    trains: bool = True
    fuses: bool = False
    uncaptured: str = ""  #: why no CUDA graph can hold it
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Choice:
    """Which arms, and how they are built. ``kernels`` are values of ``moe.kernel``, the first that of the arm megamoe,
    each other one of an arm megamoe:<value>; without ``inductor`` our rewritten graph runs as it is, which takes no C++
    or Triton compile."""

    peers: tuple[str, ...] = ("eager", "inductor", "megamoe")
    kernels: tuple[str, ...] = ("auto",)
    tune: bool = False
    inductor: bool = True


def arms(shape: Shape, choice: Choice) -> tuple[list[Arm], dict[str, str]]:
    """The arms of ``choice`` for a layer, and the reason for each peer that does not run."""
    for name in choice.peers:
        if name.split(":")[0] not in PEERS:
            raise BenchError(
                f"no peer is called {name!r}; known: {', '.join(PEERS)}, inductor:function, inductor:module"
            )
    if len(choice.kernels) > MOST_KERNELS:
        raise BenchError(f"{len(choice.kernels)} kernel families are too many for one run, {MOST_KERNELS} are not")
    made: list[Arm] = []
    skipped: dict[str, str] = {}
    for peer in sorted(dict.fromkeys(choice.peers), key=lambda name: PEERS.index(name.split(":")[0])):
        try:
            made += _make(peer, shape, choice)
        except Unavailable as why:
            skipped[peer] = str(why)
    return list({arm.name: arm for arm in made}.values()), skipped


def _make(peer: str, shape: Shape, choice: Choice) -> list[Arm]:
    if peer == "eager":
        return [Arm("eager", _plain(grouped(shape)))]
    if peer.startswith("inductor"):
        if not choice.inductor:
            raise Unavailable("--no-inductor")
        return _inductor(shape, peer, choice)
    if peer == "megamoe":
        return _fused(shape, choice)
    if not shape.plain:
        raise Unavailable("takes plain swiglu experts only here")
    if not torch.cuda.is_available():
        raise Unavailable("needs a CUDA device")
    return [{"sonic": _sonic, "deep_gemm": _deep_gemm, "liger": _liger}[peer](shape)]


def _plain(form: Form) -> Callable[[Operands], tuple[Callable[[], Tensor], dict[str, Tensor]]]:
    return lambda o: (lambda: form(*o.args()), o.leaves())


def compiled(name: str, form: Form, mode: str | None = None) -> Arm:
    """``form`` under Inductor."""
    return Arm(name, _plain(torch.compile(form, mode=mode, fullgraph=True, dynamic=False)))


def backend(choice: Choice) -> Callable[..., Any]:
    """Our backend; without Inductor, the pass and then the graph as it is."""
    return megamoe if choice.inductor else with_inner(lambda gm, _: gm)


def _fused(shape: Shape, choice: Choice) -> list[Arm]:
    made = []
    for i, kernel in enumerate(choice.kernels):
        options: dict[str, Any] = {"moe.kernel": kernel, "moe.require": "all"}
        run = torch.compile(grouped(shape), backend=backend(choice), options=options, fullgraph=True, dynamic=False)
        notes = {"kernel": kernel} | ({} if choice.inductor else {"inner": "eager"})
        made.append(Arm(f"megamoe:{kernel}" if i else "megamoe", _plain(run), fuses=True, notes=notes))
    return made


def _inductor(shape: Shape, peer: str, choice: Choice) -> list[Arm]:
    wanted = peer.partition(":")[2]
    if wanted not in ("", "function", "module"):
        raise BenchError(f"inductor runs 'function' or 'module', not {wanted!r}")
    modes = {"": None} | ({":tune": "max-autotune-no-cudagraphs"} if choice.tune else {})
    made = []
    for suffix, mode in modes.items():
        if wanted in ("", "function"):
            made.append(compiled(f"inductor:function{suffix}", grouped(shape), mode))
        if wanted in ("", "module"):
            made.append(Arm(f"inductor:module{suffix}", _module(shape, mode)))
    return made


def _module(shape: Shape, mode: str | None) -> Callable[[Operands], tuple[Callable[[], Tensor], dict[str, Tensor]]]:
    """transformers' own experts module on the operands' storage."""
    _import("transformers")

    def bind(o: Operands) -> tuple[Callable[[], Tensor], dict[str, Tensor]]:
        module, names = _experts_module(shape)
        for ours, theirs in names.items():
            setattr(module, theirs, nn.Parameter(o.leaves()[ours].detach()))
        run = torch.compile(module, mode=mode, fullgraph=True, dynamic=False)
        leaves = {name: getattr(module, names[name]) if name in names else t for name, t in o.leaves().items()}
        return lambda: run(o.x, o.idx, o.s), leaves

    return bind


def _experts_module(shape: Shape) -> tuple[nn.Module, dict[str, str]]:
    """The module with parameters on the meta device, and our names of them to its own."""
    names = {"w1": "gate_up_proj", "w2": "down_proj"}
    act = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_pytorch_tanh", "reglu": "relu"}
    with torch.device("meta"):
        if shape.activation == "clamped_swiglu":
            from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss

            config: Any = gpt_oss.GptOssConfig(
                hidden_size=shape.hidden, intermediate_size=shape.inter, num_local_experts=shape.experts
            )
            module: Any = _with(config, gpt_oss.GptOssExperts)
            module.alpha, module.limit = shape.alpha, shape.limit
            return module, names | {"b1": "gate_up_proj_bias", "b2": "down_proj_bias"}
        from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3

        config = qwen3.Qwen3MoeConfig(
            hidden_size=shape.hidden,
            moe_intermediate_size=shape.inter,
            num_experts=shape.experts,
            hidden_act=act[shape.activation],
        )
        return _with(config, qwen3.Qwen3MoeExperts), names


def _with(config: Any, experts: Callable[[Any], nn.Module]) -> nn.Module:
    config._experts_implementation = "grouped_mm"
    return experts(config)


def for_decoding(shape: Shape, choice: Choice) -> tuple[list[Arm], dict[str, str]]:
    """Inductor's grouped and batched forms, and ours; no other peer takes part."""
    made = []
    if "inductor" in choice.peers:
        made += [compiled("inductor:grouped", grouped(shape)), compiled("inductor:batched", batched(shape))]
    if "megamoe" in choice.peers:
        made += _fused(shape, choice)
    return made, {name: "not measured in decoding" for name in choice.peers if name not in ("inductor", "megamoe")}


def _import(name: str) -> ModuleType:
    """A module, or Unavailable: a package may assert CUDA_HOME, miss a symbol, or exit, while it is imported."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise Unavailable("not installed" if error.name == name else f"cannot be imported: {error}") from error
    except (Exception, SystemExit) as error:
        raise Unavailable(f"cannot be imported: {type(error).__name__}: {error}") from error


def _sonic(shape: Shape) -> Arm:
    """SonicMoE, through the adapter beside this file."""
    adapter = _import(f"{__package__}.sonic")
    why = adapter.available()
    if why:
        raise Unavailable(why)

    def bind(o: Operands) -> tuple[Callable[[], Tensor], dict[str, Tensor]]:
        run = adapter.build(o.x, o.idx, o.s, o.w1, o.w2)
        return lambda: run(o.x, o.idx, o.s, o.w1, o.w2), o.leaves()

    return Arm("sonic", bind)


def _liger(shape: Shape) -> Arm:
    """Liger's autograd function; int32 ids are its contract, so the cast is timed."""
    function = getattr(_import("liger_kernel.ops.fused_moe"), "LigerFusedMoEFunction", None)
    if function is None:
        raise Unavailable("this liger-kernel has no LigerFusedMoEFunction")

    def bind(o: Operands) -> tuple[Callable[[], Tensor], dict[str, Tensor]]:
        return lambda: function.apply(o.x, o.w1, o.w2, o.idx.int(), o.s), o.leaves()

    return Arm("liger", bind, uncaptured="reads its number of tiles on the host")


def _deep_gemm(shape: Shape) -> Arm:
    """DeepGEMM's grouped matmuls for inference: each expert's rows start at a multiple of its row tile, in a buffer of
    the largest size that this can take, so nothing is read on the host."""
    package = _import("deep_gemm")
    mm = getattr(package, "m_grouped_bf16_gemm_nt_contiguous", None)
    alignment = getattr(package, "get_mk_alignment_for_contiguous_layout", None)
    if mm is None or alignment is None:
        raise Unavailable("this deep_gemm has no grouped bf16 matmul")
    if shape.layout is not Layout.OUT_IN:
        raise Unavailable("its weights are [E, out, in]")
    tile = int(alignment())

    def layer(x: Tensor, idx: Tensor, s: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        experts, top_k = w1.shape[0], idx.shape[1]
        ids, perm = torch.sort(idx.reshape(-1))
        counts = torch.histc(ids.int(), bins=experts, min=0, max=experts - 1).long()
        padded = (counts + tile - 1) // tile * tile
        shift = (padded.cumsum(0) - padded) - (counts.cumsum(0) - counts)
        place = torch.arange(ids.numel(), device=ids.device) + shift[ids]
        size = (ids.numel() + experts * (tile - 1)) // tile * tile
        layout = torch.full((size,), -1, dtype=torch.int32, device=x.device)
        layout[place] = ids.int()
        rows = x.new_zeros(size, x.shape[1])
        rows[place] = x[perm // top_k]
        h = x.new_empty(size, w1.shape[1])
        mm(a=rows, b=w1, d=h, grouped_layout=layout)
        g, u = h.chunk(2, -1)
        out = x.new_empty(size, x.shape[1])
        mm(a=torch.nn.functional.silu(g) * u, b=w2, d=out, grouped_layout=layout)
        weighted = out[place] * s.reshape(-1)[perm].unsqueeze(-1)
        inverse = torch.empty_like(perm)
        inverse[perm] = torch.arange(perm.shape[0], device=perm.device)
        return weighted[inverse].view(-1, top_k, x.shape[1]).sum(1).to(x.dtype)

    def bind(o: Operands) -> tuple[Callable[[], Tensor], dict[str, Tensor]]:
        return lambda: layer(o.x, o.idx, o.s, o.w1, o.w2), {}

    return Arm("deep_gemm", bind, trains=False)


def fastest(times: dict[str, float], prefixes: Sequence[str]) -> str | None:
    """The name with the smallest time among those that start with a prefix; None where there is none."""
    found = [name for name in times if name.startswith(tuple(prefixes))]
    return min(found, key=times.__getitem__, default=None)
