"""The console script ``megamoe``: ``demo``, ``explain``, ``doctor`` and ``bench``.

Results go to stdout, as text or with ``--json`` as one JSON object; progress and errors go to stderr. Exit codes: 0,
1 where a requirement is not met, 2 for input that cannot be right. Nothing is read from the network.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import _torch
from .bench import command as bench_command
from .bench.errors import BenchError


class InputError(Exception):
    """A command line that cannot be right; the message says what to write."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. ``argv`` is ``sys.argv[1:]`` unless given."""
    argv = sys.argv[1:] if argv is None else argv
    args = _parser().parse_args(argv)
    try:
        if hasattr(args, "bench"):
            with _quiet():
                return bench_command.run(args, list(argv))
        run: Callable[[argparse.Namespace], int] = args.run
        return run(args)
    except (InputError, BenchError) as error:
        print(f"megamoe: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("megamoe: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megamoe", description="Fused Mixture-of-Experts layers for torch.compile.")
    commands = parser.add_subparsers(required=True, metavar="command")

    demo = commands.add_parser("demo", help="train a small MoE model eager, under Inductor and under megamoe")
    demo.add_argument("--steps", type=_positive, default=8, help="training steps of each arm (default %(default)s)")
    demo.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    demo.add_argument("--require", type=int, metavar="N", help="fused layers to insist on (default: all)")
    demo.set_defaults(run=_demo)

    explain = commands.add_parser("explain", help="say what would be fused in a model, and why the rest would not")
    explain.add_argument("target", help="a config folder, or module:factory returning (model, args[, kwargs])")
    explain.add_argument("--require", type=int, metavar="N", help="exit with 1 where fewer regions are fused")
    explain.add_argument("--option", action="append", default=[], metavar="K=V", help="as in torch.compile(options=)")
    explain.add_argument("--eval", action="store_true", help="explain inference (config folder; default: training)")
    explain.add_argument("--tokens", type=_positive, default=64, help="sequence length (config folder; default 64)")
    explain.add_argument("--layers", type=_positive, help="explain the first layers only (config folder)")
    explain.add_argument("--dtype", help="such as bfloat16 (config folder; default: the config's)")
    explain.set_defaults(run=_explain)

    doctor = commands.add_parser("doctor", help="say what can run here")
    doctor.set_defaults(run=_doctor)

    bench_command.add(commands)

    for command in (demo, explain, doctor):
        command.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _doctor(args: argparse.Namespace) -> int:
    from .doctor import doctor

    diagnosis = doctor()
    print(diagnosis.to_json() if args.json else diagnosis)
    return 1 if diagnosis.problems else 0


def _demo(args: argparse.Namespace) -> int:
    try:
        importlib.import_module("transformers")
    except ImportError as error:
        raise InputError(f"the demo trains a transformers model: pip install transformers ({error})") from error
    import torch

    from .demo import run

    if args.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch finds no CUDA device here (megamoe doctor says more)")
    with _quiet():
        result = run(steps=args.steps, device=args.device)
    print(result.to_json() if args.json else result)
    wanted = result.layers if args.require is None else args.require
    return 0 if result.passed and result.fused >= wanted else 1


def _explain(args: argparse.Namespace) -> int:
    from .explain import explain
    from .options import OptionError

    options = dict(_option(text) for text in args.option)
    folder = Path(args.target)
    with _quiet(), contextlib.ExitStack() as stack:
        if folder.is_dir():
            model, inputs, kwargs = _from_config(folder, args, stack)
        elif ":" in args.target:
            model, inputs, kwargs = _from_factory(args.target)
        else:
            raise InputError(f"{args.target!r} is neither a folder with a config.json nor module:factory")
        _note("running the model once through Dynamo ...")
        try:
            report = explain(model, *inputs, options=options, **kwargs)
        except OptionError as error:
            raise InputError(str(error)) from error
        except (Exception, SystemExit) as error:
            raise InputError(f"the model could not be run: {_line(error)}") from error
    print(report.to_json() if args.json else report)
    if args.require is None:
        return 0
    try:
        report.require(args.require)
    except RuntimeError as error:
        _note(f"megamoe: {error}")
        return 1
    return 0


def _option(text: str) -> tuple[str, object]:
    key, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"--option takes KEY=VALUE, not {text!r}")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def _from_factory(target: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Call ``module:factory``; the module is looked for in the current folder first."""
    module, _, name = target.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        factory = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # the module's own code runs, and any text may stand for its name
        raise InputError(f"cannot load {target}: {_line(error)}") from error
    finally:
        sys.path.remove(os.getcwd())
    try:
        made = factory()
    except (Exception, SystemExit) as error:
        raise InputError(f"{target} failed: {_line(error)}") from error
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not callable(made[0]):
        raise InputError(f"{target} must return (model, args) or (model, args, kwargs)")
    inputs = made[1] if isinstance(made[1], (tuple, list)) else (made[1],)
    kwargs = made[2] if len(made) == 3 else {}
    if not isinstance(kwargs, Mapping) or not all(isinstance(name, str) for name in kwargs):
        raise InputError(f"{target} must return its kwargs as a dictionary of names, not {type(kwargs).__name__}")
    return made[0], tuple(inputs), dict(kwargs)


def _from_config(
    folder: Path, args: argparse.Namespace, stack: contextlib.ExitStack
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """A model of ``folder``'s config with fake weights: full sizes, no memory. ``stack`` keeps the fake mode alive."""
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} has no config.json")
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch

    try:
        import transformers
    except ImportError as error:
        raise InputError(f"a config folder needs transformers: pip install transformers ({error})") from error
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise InputError(f"transformers {transformers.__version__} cannot read {folder}: {_line(error)}") from error
    dtype = getattr(torch, args.dtype, None) if args.dtype else (config.dtype or torch.float32)
    if not isinstance(dtype, torch.dtype):
        raise InputError(f"--dtype {args.dtype!r} is not a torch dtype; bfloat16, float16 and float32 are")
    text = config.get_text_config()
    if args.layers is not None:
        text.num_hidden_layers = min(args.layers, text.num_hidden_layers)
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[: text.num_hidden_layers]
    named = getattr(transformers, (config.architectures or [""])[0], None)
    _note(f"building {config.model_type} with fake weights, {text.num_hidden_layers} layers ...")
    stack.enter_context(_torch.fake_mode())
    try:
        model = named._from_config(config, dtype=dtype) if named else _causal_lm(config, dtype)
    except Exception as error:
        raise InputError(f"transformers cannot build {config.model_type} from {folder}: {_line(error)}") from error
    model.train(not args.eval)
    if args.eval:
        stack.enter_context(torch.no_grad())
    return model, (), {"input_ids": torch.zeros(1, args.tokens, dtype=torch.long), "use_cache": False}


def _causal_lm(config: Any, dtype: Any) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def _line(error: BaseException) -> str:
    """The first line of ``error`` with its type."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


@contextlib.contextmanager
def _quiet() -> Any:
    """Without Dynamo's and transformers' warnings, which are about other people's code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
