"""`trivet bench throughput`: how fast many requests, all there at once, are completed."""

from __future__ import annotations

import asyncio
import threading
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cli import options
from ..cli.exit_codes import ExitCode
from ..cli.parser import ArgumentParser
from .datasets import SampleRequest, add_dataset_flags, make_requests, settle_dataset
from .latency import add_result_flags, resolved_config
from .metrics import METRIC_NAMES, RequestRecord, describe_metrics, describe_totals

if TYPE_CHECKING:
    from ...runtime.async_llm import AsyncLLM
    from ...runtime.config import EngineConfig
    from ...runtime.llm import LLM

DESCRIPTION = """Measure throughput: all prompts are tokenised before the clock starts and admitted at once, and every
request generates exactly its output length (greedy, end-of-text ignored)."""


def add_arguments(parser: ArgumentParser) -> None:
    options.add_model_flag(parser)
    add_dataset_flags(parser, num_prompts=32)
    parser.add_argument("--num-warmups", type=int, default=1, help="requests before the clock starts (default: 1)")
    parser.add_argument("--async-engine", action="store_true", help="measure AsyncLLM, which also shows the ITL")
    parser.add_argument("--metric-percentiles", default="50,90,99", metavar="LIST", help="default: %(default)s")
    add_result_flags(parser)
    options.add_engine_flags(parser)


def run(args: Namespace) -> int:
    from .engine import engine_config
    from .report import parse_percentiles, print_result, write_json

    percentiles = parse_percentiles(args.metric_percentiles)
    settle_dataset(args)
    records, duration, details = _measure(engine_config(args), args)
    totals = describe_totals(records, duration)
    result = {
        "elapsed_time": duration,
        "num_requests": len(records),
        "total_num_tokens": totals["total_input_tokens"] + totals["total_output_tokens"],
        "requests_per_second": totals["request_throughput"],
        "tokens_per_second": totals["total_token_throughput"],
        **totals,
        **describe_metrics(records, METRIC_NAMES, percentiles),
        **details,
    }
    if args.output_json is not None:
        write_json(Path(args.output_json), result)
    rows = [
        ("Requests:", len(records)),
        ("Duration (s):", duration),
        ("Total input tokens:", totals["total_input_tokens"]),
        ("  of them from the prefix cache:", totals["total_cached_tokens"]),
        ("Total generated tokens:", totals["total_output_tokens"]),
        ("Request throughput (req/s):", totals["request_throughput"]),
        ("Output token throughput (tok/s):", totals["output_throughput"]),
        ("Total token throughput (tok/s):", totals["total_token_throughput"]),
    ]
    print_result(args, "Throughput Benchmark Result", rows, result)
    return ExitCode.OK


def _measure(config: EngineConfig, args: Namespace) -> tuple[list[RequestRecord], float, dict[str, Any]]:
    from ...runtime.async_llm import AsyncLLM
    from ...runtime.llm import LLM
    from .engine import check_lengths, prompt_maker
    from .machine import describe_machine, load_average, peak_memory
    from .report import to_jsonable

    machine = describe_machine()
    engine: LLM | AsyncLLM
    engine = AsyncLLM.from_engine_config(config) if args.async_engine else LLM.from_engine_config(config)
    try:
        requests = make_requests(args, prompt_maker(engine.get_tokenizer()), extra=args.num_warmups)
        check_lengths(requests, engine.config.max_model_len)
        measured, warmups = requests[: args.num_prompts], requests[args.num_prompts :]
        if isinstance(engine, AsyncLLM):
            records, duration = asyncio.run(_run_async(engine, warmups, measured, args))
        else:
            records, duration = _run_sync(engine, warmups, measured, args)
        details = {
            "stats": engine.get_stats(),
            "memory": peak_memory(),
            "machine": machine | {"load_average_after": load_average()},
            "config": resolved_config(args, to_jsonable(engine.config)),
        }
    finally:
        engine.shutdown()
    return records, duration, details


def _run_sync(
    llm: LLM, warmups: Sequence[SampleRequest], requests: Sequence[SampleRequest], args: Namespace
) -> tuple[list[RequestRecord], float]:
    from .engine import prompts_of, record_of, sampling_params, warm_up

    warm_up(llm, warmups, args)
    params = [sampling_params(args, request.expected_output_len) for request in requests]
    with _token_progress(llm, sum(request.expected_output_len for request in requests)):
        start = time.perf_counter()
        outputs = llm.generate(prompts_of(requests), params)
        duration = time.perf_counter() - start
    return [record_of(output, start) for output in outputs], duration


@contextmanager
def _token_progress(llm: LLM, total: int) -> Iterator[None]:
    """A bar that follows the engine's counters; the calling thread is busy inside the engine."""
    import sys

    from .engine import Progress

    before = llm.get_stats()["num_generated_tokens"]
    progress, ended = Progress("measuring throughput", total, "tokens"), threading.Event()

    def follow() -> None:
        while not ended.wait(0.5):
            progress.show(int(llm.get_stats()["num_generated_tokens"] - before))

    thread = threading.Thread(target=follow, daemon=True)
    if sys.stderr.isatty():
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if thread.is_alive():
            thread.join()
        progress.close()


async def _run_async(
    engine: AsyncLLM, warmups: Sequence[SampleRequest], requests: Sequence[SampleRequest], args: Namespace
) -> tuple[list[RequestRecord], float]:
    from .engine import Progress

    await asyncio.gather(*(_follow(engine, request, args) for request in warmups))
    progress = Progress("measuring throughput", len(requests), "requests")

    async def one(request: SampleRequest) -> RequestRecord:
        record = await _follow(engine, request, args)
        progress.update()
        return record

    try:
        start = time.perf_counter()
        records = await asyncio.gather(*(one(request) for request in requests))
        duration = time.perf_counter() - start
    finally:
        progress.close()
    return records, duration


async def _follow(engine: AsyncLLM, request: SampleRequest, args: Namespace) -> RequestRecord:
    from ..cli.errors import CliError
    from .engine import sampling_params

    params = sampling_params(args, request.expected_output_len, delta=True)
    record = RequestRecord(prompt_tokens=0, start=time.perf_counter())
    last = record.start
    async for output in engine.generate(request.token_ids or [], params):
        now = time.perf_counter()
        if output.error is not None:
            raise CliError(f"a request failed: {output.error}")
        if num_tokens := len(output.outputs[0].token_ids):
            if record.completion_tokens == 0:
                record.ttft = now - record.start
            else:
                record.itl.append(now - last)
            record.completion_tokens += num_tokens
            record.text += output.outputs[0].text
            last = now
        record.prompt_tokens, record.cached_tokens = len(output.prompt_token_ids), output.num_cached_tokens
    record.latency = last - record.start
    return record
