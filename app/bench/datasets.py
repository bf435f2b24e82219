"""Prompts to measure with: random, sharegpt, prefix_repetition. The same seed gives the same prompts."""

from __future__ import annotations

import json
import random
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from ..cli.errors import UsageError
from ..cli.parser import ArgumentParser

DATASETS: Final = ("random", "sharegpt", "prefix_repetition")
_SHAREGPT_MIN_TOKENS, _SHAREGPT_MAX_PROMPT, _SHAREGPT_MAX_TOTAL = 4, 1024, 2048  # vLLM's filter
# Common words that nearly every vocabulary holds as one token with the space before them.
_WORDS: Final = """time year people way day man thing woman life child world school state family student group country
problem hand part place case week company system program question work night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father power hour
game line end member law car city name team minute idea body back parent face level office door health person art war
history party result change morning reason research girl moment air teacher force education""".split()


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """A prompt, as ids or as text. prompt_len is None while only the server can tell."""

    token_ids: list[int] | None
    text: str | None
    prompt_len: int | None
    expected_output_len: int


class PromptMaker(Protocol):
    """Turns lengths and texts into prompts of the right kind."""

    def random_prompt(self, rng: random.Random, num_tokens: int, prefix: Any) -> tuple[SampleRequest, Any]:
        """A prompt `prefix + num_tokens new ones` and a handle by which it can be the prefix of another."""
        ...

    def from_text(self, text: str) -> SampleRequest: ...

    def count(self, text: str) -> int: ...


class TokenIdPrompts:
    """Prompts of exactly the asked number of tokens."""

    def __init__(
        self,
        vocab_size: int,
        encode: Callable[[str], list[int]],
        decode: Callable[[list[int]], str],
        *,
        as_text: bool = False,
    ) -> None:
        """`decode` leaves special tokens out. as_text: send the decoded text, whose count may differ a little."""
        self._vocab_size, self._encode, self._decode, self._as_text = vocab_size, encode, decode, as_text
        self._is_plain: dict[int, bool] = {}

    def random_prompt(self, rng: random.Random, num_tokens: int, prefix: Any) -> tuple[SampleRequest, Any]:
        ids = [*(prefix or ()), *(self._draw(rng) for _ in range(num_tokens))]
        return self._sample(ids), ids

    def from_text(self, text: str) -> SampleRequest:
        return self._sample(self._encode(text))

    def count(self, text: str) -> int:
        return len(self._encode(text))

    def _sample(self, ids: list[int]) -> SampleRequest:
        if not self._as_text:
            return SampleRequest(ids, None, len(ids), 0)
        return SampleRequest(None, self._decode(ids), None, 0)

    def _draw(self, rng: random.Random) -> int:
        while True:
            token = rng.randrange(self._vocab_size)
            if token not in self._is_plain:
                self._is_plain[token] = self._decode([token]) != ""
            if self._is_plain[token]:
                return token


class WordPrompts:
    """Prompts of common words, for a server whose tokenizer is not at hand; about one token a word."""

    def random_prompt(self, rng: random.Random, num_tokens: int, prefix: Any) -> tuple[SampleRequest, Any]:
        words = [*(prefix or ()), *(rng.choice(_WORDS) for _ in range(num_tokens))]
        return SampleRequest(None, " ".join(words), None, 0), words

    def from_text(self, text: str) -> SampleRequest:
        raise UsageError("--dataset-name sharegpt needs --tokenizer, to know the lengths of its texts")

    def count(self, text: str) -> int:
        raise UsageError("--dataset-name sharegpt needs --tokenizer, to know the lengths of its texts")


