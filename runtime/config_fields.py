"""Fields of the configuration: how one is declared, checked and described; names of vLLM that are refused."""

from __future__ import annotations

from types import NoneType, UnionType
from typing import Any, Final, Literal, NamedTuple, Union, get_args, get_origin

import msgspec

from .errors import TrivetError

LATER: Final = "it comes in a later version of trivet; leave it out"
UNSUPPORTED: Final[dict[str, str]] = {  # names of vLLM that users bring along, and why they are refused
    "quantization": "the weights run in the format of the checkpoint; leave it out",
    "enforce_eager": "steps are always eager on the CPU, and decode steps always captured on a GPU; leave it out",
    "swap_space": "preempted requests are recomputed, nothing is swapped; leave it out",
    "cpu_offload_gb": "the weights are mapped from the checkpoint file already; leave it out",
    "revision": "write the revision into the model reference",
    "download_dir": "set TRIVET_HOME",
    "block_allocator": LATER,
    "enable_lora": LATER,
    "max_loras": LATER,
    "max_lora_rank": LATER,
    "speculative_config": LATER,
    "structured_outputs_config": LATER,
    "kv_transfer_config": LATER,
    "kv_events_config": LATER,
    "kv_offloading_size": LATER,
    "prefix_match_unit": LATER,
    "scheduler_cls": LATER,
    "hf_overrides": LATER,
    "rope_scaling": LATER,
    "runner": LATER,
    "convert": LATER,
    "limit_mm_per_prompt": LATER,
    "logits_processors": LATER,
    "distributed_executor_backend": LATER,
}


class ConfigError(TrivetError, ValueError):
    """A configuration that cannot be honoured; the message names the field, the value and what is accepted."""


class Option(msgspec.Struct, frozen=True):
    """What the annotation of a configuration's field says besides its type: `name: Annotated[type, Option(...)]`."""

    help: str
    flag: str | None = None  # the flat name where that is not the field's
    aliases: tuple[str, ...] = ()
    only: str | None = None  # why nothing but the default is accepted
    default_text: str | None = None  # what happens without the option, where the field's default does not say it


class Field(NamedTuple):
    name: str
    hint: Any  # its type
    option: Option


def fields_of(config_class: type[msgspec.Struct]) -> tuple[Field, ...]:
    """In the order of definition. Every field has an Option and a default."""
    hints = config_class.__annotations__
    names = config_class.__struct_fields__
    return tuple(Field(name, hints[name].__origin__, hints[name].__metadata__[0]) for name in names)


def require(condition: bool, name: str, value: Any, expected: str) -> None:
    if not condition:
        raise ConfigError(f"{name} is {value!r}; expected {expected}")


def refuse_non_defaults(config: Any) -> None:
    """Fields with `only` exist so that their vLLM default is accepted and anything else refused by name."""
    config_class = type(config)
    for (name, _, option), default in zip(fields_of(config_class), config_class.__struct_defaults__, strict=True):
        value = getattr(config, name)
        if option.only and value != default:
            raise ConfigError(f"{option.flag or name}={value!r} is not supported, only {default!r}: {option.only}")


def checked(name: str, value: Any, hint: Any) -> Any:
    """`value` if it is of the field's type (an int also serves as a float)."""
    members = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    for member in members:
        if get_origin(member) is Literal:
            if value in get_args(member) and isinstance(value, str):
                return value
        elif member is NoneType:
            if value is None:
                return None
        elif member is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        elif isinstance(value, get_origin(member) or member) and isinstance(value, bool) == (member is bool):
            return value
    raise ConfigError(f"{name} is {value!r} ({type(value).__name__}); expected {describe_type(hint)}")


def describe_type(hint: Any) -> str:
    """For people: "int", "one of auto, float16", "int or None"."""
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(describe_type(member) for member in get_args(hint))
    if hint is NoneType:
        return "None"
    return "a JSON object" if get_origin(hint) is dict else str(hint.__name__)
