"""The backend's name in accelerate, and so in ``TrainingArguments(torch_compile_backend="megamoe")``.

``TrainingArguments`` passes the name to accelerate's ``TorchDynamoPlugin``, which looks it up in ``DynamoBackend``, a
closed enum, before ``torch.compile`` is called. No torch entry point is read by then, so :func:`enable` has to be
called once, before the ``Trainer`` is made. A model that was compiled beforehand needs none of this.
"""

from __future__ import annotations

from typing import Any

NAME = "MEGAMOE"  # accelerate upper-cases what it looks up and lower-cases what it hands to torch.compile


def enable() -> None:
    """Let accelerate accept the backend ``"megamoe"`` in this process. Calling it again changes nothing.

    The enum's own hook for unknown values answers this one name; its members, their order and the errors for other
    names stay as they are. Raises ImportError where accelerate is not installed.
    """
    backends = _dynamo_backend()
    if is_enabled() or NAME in backends.__members__:
        return
    member = str.__new__(backends, NAME)
    member._name_ = member._value_ = NAME
    member.__objclass__ = backends
    earlier = vars(backends).get("_missing_")

    def missing(cls: type[Any], value: object) -> Any:
        if value == NAME:
            return member
        return earlier.__get__(None, cls)(value) if earlier else super(backends, cls)._missing_(value)

    missing.earlier = earlier  # type: ignore[attr-defined]
    backends._missing_ = classmethod(missing)


def disable() -> None:
    """Undo :func:`enable`. Accelerators that exist keep their backend."""
    if not is_enabled():
        return
    backends = _dynamo_backend()
    earlier = vars(backends)["_missing_"].__func__.earlier
    if earlier is None:
        del backends._missing_
    else:
        backends._missing_ = earlier


def is_enabled() -> bool:
    """Whether :func:`enable` is in force. Raises ImportError where accelerate is not installed."""
    hook = vars(_dynamo_backend()).get("_missing_")
    return hasattr(getattr(hook, "__func__", None), "earlier")


def _dynamo_backend() -> Any:
    try:
        from accelerate.utils import DynamoBackend
    except ImportError as error:
        raise ImportError('accelerate is not installed: pip install "accelerate>=1.2"') from error
    return DynamoBackend
