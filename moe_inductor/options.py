"""What the user may ask for: ``torch.compile(..., options={"moe.precision": ...})`` and a few environment variables.

Keys that start with ``moe.`` are ours, every other key is Inductor's and goes to it unchanged. Options win over the
environment, the environment over the defaults.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, TypeVar

from . import _torch

PREFIX = "moe."


class OptionError(ValueError):
    """An option or an environment variable of the user's that cannot be right. The message says what to write."""


class Precision(str, Enum):
    """Of the expert matmuls."""

    AUTO = "auto"  # what the model has
    BF16 = "bf16"
    FP8 = "fp8"  # e4m3, forward and dgrad
    MXFP8 = "mxfp8"  # e4m3 with 1x32 power-of-two scales
    FP8_BWD = "fp8_bwd"  # bf16 forward, fp8 backward


class Require(str, Enum):
    """What to do where a region that looks like a Mixture of Experts stays unfused."""

    NONE = "none"  # one warning
    ALL = "all"  # raise


class Verify(str, Enum):
    """Which rewrites are checked on numbers at compile time."""

    OFF = "off"
    FIRST = "first"  # once per spec, plan and device, within a budget of time and memory
    ALL = "all"  # every region, no budget


class Recompute(str, Enum):
    """What the forward keeps for the backward."""

    NONE = "none"  # the pre-activation
    ALL = "all"  # the inputs only


class WeightCache(str, Enum):
    """How long a quantised weight is reused."""

    OFF = "off"
    STEP = "step"  # until the optimizer's step


class Kernel(str, Enum):
    """A kernel family to force, for bisection."""

    AUTO = "auto"
    REFERENCE = "reference"
    CPU = "cpu"
    LIBRARY = "library"
    TRITON = "triton"
    HOPPER = "hopper"


