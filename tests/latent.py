"""Calls of latent attention on the Hopper kernel, whether or not it is chosen by itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from cupyflash import support
from cupyflash.fa_version import _resolve, _resolve_problem


@contextmanager
def hopper_latent() -> Iterator[None]:
    """A context in which version 3 is built for latent attention too."""
    with pytest.MonkeyPatch.context() as patch:
        rows = tuple(replace(row, built=True) for row in support.SUPPORT)
        patch.setattr(support, "SUPPORT", rows)
        _clear()
        yield
    _clear()


def _clear() -> None:
    _resolve.cache_clear()
    _resolve_problem.cache_clear()
