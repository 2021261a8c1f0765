"""The `cute-ep` program."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from rich.console import Console
from rich.text import Text

import cute_ep
from cute_ep.api.errors import EPError
from cute_ep.cli import bench, build, demo, flags, info, layout, tune, verify

COMMANDS = {
    "info": (info, "devices, links, compiled kernels and memory needs"),
    "build": (build, "compile kernels ahead of time, no GPU needed"),
    "demo": (demo, "one MoE layer on real text, checked against a dense layer"),
    "verify": (verify, "compare this machine with the reference, bit for bit"),
    "bench": (bench, "times of dispatch and combine beside the copy ceilings"),
    "tune": (tune, "measure launch shapes on this machine and keep the fastest ones for later runs"),
    "flags": (flags, "what ranks were waiting for when their waits timed out"),
    "layout": (layout, "print and draw a CuTe layout"),
}
FAILURE = 2
"""Exit code of every EPError, the same as argparse's for wrong arguments."""
BROKEN_PIPE = 141
"""Exit code where the reader of the output has gone, as of a program that SIGPIPE ends."""
PIPE_WIDTH = 160
"""Columns of tables where the output is no terminal."""


class OutputConsole(Console):
    """Standard output; a reader that leaves early (`| head`) ends the program without a word."""

    def on_broken_pipe(self) -> NoReturn:
        """Nothing more is written, also not when Python flushes at exit."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(BROKEN_PIPE)


class _StderrHandler(logging.Handler):
    """To standard error as it is at the time, so that lines go above a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        """One line."""
        sys.stderr.write(f"cute-ep: {record.getMessage()}\n")


@contextmanager
def logging_to_stderr() -> Iterator[None]:
    """Show what the package logs, INFO and above, on standard error."""
    logger, handler = logging.getLogger("cute_ep"), _StderrHandler()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def make_parser() -> argparse.ArgumentParser:
    """The parser of all sub-commands; `command` in its result names the one chosen."""
    parser = argparse.ArgumentParser(prog="cute-ep", description="Mixture-of-Experts dispatch and combine between GPUs")
    parser.add_argument("--version", action="version", version=f"cute-ep {cute_ep.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, summary) in COMMANDS.items():
        module.add_arguments(commands.add_parser(name, help=summary, description=module.__doc__))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: arguments after the program's name; None: those of this process.

    Returns:
        0, what the command returns (1: it found a difference), or 2 after an EPError, which is printed on
        standard error as one line.

    Raises:
        SystemExit: from argparse, for help (0) and wrong arguments (2); 141 where the reader of the output has gone.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    args = make_parser().parse_args(words)
    args.command_line = shlex.join(["cute-ep", *words])
    console = OutputConsole(soft_wrap=False)
    if not console.is_terminal:
        console = OutputConsole(width=PIPE_WIDTH)
    try:
        with logging_to_stderr():
            return COMMANDS[args.command][0].run(args, console)
    except EPError as error:
        line = "cute-ep: " + " ".join(str(error).split())
        Console(stderr=True, soft_wrap=True).print(Text(line, style="red"))
        return FAILURE
    except KeyboardInterrupt:
        return 130
