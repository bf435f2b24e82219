"""`trivet doctor`: this installation and this machine, for people and bug reports."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ... import __version__
from . import console, options
from .exit_codes import ExitCode
from .listing import table
from .parser import ArgumentParser

DESCRIPTION = """Describe this installation and this machine: versions, CPU and kernel tiers, GPUs, threads, folders,
telemetry, environment variables, and with --model how memory would be used. Fetches nothing.
The exit status is 1 if something is broken."""
_PACKAGES = ("onnxruntime", "onnx", "numpy", "tokenizers", "jinja2", "msgspec", "fastapi", "uvicorn", "huggingface_hub")
_NOT_BUILT = "not built"
_VARIABLES = ("TRIVET_", "ORT_", "HF_", "OMP_NUM_THREADS")  # the environment variables that change what happens


def add_arguments(parser: ArgumentParser) -> None:
    options.add_model_flag(parser, default="none, no memory plan")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options.add_engine_flags(parser)


def run(args: Namespace) -> int:
    problems: list[str] = []
    report = {
        "versions": _versions(problems),
        "cpu": _probe(lambda: _cpu(args, problems), "the CPU back end cannot be loaded", problems),
        "ops": _probe(_ops, "onnxruntime cannot load the op library", problems),
        "cuda": _probe(_cuda, "CUDA devices are unknown", problems),
        "device": _probe(lambda: _device(args, problems), "the device cannot be used", problems),
        "threads": _probe(lambda: _threads(args), "threads are unknown", problems),
        "memory": _memory(),
        "folders": {name: _folder(path, problems) for name, path in _folders().items()},
        "telemetry": _telemetry(problems),
        "environment": {name: _variable(name) for name in sorted(os.environ) if name.startswith(_VARIABLES)},
    }
    if args.model is not None:
        report["model"] = _probe(lambda: _plan(args), f"no memory plan for {args.model}", problems)
    report["problems"] = problems
    print(json.dumps(report) if args.json else _text(report))
    return ExitCode.ERROR if problems else ExitCode.OK


def _probe(read: Callable[[], Any], what: str, problems: list[str]) -> Any:
    """A part of the report; a failure becomes a problem, for that is what a doctor is asked about."""
    try:
        return read()
    except Exception as error:
        problems.append(f"{what}: {' '.join(str(error).split())}")
        return None


def _versions(problems: list[str]) -> dict[str, str]:
    versions = {"trivet": __version__, "python": platform.python_version(), "platform": platform.platform()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            problems.append(f"the package {name} is not installed")
    return versions


def _cpu(args: Namespace, problems: list[str]) -> dict[str, Any]:
    """The CPU with these flags; a kernel tier that it does not have is a problem."""
    from ...backends.session import describe_cpu

    facts = describe_cpu(options.engine_options(args).get("cpu_tier"))
    if error := facts.get("selected_tier_error"):
        problems.append(error)
    return facts


def _ops() -> dict[str, str]:
    """The op library as a session would load it: found, linked, and of a C API that this onnxruntime has."""
    import onnxruntime

    from ...backends.contract.opset import SESSION_CPU_TIER
    from ...backends.library import cpu_library_path, probe_cpu

    session_options = onnxruntime.SessionOptions()
    session_options.add_session_config_entry(SESSION_CPU_TIER, probe_cpu()["best_tier"])  # whatever the variable says
    session_options.register_custom_ops_library(str(cpu_library_path()))
    return {"loaded_by_onnxruntime": onnxruntime.__version__}


def _variable(name: str) -> str:
    """Its value; not that of a secret, for reports are pasted into public places."""
    return "(set)" if any(word in name for word in ("KEY", "TOKEN")) else os.environ[name]


def _cuda() -> Any:
    from ...backends.cuda.device import describe_cuda

    facts = describe_cuda()
    facts["library"] = facts["library"] or _NOT_BUILT
    return facts | {"devices": {f"cuda:{device['ordinal']}": device for device in facts["devices"]}}


def _device(args: Namespace, problems: list[str]) -> dict[str, str]:
    """Where a model would run with these flags; falling back to the CPU is a problem."""
    from ...runtime.config import EngineConfig

    chosen = EngineConfig.from_kwargs(model=args.model or "", **options.engine_options(args)).device_config.choose()
    if chosen.fallback:
        problems.append(f"models would run on the CPU: {chosen.fallback}")
    return {"chosen": chosen.name} | ({"fallback": chosen.fallback} if chosen.fallback else {})


def _threads(args: Namespace) -> dict[str, int]:
    logical = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    facts = {"logical_cpus_usable": logical}
    chosen = options.engine_options(args).get("num_threads")
    return facts if chosen is None else facts | {"chosen": chosen}


def _memory() -> dict[str, int]:
    """Bytes, as /proc/meminfo has them; empty where there is none."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    values = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    return {"total_bytes": values.get("MemTotal", 0), "available_bytes": values.get("MemAvailable", 0)}


