"""`trivet bench latency`: how long one batch of equal requests takes."""

from __future__ import annotations

import time
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cli import options
from ..cli.exit_codes import ExitCode
from ..cli.parser import ArgumentParser
from .datasets import positive_int, seed_of
from .metrics import METRIC_NAMES, RequestRecord, describe_metrics, percentile

if TYPE_CHECKING:
    from ...runtime.llm import LLM

DESCRIPTION = """Measure the latency of one batch: every iteration generates --output-len tokens for --batch-size random
prompts of --input-len tokens, all admitted at once. The prefix cache is off unless --enable-prefix-caching is given."""
_PERCENTILES = (10, 25, 50, 75, 90, 99)


def add_arguments(parser: ArgumentParser) -> None:
    options.add_model_flag(parser)
    parser.add_argument("--input-len", type=positive_int, default=32, help="default: %(default)s")
    parser.add_argument("--output-len", type=positive_int, default=128, help="default: %(default)s")
    parser.add_argument("--batch-size", type=positive_int, default=8, help="default: %(default)s")
    parser.add_argument("--num-iters-warmup", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--num-iters", type=positive_int, default=10, help="default: %(default)s")
    add_result_flags(parser)
    options.add_engine_flags(parser, enable_prefix_caching="off")


def add_result_flags(parser: ArgumentParser) -> None:
    parser.add_argument("--disable-detokenize", action="store_true", help="leave the text out")
    parser.add_argument("--output-json", metavar="FILE", help="write the result there")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def run(args: Namespace) -> int:
    from ...runtime.llm import LLM
    from .engine import engine_config
    from .report import print_result, write_json

    config = engine_config(args, enable_prefix_caching=False)
    started = time.perf_counter()
    with LLM.from_engine_config(config) as llm:
        load_seconds = time.perf_counter() - started
        result = _measure(llm, args) | {"load_seconds": load_seconds}
    if args.output_json is not None:
        write_json(Path(args.output_json), result)
    rows: list[tuple[str, Any]] = [
        ("Avg latency (s):", result["avg_latency"]),
        *((f"{percent}% percentile latency (s):", value) for percent, value in result["percentiles"].items()),
        ("Prompt tokens per iteration:", result["num_prompt_tokens"]),
        ("Generated tokens per iteration:", result["num_output_tokens"]),
        ("Output token throughput (tok/s):", result["output_throughput"]),
        ("Peak memory (MB):", _megabytes(result["memory"])),
    ]
    print_result(args, "Latency Benchmark Result", rows, result)
    return ExitCode.OK


def _measure(llm: LLM, args: Namespace) -> dict[str, Any]:
    import random

    from .datasets import SampleRequest
    from .engine import Progress, check_lengths, prompt_maker, prompts_of, record_of, sampling_params
    from .machine import describe_machine, load_average, peak_memory
    from .report import to_jsonable

    machine, rng, maker = describe_machine(), random.Random(seed_of(args)), prompt_maker(llm.get_tokenizer())
    drawn = [maker.random_prompt(rng, args.input_len, None)[0] for _ in range(args.batch_size)]
    requests = [SampleRequest(sample.token_ids, None, sample.prompt_len, args.output_len) for sample in drawn]
    check_lengths(requests, llm.config.max_model_len)
    prompts, params = prompts_of(requests), sampling_params(args, args.output_len)
    latencies: list[float] = []
    records: list[RequestRecord] = []
    progress = Progress("measuring latency", args.num_iters_warmup + args.num_iters, "iterations")
    try:
        for iteration in range(args.num_iters_warmup + args.num_iters):
            start = time.perf_counter()
            outputs = llm.generate(prompts, params)
            elapsed = time.perf_counter() - start
            if iteration >= args.num_iters_warmup:
                latencies.append(elapsed)
                records += [record_of(output, start) for output in outputs]
            progress.update()
    finally:
        progress.close()
    num_output_tokens = sum(record.completion_tokens for record in records)
    return {
        "avg_latency": sum(latencies) / len(latencies),
        "latencies": latencies,
        "percentiles": {str(percent): percentile(latencies, percent) for percent in _PERCENTILES},
        "num_prompt_tokens": sum(map(len, prompts)),
        "num_output_tokens": num_output_tokens // args.num_iters,
        "output_throughput": num_output_tokens / sum(latencies),
        **describe_metrics(records, METRIC_NAMES, (50, 90, 99)),
        "memory": peak_memory(),
        "machine": machine | {"load_average_after": load_average()},
        "config": resolved_config(args, to_jsonable(llm.config)),
    }


def resolved_config(args: Namespace, engine: Any) -> dict[str, Any]:
    """The command's own settings, and the engine's as they were resolved for this model and machine."""
    own = {name: value for name, value in vars(args).items() if name not in options.engine_options(args)}
    return {"bench": own, "engine": engine}


def _megabytes(memory: dict[str, int] | None) -> float | None:
    return None if memory is None else memory["peak_rss_bytes"] / 1e6
