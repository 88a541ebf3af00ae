"""Files that a command will write, looked at before its work instead of after it."""

from __future__ import annotations

import os
from pathlib import Path

from .terminal import CommandError, need_matplotlib

__all__ = ["check_outputs"]


def check_outputs(*files: Path | None, plot: Path | None = None) -> None:
    """Refuse what could not be written when the work is done.

    Parameters
    ----------
    *files : Path or None
    plot : Path, optional
        Drawn by matplotlib, which knows the format by the name's ending.

    Raises
    ------
    CommandError
    """
    if plot is not None:
        need_matplotlib()
        from matplotlib.figure import Figure

        known = Figure().canvas.get_supported_filetypes()
        if plot.suffix[1:].lower() not in known:
            raise CommandError(f"--plot {plot}: the name must end in .{', .'.join(known)}")
    for path in (*files, plot):
        if path is not None:
            _check(path)


def _check(path: Path) -> None:
    if path.is_dir():
        raise CommandError(f"{path} is a folder; name a file")
    if not path.parent.is_dir():
        raise CommandError(f"{path}: there is no folder {path.parent}")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise CommandError(f"{path} cannot be written")