def _folders() -> dict[str, Path]:
    from ...runtime.model_store import home, models_dir, packages_dir

    return {"home": home(), "models": models_dir(), "packages": packages_dir()}


def _folder(path: Path, problems: list[str]) -> dict[str, Any]:
    existing = next(p for p in (path, *path.parents) if p.exists())
    writable = existing.is_dir() and os.access(existing, os.W_OK)
    if not writable:
        problems.append(f"{path} cannot be written; set TRIVET_HOME to a folder you can write to")
    return {"path": str(path), "exists": path.is_dir(), "writable": writable}


def _telemetry(problems: list[str]) -> dict[str, Any]:
    """trivet sends nothing; onnxruntime would unless it is told not to, and huggingface_hub is used by pulls only."""
    off = os.environ.get("ORT_DISABLE_TELEMETRY") == "1"
    if not off:
        problems.append("ORT_DISABLE_TELEMETRY is not 1 in this process")
    return {"trivet": "none", "onnxruntime": "off" if off else "on", "huggingface_hub": "off"}


def _plan(args: Namespace) -> dict[str, Any]:
    """How memory would be used by the model that --model names, with the engine flags given."""
    from ...runtime.config import EngineConfig
    from ...runtime.model_loader import resolve_package
    from ...runtime.model_store import ModelNotFoundError, catalogue, find_name, has_scheme, resolve

    remote = has_scheme(args.model) or args.model in catalogue().models
    if remote and find_name(args.model) is None:
        raise ModelNotFoundError(f"{args.model} is not in the cache; `trivet pull {args.model}` fetches it")
    config = EngineConfig.from_kwargs(model=args.model, **options.engine_options(args))
    package, manifest = resolve_package(str(resolve(args.model)), config.load_config)
    plan = config.resolve(manifest).resolved_plan
    return {
        "name": manifest.architecture.name,
        "package": str(package),
        "weights_bytes": sum(source.size_bytes for source in manifest.sources),
        "kv_cache_bytes": plan.total_bytes,
        "kv_cache_dtype": plan.cache_dtype,
        "kv_cache_tokens": plan.kv_cache_size_tokens,
        "max_model_len": plan.max_model_len,
        "max_concurrency": round(plan.max_concurrency, 2),
    }


def _text(report: dict[str, Any]) -> str:
    rows: list[tuple[str, str]] = []
    for section, content in report.items():
        if section == "problems":
            continue
        rows += _rows(section, _without_gpu(content) if section == "cuda" else content)
    problems = report["problems"] or ["none"]
    return "\n".join([table(rows), "", *(f"problem: {problem}" for problem in problems)])


def _without_gpu(cuda: dict[str, Any] | None) -> Any:
    """The facts about CUDA, in one line where there is no GPU; a problem that comes of that has the whole text."""
    if cuda is None or cuda["devices"]:
        return cuda
    why = cuda["error"] if cuda["library"] != _NOT_BUILT else "this trivet was built without CUDA"
    return f"no GPU can be used: {why or 'CUDA offers no device'}"


def _rows(name: str, content: Any) -> list[tuple[str, str]]:
    """Nested facts as `section.key  value` lines."""
    if isinstance(content, dict) and content:
        return [row for key, value in content.items() for row in _rows(f"{name}.{key}", value)]
    if isinstance(content, bool):
        return [(name, "yes" if content else "no")]
    if isinstance(content, dict | list | tuple):
        return [(name, " ".join(map(str, content)) or "none")]
    if name.endswith("_bytes") and isinstance(content, int):
        return [(name.removesuffix("_bytes"), console.format_bytes(content))]
    return [(name, "unknown" if content is None else str(content))]
