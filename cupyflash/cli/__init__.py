"""Command line: ``python -m cupyflash info | bench | precompile | cache | check | ...``."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

from cupyflash.runtime.errors import CompileError

from . import bench, cache, check, explain, export, info, precompile
from .terminal import CommandError

__all__ = ["main"]

_COMMANDS = (info, bench, precompile, cache, check, explain, export)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Parameters
    ----------
    arguments : sequence of str, optional
        Those of the process if None.

    Returns
    -------
    int
        The exit status: 0 = done, 1 = a check failed, 2 = it cannot run here or as asked, 130 =
        interrupted.
    """
    parser = argparse.ArgumentParser(prog="cupyflash", description="Attention for LLM inference.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add(commands)
    options = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal may have no µ
        sys.stdout.reconfigure(errors="replace")
    try:
        return int(options.run(options))
    except (CommandError, CompileError, ValueError, NotImplementedError) as error:
        print(f"cupyflash: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("cupyflash: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        print(f"cupyflash: {where}{error.strerror or error}", file=sys.stderr)
        return 2
