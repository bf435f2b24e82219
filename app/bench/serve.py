"""`trivet bench serve`: load on a server, trivet's or any other OpenAI-compatible one."""

from __future__ import annotations

import asyncio
import os
import random
import re
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..cli import options
from ..cli.errors import CliError, UsageError
from ..cli.exit_codes import ExitCode
from ..cli.parser import ArgumentParser
from .client import ENDPOINTS, Target, first_model, open_client, request_once
from .datasets import SampleRequest, add_dataset_flags, make_requests, positive_int, seed_of, settle_dataset
from .metrics import METRIC_NAMES, RequestRecord, describe_metrics, describe_totals, request_goodput
from .prompt_makers import load_prompt_maker

DESCRIPTION = """Load an OpenAI-compatible server and measure what its clients see. Token counts are those of the
server's usage. Without --tokenizer prompts are common words, about one token each."""


def add_arguments(parser: ArgumentParser) -> None:
    _add_server_flags(parser)
    add_dataset_flags(parser, num_prompts=32)
    parser.add_argument("--tokenizer", metavar="MODEL", help="tokenizer.json, package or model that counts the prompts")
    parser.add_argument(
        "--prompt-format", default="auto", choices=("auto", "text", "token-ids"),
        help="what is sent; auto: token-ids with --tokenizer and --backend openai, else text (default: auto)",
    )  # fmt: skip
    group = parser.add_argument_group("load")
    group.add_argument("--seed", type=int, default=0, help="of prompts and arrival times (default: 0)")
    group.add_argument("--request-rate", type=_positive_float, default=float("inf"), help="per second (default: inf)")
    group.add_argument("--burstiness", type=_positive_float, default=1.0, help="1 = Poisson arrivals (default: 1)")
    group.add_argument("--max-concurrency", type=positive_int, help="most requests at once (default: no limit)")
    group.add_argument("--num-warmups", type=int, default=0, help="requests before the clock starts (default: 0)")
    group.add_argument("--ignore-eos", action="store_true", help="ask for exactly the output length")
    group.add_argument("--temperature", type=float, default=0.0, help="default: 0")
    for name, kind in (("top-p", float), ("top-k", int), ("min-p", float)):
        group.add_argument(f"--{name}", type=kind, help="default: the server's")
    group.add_argument("--extra-body", type=options.json_object, default={}, metavar="JSON", help="more request fields")
    _add_result_flags(parser)