@dataclass(frozen=True, slots=True)
class Options:
    """The values of all ``moe.`` keys; a field's key is its name after ``moe.``.

    ``disabled`` has no key: it is ``MEGAMOE_DISABLE``, and leaves every graph to Inductor.
    """

    precision: Precision = Precision.AUTO
    precision_rules: tuple[tuple[str, Precision], ...] = ()
    require: Require = Require.NONE
    verify: Verify = Verify.FIRST
    recompute: Recompute = Recompute.NONE
    mode: str | None = None
    weight_cache: WeightCache = WeightCache.OFF
    kernel: Kernel = Kernel.AUTO
    ep_max_tokens: int | None = None  #: tokens a rank may bring to one step
    ep_capacity: float | None = None  #: expert-parallel workspace rows over their mean, at least 1
    strict: bool = False
    disabled: bool = False

    def precision_for(self, names: Sequence[str]) -> Precision:
        """The precision of the region that owns the parameters ``names``, fully qualified from the compiled root.

        A rule's glob may name a parameter or any module above it; the first rule that fits decides. Raises OptionError
        where rules would give one region two precisions, as they can where layers share their compiled code.
        """
        found = {name: self._rule_for(name) for name in names}
        if len(set(found.values())) > 1:
            shown = ", ".join(f"{name}: {p.value}" for name, p in found.items())
            raise OptionError(
                f"moe.precision_rules gives one region several precisions ({shown}); write globs that end at the "
                "experts module, and equal precisions for layers that share compiled code"
            )
        return next(iter(found.values()), self.precision)

    def _rule_for(self, name: str) -> Precision:
        parts = name.split(".")
        paths = [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
        for glob, precision in self.precision_rules:
            if any(fnmatch.fnmatchcase(path, glob) for path in paths):
                return precision
        return self.precision


KEYS: tuple[str, ...] = tuple(PREFIX + f.name for f in fields(Options) if f.name != "disabled")

E = TypeVar("E", bound=Enum)


def near(name: str, known: Iterable[str]) -> str:
    """``"; did you mean ..."`` where one of ``known`` is close to ``name``, else the list of them."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"


def _member(source: str, value: object, kind: type[E]) -> E:
    values = [str(m.value) for m in kind]
    if isinstance(value, Enum):
        value = value.value
    if not isinstance(value, str):
        raise OptionError(f"{source} takes one of {', '.join(values)}, not {_typed(value)}")
    if value not in values:
        raise OptionError(f"{source} cannot be {value!r}{near(value, values)}")
    return kind(value)


def _typed(value: object) -> str:
    return f"{value!r} ({type(value).__name__})"


def _one_of(kind: type[E]) -> Callable[[str, object], E]:
    return lambda source, value: _member(source, value, kind)


def _boolean(source: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise OptionError(f"{source} takes True or False, not {_typed(value)}")
    return value


def _tokens(source: str, value: object) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise OptionError(f"{source} takes a number of tokens (int), not {_typed(value)}")
    if value < 1:
        raise OptionError(f"{source} must be at least 1, not {value}")
    return value


def _capacity(source: str, value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise OptionError(f"{source} takes a factor (float), not {_typed(value)}")
    if not (math.isfinite(value) and value >= 1):
        raise OptionError(f"{source} is rows over their mean and must be finite and at least 1, not {value}")
    return float(value)


def _mode(source: str, value: object) -> str | None:
    if value is None:
        return None
    modes = _torch.inductor_modes()
    if not isinstance(value, str):
        raise OptionError(f"{source} takes one of Inductor's modes ({', '.join(modes)}), not {_typed(value)}")
    if value not in modes:
        raise OptionError(f"{source} cannot be {value!r}{near(value, modes)}")
    return value


def _rules(source: str, value: object) -> tuple[tuple[str, Precision], ...]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise OptionError(f"{source} takes a list of (glob, precision) pairs, not {_typed(value)}")
    rules = []
    for i, rule in enumerate(value):
        if isinstance(rule, str) or not isinstance(rule, Sequence) or len(rule) != 2 or not isinstance(rule[0], str):
            raise OptionError(f"{source}[{i}] must be a (glob, precision) pair, not {_typed(rule)}")
        rules.append((rule[0], _member(f"{source}[{i}]", rule[1], Precision)))
    return tuple(rules)


_READERS: dict[str, Callable[[str, object], object]] = {
    "precision": _one_of(Precision),
    "precision_rules": _rules,
    "require": _one_of(Require),
    "verify": _one_of(Verify),
    "recompute": _one_of(Recompute),
    "mode": _mode,
    "weight_cache": _one_of(WeightCache),
    "kernel": _one_of(Kernel),
    "ep_max_tokens": _tokens,
    "ep_capacity": _capacity,
    "strict": _boolean,
}

_SWITCH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


def _switch(source: str, value: object) -> bool:
    text = str(value).lower()
    if text not in _SWITCH:
        raise OptionError(f"{source} cannot be {value!r}; known: {', '.join(_SWITCH)}")
    return _SWITCH[text]


#: variable -> field and reader
ENVIRONMENT: dict[str, tuple[str, Callable[[str, object], object]]] = {
    "MEGAMOE_DISABLE": ("disabled", _switch),
    "MEGAMOE_PRECISION": ("precision", _READERS["precision"]),
    "MEGAMOE_REQUIRE": ("require", _READERS["require"]),
}


def from_environment(environ: Mapping[str, str]) -> dict[str, object]:
    """Fields set by the environment; an empty variable counts as unset. Raises OptionError on a wrong value."""
    return {
        field: read(variable, environ[variable])
        for variable, (field, read) in ENVIRONMENT.items()
        if environ.get(variable, "")
    }


def resolve(
    options: Mapping[str, object] | None, mode: str | None, environ: Mapping[str, str]
) -> tuple[Options, dict[str, Any]]:
    """Our options, and the dictionary for Inductor with ``mode`` or ``moe.mode`` written out in it.

    Raises OptionError, a ValueError, on an unknown ``moe.`` key, on a wrong value or type, on a key that is no string
    or only resembles one of ours, and where a mode and an explicit key disagree. Other keys that Inductor does not know
    are left to it.
    """
    values = from_environment(environ)
    inductor: dict[str, Any] = {}
    if options is not None and not isinstance(options, Mapping):
        raise OptionError(f"options takes a dictionary, not {_typed(options)}")
    for key, value in (options or {}).items():
        if not isinstance(key, str):
            raise OptionError(f"options has the key {_typed(key)}; keys are strings such as 'moe.precision'")
        if not key.startswith(PREFIX):
            inductor[key] = value
        elif key not in KEYS:
            raise OptionError(f"unknown option {key!r}{near(key, KEYS)}")
        else:
            name = key.removeprefix(PREFIX)
            values[name] = _READERS[name](key, value)
    ours = Options(**values)  # type: ignore[arg-type]
    if inductor:
        _refuse_lookalikes(inductor)
    mode = _mode("mode", mode)
    if mode is not None and ours.mode is not None and mode != ours.mode:
        raise OptionError(f"mode={mode!r} and moe.mode={ours.mode!r} disagree: give one of them")
    return ours, _with_mode(inductor, "mode" if mode else "moe.mode", mode or ours.mode)


def _refuse_lookalikes(inductor: Mapping[str, object]) -> None:
    known = _torch.inductor_config_keys()
    for key in inductor:
        if key.replace("-", "_") in known:
            continue
        bare = key.lower().replace("-", "_")
        for prefix in ("megamoe", "moe"):
            if bare.startswith(prefix) and bare[len(prefix) : len(prefix) + 1] in (".", "_", ":"):
                bare = bare[len(prefix) + 1 :]
        close = difflib.get_close_matches(bare, [k.removeprefix(PREFIX) for k in KEYS], n=1, cutoff=0.8)
        if close:
            raise OptionError(f"unknown option {key!r}; did you mean {PREFIX + close[0]!r}?")


def _with_mode(inductor: dict[str, Any], source: str, mode: str | None) -> dict[str, Any]:
    if mode is None:
        return inductor
    given = {key.replace("-", "_"): key for key in inductor}
    expanded = _torch.inductor_modes()[mode]
    clashes = [
        f"{given[key]}={inductor[given[key]]!r} (the mode sets {value!r})"
        for key, value in expanded.items()
        if key in given and inductor[given[key]] != value
    ]
    if clashes:
        raise OptionError(f"{source}={mode!r} disagrees with the options {', '.join(clashes)}: drop one side")
    return {**expanded, **inductor}
