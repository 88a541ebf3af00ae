"""Calls that are made again: each has the bits of the first."""

from __future__ import annotations


def bits(results):
    return [array.tobytes() for array in results]


def check_repeats(inputs, attention, precision=None, times=1, **options):
    """A call gives what the oracle does, and the same bits ``times`` times more.

    Parameters
    ----------
    inputs : cupyflash.testing.Inputs
    attention : callable
    precision : dict, optional
        What `Inputs.expected` has to know of the kernels; nothing if None.
    times : int
    **options
        Of each call.

    Returns
    -------
    tuple of numpy.ndarray
        The first result.
    """
    first = inputs.call(attention, **options)
    out, lse = first
    wants_lse = options.get("return_softmax_lse", True)
    inputs.expected(**(precision or {})).check(out, lse if wants_lse else None)
    wanted = bits(first)
    for _ in range(times):
        assert bits(inputs.call(attention, **options)) == wanted
    return first