def _add_server_flags(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--backend", default="openai", choices=tuple(ENDPOINTS), help="default: %(default)s")
    group.add_argument("--base-url", metavar="URL", help="instead of --host and --port, without /v1")
    group.add_argument("--host", default="127.0.0.1", help="default: %(default)s")
    group.add_argument("--port", type=int, default=8000, help="default: %(default)s")
    group.add_argument("--endpoint", metavar="PATH", help="default: /v1/completions or /v1/chat/completions")
    group.add_argument("-m", "--model", metavar="NAME", help="the server's name of the model (default: its first)")
    group.add_argument(
        "--header",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="may be repeated; the API key is $OPENAI_API_KEY",
    )
    group.add_argument("--timeout", type=float, default=21600.0, help="seconds of one request (default: %(default)s)")
    group.add_argument("--ready-check-timeout-sec", type=float, default=0.0, help="wait for the server (default: 0)")
    group.add_argument("--server-pid", type=positive_int, metavar="PID", help="also report that process's memory")


def _add_result_flags(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("result")
    group.add_argument(
        "--percentile-metrics", default="ttft,tpot,itl,e2el", metavar="LIST", help="default: %(default)s"
    )
    group.add_argument("--metric-percentiles", default="50,90,99", metavar="LIST", help="default: %(default)s")
    group.add_argument("--goodput", nargs="+", default=[], metavar="METRIC:MS", help="limits, as in ttft:200 tpot:50")
    group.add_argument("--label", help="name of this run (default: the backend)")
    group.add_argument("--metadata", nargs="+", default=[], metavar="KEY=VALUE", help="noted in the result")
    group.add_argument("--save-result", action="store_true", help="write the result to --result-dir")
    group.add_argument("--save-detailed", action="store_true", help="with every request's lengths, times and text")
    group.add_argument("--append-result", action="store_true", help="add a line to the file instead of replacing it")
    group.add_argument("--result-dir", metavar="DIR", help="default: the current folder")
    group.add_argument("--result-filename", metavar="NAME", help="default: LABEL-RATEqps-MODEL-DATE.json")
    group.add_argument("--output-json", metavar="FILE", help="write the result there")
    group.add_argument("--json", action="store_true", help="print the result as JSON")


def _positive_float(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise ValueError
    return value


def run(args: Namespace) -> int:
    from .report import parse_metrics, parse_percentiles

    percentiles, metrics = parse_percentiles(args.metric_percentiles), parse_metrics(args.percentile_metrics)
    limits, metadata = _parse_goodput(args.goodput), dict(_key_value(item, "--metadata") for item in args.metadata)
    _check_result_flags(args)
    settle_dataset(args)
    maker, args.prompt_format = load_prompt_maker(args.tokenizer, args.prompt_format, chat=_is_chat(args))
    requests = make_requests(args, maker, extra=args.num_warmups)
    records, duration, details = asyncio.run(_measure(args, requests))
    completed = [record for record in records if record.error is None]
    result: dict[str, Any] = {
        **details,
        **metadata,
        **describe_totals(records, duration),
        "request_goodput": request_goodput(records, duration, limits) if limits else None,
        **describe_metrics(completed, metrics, percentiles),
    }
    _write(args, result, records)
    _print(args, result)
    if not completed:
        raise CliError(f"all {len(records)} requests failed; the first: {records[0].error}")
    return ExitCode.OK if len(completed) == len(records) else ExitCode.ERROR


def _is_chat(args: Namespace) -> bool:
    return bool(args.backend == "openai-chat")


def _check_result_flags(args: Namespace) -> None:
    for name in ("append_result", "result_dir", "result_filename"):
        if getattr(args, name) and not args.save_result:
            raise UsageError(f"--{name.replace('_', '-')} needs --save-result")
    if args.save_detailed and not (args.save_result or args.output_json or args.json):
        raise UsageError("--save-detailed needs --save-result, --output-json or --json")


def _parse_goodput(items: Sequence[str]) -> dict[str, float]:
    limits = {}
    for item in items:
        name, _, limit = item.partition(":")
        try:
            limits[name] = float(limit)
        except ValueError:
            limits[name] = -1.0
        if name not in METRIC_NAMES or name == "itl" or limits[name] < 0:
            raise UsageError(f"--goodput has {item!r}; expected ttft:MS, tpot:MS or e2el:MS")
    return limits


def _key_value(item: str, flag: str) -> tuple[str, str]:
    key, equals, value = item.partition("=")
    if not equals or not key:
        raise UsageError(f"{flag} has {item!r}; expected KEY=VALUE")
    return key, value


# --- measuring --------------------------------------------------------------------------------------------------------
async def _measure(
    args: Namespace, requests: Sequence[SampleRequest]
) -> tuple[list[RequestRecord], float, dict[str, Any]]:
    """Records of the measured requests, the seconds they took together, and what the result says about the run."""
    from .engine import Progress
    from .machine import describe_machine, load_average, peak_memory

    machine = describe_machine()
    base_url = args.base_url or f"http://{args.host}:{args.port}"
    if re.match(r"https?://.", base_url) is None:
        raise UsageError(f"--base-url is {base_url!r}; expected something like http://localhost:8000")
    headers = dict(_key_value(item, "--header") for item in args.header)
    headers.setdefault("Authorization", f"Bearer {os.environ.get('OPENAI_API_KEY') or 'EMPTY'}")
    async with open_client(base_url, headers, args.timeout) as client:
        model = await _wait_for_model(client, base_url, args)
        target = Target(base_url, args.endpoint or ENDPOINTS[args.backend], _is_chat(args), model, _sampling(args))
        measured, warmups = requests[: args.num_prompts], requests[args.num_prompts :]
        for record in await asyncio.gather(*(request_once(client, target, sample) for sample in warmups)):
            if record.error is not None:
                raise CliError(f"a warm-up request to {target.url} failed: {record.error}")
        progress = Progress(f"loading {base_url}", len(measured), "requests")
        try:
            records, duration = await _send_all(client, target, measured, args, progress)
        finally:
            progress.close()
    memory = None if args.server_pid is None else peak_memory(args.server_pid)
    return records, duration, _details(args, target, machine | {"load_average_after": load_average()}, memory)


async def _wait_for_model(client: Any, base_url: str, args: Namespace) -> str:
    deadline = time.monotonic() + args.ready_check_timeout_sec
    while True:
        try:
            name = await first_model(client, base_url)
        except CliError:
            if time.monotonic() >= deadline:
                if args.model is not None:
                    return str(args.model)  # a server may lack the list
                raise
            await asyncio.sleep(0.2)
        else:
            return name if args.model is None else str(args.model)


def _sampling(args: Namespace) -> dict[str, Any]:
    names = ("temperature", "top_p", "top_k", "min_p")
    sampling: dict[str, Any] = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.ignore_eos:
        sampling["ignore_eos"] = True
    sampling.update(args.extra_body)
    return sampling


async def _send_all(
    client: Any, target: Target, requests: Sequence[SampleRequest], args: Namespace, progress: Any
) -> tuple[list[RequestRecord], float]:
    slots = asyncio.Semaphore(args.max_concurrency or len(requests))

    async def one(sample: SampleRequest) -> RequestRecord:
        async with slots:
            record = await request_once(client, target, sample)
        progress.update()
        return record

    tasks = []
    delays = _arrival_times(args, len(requests))
    start = time.perf_counter()
    for sample, delay in zip(requests, delays, strict=True):
        if (wait := start + delay - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(one(sample)))
    records = await asyncio.gather(*tasks)
    return list(records), time.perf_counter() - start


def _arrival_times(args: Namespace, count: int) -> list[float]:
    """Seconds after the start; gamma-distributed gaps, scaled so that the whole has the asked rate."""
    if args.request_rate == float("inf"):
        return [0.0] * count
    rng = random.Random(seed_of(args))
    gaps = [rng.gammavariate(args.burstiness, 1 / (args.request_rate * args.burstiness)) for _ in range(count)]
    times = [sum(gaps[: index + 1]) for index in range(count)]
    scale = count / args.request_rate / times[-1] if times[-1] > 0 else 1.0
    return [scale * moment for moment in times]


# --- the result -------------------------------------------------------------------------------------------------------
def _details(args: Namespace, target: Target, machine: dict[str, Any], memory: dict[str, int] | None) -> dict[str, Any]:
    from .report import timestamp, to_jsonable

    infinite = args.request_rate == float("inf")
    config = vars(args) | {"request_rate": "inf" if infinite else args.request_rate, "url": target.url}
    config["header"] = [item.partition("=")[0] for item in args.header]  # their values may be secrets
    return {
        "date": timestamp(),
        "backend": args.backend,
        "endpoint_type": args.backend,
        "label": args.label,
        "model_id": target.model,
        "tokenizer_id": args.tokenizer,
        "num_prompts": args.num_prompts,
        "request_rate": config["request_rate"],
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        "server_memory": memory,
        "machine": machine,
        "config": to_jsonable({name: value for name, value in config.items() if not callable(value)}),
    }


def _write(args: Namespace, result: dict[str, Any], records: Sequence[RequestRecord]) -> None:
    from .report import write_json

    if args.save_detailed:
        result |= {
            "input_lens": [record.prompt_tokens for record in records],
            "output_lens": [record.completion_tokens for record in records],
            "start_times": [record.start for record in records],
            "ttfts": [record.ttft for record in records],
            "itls": [record.itl for record in records],
            "generated_texts": [record.text for record in records],
        }
    result["errors"] = [record.error or "" for record in records] if any(record.error for record in records) else []
    if args.output_json is not None:
        write_json(Path(args.output_json), result)
    if args.save_result:
        name = args.result_filename or _file_name(args, result)
        write_json(Path(args.result_dir or ".") / name, result, append=args.append_result)


def _file_name(args: Namespace, result: dict[str, Any]) -> str:
    concurrency = f"-concurrency{args.max_concurrency}" if args.max_concurrency else ""
    model = result["model_id"].split("/")[-1]
    return f"{args.label or args.backend}-{args.request_rate}qps{concurrency}-{model}-{result['date']}.json"


def _print(args: Namespace, result: dict[str, Any]) -> None:
    from ..cli import console
    from .report import print_result

    rows = [
        ("Successful requests:", result["completed"]),
        ("Failed requests:", result["failed"]),
        ("Maximum request concurrency:", args.max_concurrency),
        ("Benchmark duration (s):", result["duration"]),
        ("Total input tokens:", result["total_input_tokens"]),
        ("  of them from the prefix cache:", result["total_cached_tokens"]),
        ("Total generated tokens:", result["total_output_tokens"]),
        ("Request throughput (req/s):", result["request_throughput"]),
        ("Request goodput (req/s):", result["request_goodput"]),
        ("Output token throughput (tok/s):", result["output_throughput"]),
        ("Total token throughput (tok/s):", result["total_token_throughput"]),
    ]
    if "chunks" in result["token_counts_from"]:
        console.note("note: the server reports no usage; output tokens are counted by chunks, input tokens by us")
    if error := next(filter(None, result["errors"]), None):
        console.note(f"note: {result['failed']} requests failed; the first: {error}")
    print_result(args, "Serving Benchmark Result", [row for row in rows if row[1] is not None], result)
