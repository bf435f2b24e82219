"""`trivet bench latency|throughput|serve`: one module of app/bench each, imported when it is asked for."""

from __future__ import annotations

import argparse
from argparse import Namespace
from importlib import import_module
from typing import TYPE_CHECKING, cast

from .parser import ArgumentParser

if TYPE_CHECKING:
    from .entry import Command

BENCHMARKS = {
    "latency": "how long one batch of requests takes",
    "throughput": "how fast many requests are completed",
    "serve": "what the clients of an OpenAI-compatible server see",
}
DESCRIPTION = "Measure a model in this process or behind a server.\n\nbenchmarks:\n" + "\n".join(
    f"  {name:10}  {text}" for name, text in BENCHMARKS.items()
)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "benchmark",
        choices=tuple(BENCHMARKS),
        metavar="|".join(BENCHMARKS),
        help="`trivet bench latency --help` describes it, and so on",
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="its flags")


def run(args: Namespace) -> int:
    command = cast("Command", import_module(f"..bench.{args.benchmark}", __package__))
    parser = ArgumentParser(prog=f"trivet bench {args.benchmark}", description=command.DESCRIPTION)
    command.add_arguments(parser)
    parser.shorten_usage()
    arguments = list(args.arguments)
    if parser.find_flag("--config") is not None:
        from .config_file import expand

        arguments = expand(arguments, parser)
    return command.run(parser.parse_strictly(arguments))
