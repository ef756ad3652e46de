"""The command line of the benchmarks: arguments in, a record out."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .errors import BenchError

_MODELS = "qwen3-30b,qwen3-235b,olmoe,mixtral-8x7b,deepseek-v3,gpt-oss-20b"


def add(commands: Any) -> None:
    """Add ``bench`` and its subcommands to a parser's commands; each sets ``bench`` to a function of the arguments."""
    bench = commands.add_parser("bench", help="measure a layer, decoding or a model step against peers")
    kinds = bench.add_subparsers(required=True, metavar="what")

    layer = kinds.add_parser("layer", help="one layer, routing given: forward, backward, inference, memory, errors")
    _add_layers(layer, shapes="qwen3-30b")
    layer.add_argument("--tokens", type=_numbers, metavar="N,...", help="default 16384, on a CPU 64")
    layer.add_argument("--experts", type=_numbers, metavar="N,...", help="in place of the shape's, for scaling in E")
    layer.add_argument("--routing", type=_names, default=("uniform",), metavar="NAME,...", help="uniform, zipf, empty")
    layer.add_argument("--peers", type=_names, default=("eager", "inductor", "megamoe"), metavar="NAME,...",
                       help="eager, inductor[:function|:module], megamoe, sonic, deep_gemm, liger")  # fmt: skip
    layer.add_argument("--tune", action="store_true", help="Inductor's max-autotune-no-cudagraphs beside its default")
    layer.add_argument("--no-inductor", action="store_true", help="compile nothing: a trial of the harness in seconds")
    layer.add_argument("--no-profile", action="store_true", help="no times by kernel")
    layer.add_argument("--no-ceilings", action="store_true", help="no dense matmuls and copies, hence no floor")
    layer.set_defaults(bench=_layer)

    decode = kinds.add_parser("decode", help="a few tokens, inference under CUDA graphs")
    _add_layers(decode, shapes="qwen3-30b,gpt-oss-20b")
    decode.add_argument("--tokens-list", type=_numbers, default=(1, 4, 16, 64, 256), metavar="N,...")
    decode.add_argument("--peers", type=_names, default=("inductor", "megamoe"), metavar="NAME,...")
    decode.set_defaults(bench=_decode)

    model = kinds.add_parser("model", help="a training step of a slice of Qwen3-30B-A3B")
    model.add_argument("--layers", type=_positive, default=12)
    model.add_argument("--batch", type=_batches, default=((1, 16384), (4, 4096)), metavar="BxS,...",
                       help="default 1x16384,4x4096")  # fmt: skip
    model.add_argument("--arms", type=_names, default=("eager", "inductor", "megamoe"), metavar="NAME,...")
    _add_common(model)
    model.set_defaults(bench=_model)

    show = kinds.add_parser("show", help="tables, and plots, from the JSON of runs")
    show.add_argument("files", nargs="+", type=Path, metavar="FILE")
    show.add_argument("--summary", action="store_true", help="one table of all layers instead")
    show.add_argument("--plots", type=Path, metavar="FOLDER", help="draw PNG and SVG files there")
    show.set_defaults(bench=_show)


def _add_layers(parser: argparse.ArgumentParser, shapes: str) -> None:
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--shape", type=_names, default=_names(shapes), metavar="NAME,...", help=f"of {_MODELS}, ...")
    what.add_argument("--config", type=Path, metavar="PATH", help="a config.json, or the folder that holds one")
    _add_common(parser)


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kernel", type=_names, default=("auto",), metavar="NAME,...",
                        help="moe.kernel of the megamoe arm (default auto), and of a second one")  # fmt: skip
    parser.add_argument("--samples", type=_positive, default=13, help="runs of which the median is taken (default 13)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the record goes (default: stdout)")


def run(args: argparse.Namespace, argv: list[str]) -> int:
    """Run a benchmark; 1 where an arm failed. Raises BenchError on a request that cannot be right."""
    args.argv = argv
    todo: Callable[[argparse.Namespace], int] = args.bench
    return todo(args)


def _layer(args: argparse.Namespace) -> int:
    from . import layer
    from .peers import Choice

    cuda = _has_cuda()
    settings = layer.Settings(args.samples, profile=not args.no_profile, ceilings=not args.no_ceilings)
    choice = Choice(args.peers, args.kernel, tune=args.tune, inductor=not args.no_inductor)
    tokens = args.tokens or ((16384,) if cuda else (64,))

    def cells(clock: Any) -> Iterator[dict[str, Any]]:
        for shape in _shapes(args):
            for experts in args.experts or (shape.experts,):
                for count in tokens:
                    for routing in args.routing:
                        sized = layer.with_experts(shape, experts)
                        yield layer.measure(sized, count, routing, choice, settings, clock, _say)

    _check_names(args, choice)
    return _record("layer", args, cells, "cuda" if cuda else "cpu")


