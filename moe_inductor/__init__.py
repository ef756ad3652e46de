"""Finds Mixture-of-Experts layers in a compiled graph and runs them as fused, trainable operators.

``torch.compile(model, backend="megamoe")`` needs no import of this package. What it offers beside the backend:

* :func:`explain`: what would be fused in a model, and why the rest would not
* :func:`report`: what was fused in this process
* :func:`doctor`: what can run here
"""

from .doctor import doctor
from .explain import explain
from .report import report

__all__ = ["__version__", "doctor", "explain", "report"]

__version__ = "0.1.0"
