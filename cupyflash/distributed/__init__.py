"""Decode context parallelism: one sequence's keys over many ranks, states merged between them."""

from .attention import context_parallel_attention
from .combine import combine_states
from .communicator import Communicator, DisagreementError, RankLostError
from .mpi import MpiCommunicator
from .nccl import NcclCommunicator
from .sharding import Sharding
from .spawn import spawn

__all__ = [
    "Communicator",
    "DisagreementError",
    "MpiCommunicator",
    "NcclCommunicator",
    "RankLostError",
    "Sharding",
    "combine_states",
    "context_parallel_attention",
    "spawn",
]