def _decode(args: argparse.Namespace) -> int:
    from . import decode
    from .layer import Settings
    from .peers import Choice

    _need_cuda("decode")
    choice, settings = Choice(args.peers, args.kernel), Settings(args.samples)

    def cells(clock: Any) -> Iterator[dict[str, Any]]:
        for shape in _shapes(args):
            for count in args.tokens_list:
                yield decode.measure(shape, count, "uniform", choice, settings, clock, _say)

    _check_names(args, choice)
    return _record("decode", args, cells, "cuda")


def _model(args: argparse.Namespace) -> int:
    from . import layer, model
    from .peers import Choice
    from .shapes import named

    _need_cuda("model")
    _check_kernels(args.kernel)
    wrong = [name for name in args.arms if name not in model.ARMS]
    if wrong:
        raise BenchError(f"no arm is called {wrong[0]!r}; known: {', '.join(model.ARMS)}")
    choice = Choice(args.arms, args.kernel)
    settings = layer.Settings(args.samples, profile=False, ceilings=False)

    def cells(clock: Any) -> Iterator[dict[str, Any]]:
        alone: dict[int, dict[str, Any]] = {}
        for batch, sequence in args.batch:
            part = model.Slice(args.layers, batch, sequence)
            if part.tokens not in alone:
                shape = named("qwen3-30b")
                alone[part.tokens] = layer.measure(shape, part.tokens, "uniform", choice, settings, clock, _say)
            yield model.measure(part, args.arms, choice, alone[part.tokens], clock, _say)

    return _record("model", args, cells, "cuda")


def _show(args: argparse.Namespace) -> int:
    from . import plots, record, show

    records = [record.read(file) for file in args.files]
    print(show.summary(records) if args.summary else show.markdown(records), end="")
    if args.plots:
        for file in plots.draw(records, args.plots):
            _say(str(file))
    return 0


def _record(kind: str, args: argparse.Namespace, cells: Callable[[Any], Iterator[dict[str, Any]]], device: str) -> int:
    """Run the cells and write the record; to a file after each of them, so that an interruption loses one at most."""
    from . import record, show
    from .timing import DISCARDED, FLUSH_BYTES, clock

    plain = {k: v for k, v in vars(args).items() if k not in ("run", "bench", "argv", "json")}
    settings = {k: str(v) if isinstance(v, Path) else v for k, v in plain.items()}
    made = record.start(kind, settings | {"discarded": DISCARDED, "flush_bytes": FLUSH_BYTES}, args.argv)
    for cell in cells(clock(device)):
        made["cells"].append(record.finite(cell))
        if args.json:
            record.write(made, args.json)
    if args.json:
        print(show.markdown([made]), end="")
    else:
        record.write(made, None)
    return 1 if any("error" in arm for cell in made["cells"] for arm in cell["arms"].values()) else 0


def _shapes(args: argparse.Namespace) -> list[Any]:
    from .shapes import from_path, named

    return [from_path(args.config)] if args.config else [named(name) for name in args.shape]


def _check_names(args: argparse.Namespace, choice: Any) -> None:
    """Refuse wrong names before the first cell takes its time."""
    from .layer import with_experts
    from .peers import arms
    from .routing import ROUTINGS

    _check_kernels(args.kernel)
    for name in getattr(args, "routing", ()):
        if name not in ROUTINGS:
            raise BenchError(f"no routing is called {name!r}; known: {', '.join(ROUTINGS)}")
    for shape in _shapes(args):
        arms(shape, choice)
        for experts in getattr(args, "experts", None) or ():
            with_experts(shape, experts)


def _check_kernels(names: tuple[str, ...]) -> None:
    from ..options import Kernel, near

    families = [kernel.value for kernel in Kernel]
    for name in names:
        if name not in families:
            raise BenchError(f"no kernel family is called {name!r}{near(name, families)}")


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _need_cuda(what: str) -> None:
    if not _has_cuda():
        raise BenchError(f"bench {what} needs a CUDA device (megamoe doctor says more); bench layer runs on a CPU")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in text.split(","))


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _batches(text: str) -> tuple[tuple[int, int], ...]:
    pairs = [part.split("x") for part in text.split(",")]
    if any(len(pair) != 2 for pair in pairs):
        raise argparse.ArgumentTypeError("takes batch x sequence, such as 1x16384,4x4096")
    return tuple((_positive(batch), _positive(sequence)) for batch, sequence in pairs)
