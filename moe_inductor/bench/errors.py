"""The one exception of the benchmarks."""


class BenchError(Exception):
    """A request that cannot be right, or an arm that did not do what it was asked; the message says what to do."""