def add_dataset_flags(parser: ArgumentParser, *, num_prompts: int) -> None:
    group = parser.add_argument_group("prompts")
    group.add_argument(
        "--dataset-name", default="random", choices=(*DATASETS, "prefix"),
        help="random, sharegpt or prefix_repetition (= prefix) (default: random)",
    )  # fmt: skip
    group.add_argument("--dataset-path", metavar="FILE", help="ShareGPT's JSON file")
    group.add_argument("--num-prompts", type=positive_int, default=num_prompts, help="default: %(default)s")
    group.add_argument("--input-len", type=positive_int, help="random: tokens of a prompt (same: --random-input-len)")
    group.add_argument("--output-len", type=positive_int, help="tokens to generate (default: the dataset's)")
    group.add_argument("--random-input-len", type=positive_int, help="default: 1024")
    group.add_argument("--random-output-len", type=positive_int, help="default: 128")
    group.add_argument("--random-prefix-len", type=int, help="tokens that all prompts begin with (default: 0)")
    group.add_argument("--random-range-ratio", type=float, help="lengths vary by this share, [0, 1) (default: 0)")
    group.add_argument("--sharegpt-output-len", type=positive_int, help="default: the length of the answer in the file")
    for name, default in (("prefix", 256), ("suffix", 256), ("output", 128)):
        group.add_argument(f"--prefix-repetition-{name}-len", type=positive_int, help=f"default: {default}")
    group.add_argument("--prefix-repetition-num-prefixes", type=positive_int, help="default: 10")


def seed_of(args: Namespace) -> int:
    """--seed, which seeds the engine too where there is one in this process; 0 when it is not given."""
    return int(getattr(args, "seed", 0))


def positive_int(text: str) -> int:
    """An argparse type: ArgumentTypeError for anything but a whole number of 1 or more."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise ArgumentTypeError(f"{text!r}: expected a whole number of 1 or more")
    return value


def settle_dataset(args: Namespace) -> None:
    """Fill in the dataset's defaults in `args`. UsageError for flags of another dataset."""
    if args.dataset_name == "prefix":
        args.dataset_name = "prefix_repetition"
    _refuse_foreign_flags(args)
    if args.dataset_name == "random":
        for short, long in (("input_len", "random_input_len"), ("output_len", "random_output_len")):
            _merge(args, short, long)
        _defaults(args, random_input_len=1024, random_output_len=128, random_prefix_len=0, random_range_ratio=0.0)
        if not 0 <= args.random_range_ratio < 1:
            raise UsageError(f"--random-range-ratio is {args.random_range_ratio}; expected [0, 1)")
        if args.random_prefix_len < 0:
            raise UsageError(f"--random-prefix-len is {args.random_prefix_len}; expected 0 or more")
    elif args.dataset_name == "sharegpt":
        _merge(args, "output_len", "sharegpt_output_len")
        if args.dataset_path is None:
            raise UsageError("--dataset-name sharegpt needs --dataset-path, the JSON file of its conversations")
    else:
        _merge(args, "output_len", "prefix_repetition_output_len")
        _defaults(args, prefix_repetition_prefix_len=256, prefix_repetition_suffix_len=256)
        _defaults(args, prefix_repetition_output_len=128, prefix_repetition_num_prefixes=10)
        if args.prefix_repetition_num_prefixes > args.num_prompts:
            raise UsageError(
                f"--prefix-repetition-num-prefixes is {args.prefix_repetition_num_prefixes}, more than the "
                f"{args.num_prompts} prompts of --num-prompts"
            )


def _refuse_foreign_flags(args: Namespace) -> None:
    own = {"random": "random_", "sharegpt": "sharegpt_", "prefix_repetition": "prefix_repetition_"}[args.dataset_name]
    foreign = [
        name
        for name, value in vars(args).items()
        if value is not None and name.startswith(("random_", "sharegpt_", "prefix_repetition_"))
        and not name.startswith(own)
    ]  # fmt: skip
    if args.dataset_path is not None and args.dataset_name != "sharegpt":
        foreign.append("dataset_path")
    if args.input_len is not None and args.dataset_name != "random":
        foreign.append("input_len")
    if foreign:
        raise UsageError(f"--{foreign[0].replace('_', '-')} does not go with --dataset-name {args.dataset_name}")


