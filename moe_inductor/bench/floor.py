"""The least time of a layer: for each kernel of the fused form the longer of its matmul and its memory time, with
the pre-activation h saved and nothing else. bf16 throughout; the gathered rows are read once a token.

    forward   gather + up + activation | down | combine
    backward  dA + activation backward | dW2 | dX | dW1 | reduce
"""

from __future__ import annotations

from dataclasses import dataclass

from .shapes import Shape


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel: ``gemm`` is (M, N, K) of its matmul summed over experts (M the routed rows; for a weight's gradient
    K are), None where it has none; ``moved`` are the bytes that it must read and write."""

    name: str
    phase: str
    gemm: tuple[int, int, int] | None
    moved: int

    @property
    def flops(self) -> int:
        """Two a multiply-add."""
        if self.gemm is None:
            return 0
        m, n, k = self.gemm
        return 2 * m * n * k

    def ms(self, matmul: float, memory: float) -> float:
        """Least time in ms at ``matmul`` FLOP/s and ``memory`` bytes/s."""
        return 1e3 * max(self.flops / matmul, self.moved / memory)


def kernels(shape: Shape, tokens: int) -> tuple[Kernel, ...]:
    """The kernels of one layer, forward then backward."""
    t, h, i, e = tokens, shape.hidden, shape.inter, shape.experts
    n = t * shape.top_k
    w1, w2 = 2 * e * 2 * i * h, 2 * e * h * i
    x, y, pre, act = 2 * t * h, 2 * n * h, 2 * n * 2 * i, 2 * n * i
    return (
        Kernel("up", "forward", (n, 2 * i, h), x + w1 + pre + act),
        Kernel("down", "forward", (n, h, i), act + w2 + y),
        Kernel("combine", "forward", None, y + x),
        Kernel("dA", "backward", (n, i, h), x + w2 + pre + pre + act),
        Kernel("dW2", "backward", (h, i, n), x + act + w2),
        Kernel("dX", "backward", (n, h, 2 * i), pre + w1 + y),
        Kernel("dW1", "backward", (2 * i, h, n), x + pre + w1),
        Kernel("reduce", "backward", None, y + x),
    )


def floor(shape: Shape, tokens: int, matmul: float, memory: float) -> dict[str, float]:
    """ms by kernel, and the sums ``forward``, ``backward`` and ``forward_backward``."""
    times = {k.name: k.ms(matmul, memory) for k in kernels(shape, tokens)}
    sums = {
        phase: sum(times[k.name] for k in kernels(shape, tokens) if k.phase == phase)
        for phase in ("forward", "backward")
    }
    return times | sums | {"forward_backward": sums["forward"] + sums["backward"]}


def saved(shape: Shape, tokens: int) -> int:
    """Bytes of h."""
    return 2 * tokens * shape.top_k * 2 * shape.inter


def weight_read(shape: Shape, distinct: float, memory: float) -> float:
    """ms to read the parameters of ``distinct`` experts once, the floor of decoding."""
    return 1e3 * distinct * shape.expert_bytes / memory
