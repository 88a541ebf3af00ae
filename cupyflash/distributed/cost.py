"""How long a decode step over ranks takes, on paper: bytes, latencies, launches."""

from __future__ import annotations

from dataclasses import dataclass

from .combine import combine_method
from .plan import step_bytes

__all__ = ["Links", "StepShape", "Times", "predict"]


@dataclass(frozen=True, slots=True)
class Links:
    """A machine's rates; all in seconds and bytes a second.

    Attributes
    ----------
    read : float
        What a decode kernel reads from a GPU's memory.
    link : float
        What a GPU sends to the others and receives from them, each way.
    collective : float
        A collective of no bytes, at two ranks; each doubling of the ranks costs ``hop`` more.
    hop : float
    launch : float
        One small kernel in a captured step.
    kernel : float
        What the attention kernel takes beside its reads.
    """

    read: float
    link: float
    collective: float
    hop: float
    launch: float
    kernel: float


@dataclass(frozen=True, slots=True)
class StepShape:
    """One decode step of one layer: ``requests`` new tokens, each over ``context`` keys.

    Attributes
    ----------
    requests, context : int
    num_heads_q, num_heads_kv, head_dim : int
        Of all ranks together; KV heads are on each of them.
    itemsize, kv_itemsize : int
    """

    requests: int
    context: int
    num_heads_q: int = 32
    num_heads_kv: int = 8
    head_dim: int = 128
    itemsize: int = 2
    kv_itemsize: int = 2

    @property
    def kv_bytes(self) -> int:
        row = 2 * self.num_heads_kv * self.head_dim * self.kv_itemsize
        return self.requests * self.context * row


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of a step's parts on one rank.

    Attributes
    ----------
    read, kernel, links, latency, launches : float
    """

    read: float
    kernel: float
    links: float
    latency: float
    launches: float

    @property
    def total(self) -> float:
        return self.read + self.kernel + self.links + self.latency + self.launches


# Of a captured step besides the pass over the context and the collectives, what runs beside those
# left out: kernels, and branches of the graph that wait for each other. From steps on two GPUs.
_SMALL_KERNELS = {"a2a": 12, "ag": 7, "ag_rs": 22}


def _merges(size: int, combine: str) -> int:
    """Launches beyond those of two ranks, as `combine_states` makes them."""
    if combine == "ag_rs" or size == 2:
        return 0
    return size - 1 if size <= 8 else 12


def predict(machine: Links, size: int, shape: StepShape, combine: str = "auto") -> Times:
    """The time of one layer's step on ``size`` ranks; the parts follow one another.

    Parameters
    ----------
    machine : Links
    size : int
    shape : StepShape
    combine : {"auto", "a2a", "ag", "ag_rs"}

    Returns
    -------
    Times
    """
    read = shape.kv_bytes / size / machine.read
    if size == 1:
        return Times(read, machine.kernel, 0.0, 0.0, 0.0)
    heads = -(-shape.num_heads_q // size)
    states = size * shape.requests * heads * (shape.head_dim * shape.itemsize + 4)
    combine = combine_method(combine, size, states)
    moved = step_bytes(size, shape.requests, heads, shape.head_dim, shape.itemsize, combine)
    latency = len(moved) * (machine.collective + machine.hop * ((size - 1).bit_length() - 1))
    return Times(
        read,
        machine.kernel,
        (size - 1) * sum(moved.values()) / machine.link,
        latency,
        (_SMALL_KERNELS[combine] + _merges(size, combine)) * machine.launch,
    )