def _merge(args: Namespace, short: str, long: str) -> None:
    if getattr(args, short) is None:
        return
    if getattr(args, long) is not None:
        raise UsageError(f"--{short} and --{long} are the same; give one of them".replace("_", "-"))
    setattr(args, long, getattr(args, short))


def _defaults(args: Namespace, **defaults: Any) -> None:
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)


# --- sampling -------------------------------------------------------------------------------------------------------
def make_requests(args: Namespace, maker: PromptMaker, *, extra: int = 0) -> list[SampleRequest]:
    """`num_prompts` requests, then `extra` for warming up that share no prefix with them. After settle_dataset."""
    rng = random.Random(seed_of(args))
    if args.dataset_name == "sharegpt":
        return _sharegpt(args, maker, rng, args.num_prompts + extra)
    make = _random if args.dataset_name == "random" else _prefix_repetition
    return make(args, maker, rng, args.num_prompts) + make(args, maker, rng, extra)


def _random(args: Namespace, maker: PromptMaker, rng: random.Random, count: int) -> list[SampleRequest]:
    prefix = maker.random_prompt(rng, args.random_prefix_len, None)[1] if args.random_prefix_len else None
    requests = []
    for _ in range(count):
        num_tokens = _vary(rng, args.random_input_len, args.random_range_ratio)
        sample, _ = maker.random_prompt(rng, num_tokens, prefix)
        requests.append(_with_output(sample, _vary(rng, args.random_output_len, args.random_range_ratio)))
    return requests


def _vary(rng: random.Random, length: int, ratio: float) -> int:
    """Uniform in length * [1 - ratio, 1 + ratio]."""
    return max(1, rng.randint(int(length * (1 - ratio)), int(length * (1 + ratio))))


def _prefix_repetition(args: Namespace, maker: PromptMaker, rng: random.Random, count: int) -> list[SampleRequest]:
    prefixes = [
        maker.random_prompt(rng, args.prefix_repetition_prefix_len, None)[1]
        for _ in range(args.prefix_repetition_num_prefixes)
    ]
    requests = []
    for index in range(count):
        sample, _ = maker.random_prompt(rng, args.prefix_repetition_suffix_len, prefixes[index % len(prefixes)])
        requests.append(_with_output(sample, args.prefix_repetition_output_len))
    rng.shuffle(requests)
    return requests


def _sharegpt(args: Namespace, maker: PromptMaker, rng: random.Random, count: int) -> list[SampleRequest]:
    turns = _read_sharegpt(Path(args.dataset_path))
    rng.shuffle(turns)
    requests: list[SampleRequest] = []
    for prompt, answer in turns:
        num_tokens = maker.count(prompt)
        output_len = args.sharegpt_output_len or maker.count(answer)
        if num_tokens < _SHAREGPT_MIN_TOKENS or (not args.sharegpt_output_len and output_len < _SHAREGPT_MIN_TOKENS):
            continue
        if num_tokens > _SHAREGPT_MAX_PROMPT or num_tokens + output_len > _SHAREGPT_MAX_TOTAL:
            continue
        requests.append(_with_output(maker.from_text(prompt), output_len))
        if len(requests) == count:
            return requests
    raise UsageError(
        f"{args.dataset_path} has {len(requests)} usable conversations; {count} are needed (--num-prompts)"
    )


def _read_sharegpt(path: Path) -> list[tuple[str, str]]:
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        talks = [entry.get("conversations", []) for entry in entries]
        return [(str(talk[0]["value"]), str(talk[1]["value"])) for talk in talks if len(talk) >= 2]
    except OSError as error:
        raise UsageError(f"--dataset-path {path}: {error.strerror}") from error
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        raise UsageError(f"--dataset-path {path} is not a ShareGPT file: {error!r}") from error


def _with_output(sample: SampleRequest, output_len: int) -> SampleRequest:
    return SampleRequest(sample.token_ids, sample.text, sample.prompt_len, output_len)
