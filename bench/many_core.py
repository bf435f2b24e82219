"""The CPU table on a host with many cores and no network, in one call: trivet beside a llama.cpp that is built there.

    python bench/many_core.py pack FOLDER --python-version 3.12     here, where there is a network
    python3 FOLDER/bench/many_core.py run FOLDER --output many-core.json     there, after the folder was copied

The host needs Linux on x86-64, a Python of that version with venv and pip, cmake, gcc and 6 GB of disk. Models have
random weights and are made there. What does not fit into --minutes is left out and listed in the result.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_BENCH = Path(__file__).resolve().parent
_PACKAGES = ("gguf", "diskcache", "jinja2", "typing-extensions")  # beside trivet: for random_gguf.py and llama_cpp
_LLAMA_CPP_NEEDS = ("numpy", "diskcache", "jinja2", "markupsafe", "typing_extensions")  # as wheels name them
_UNUSED = ("hf_xet-",)  # wheels that nothing needs offline
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
_ARCHIVE = "packages.tar.xz"
_SHAPE, _MIXES = "qwen3-0.6b", ("q4_0", "q8_0")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    pack = commands.add_parser("pack", help="make the folder to copy")
    pack.add_argument("--wheel", type=Path, help="trivet's wheel (default: built from this checkout, CPU only)")
    pack.add_argument("--llama-cpp", type=Path, help="unpacked source of llama-cpp-python (default: setup_peers.py's)")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    pack.add_argument("--python-version", default=version, help="of the host (default: %(default)s)")
    run = commands.add_parser("run", help="build, measure, write the result")
    run.add_argument("--output", type=Path, default=Path("many-core.json"), help="default: %(default)s")
    run.add_argument("--minutes", type=float, default=8.5, help="in all (default: %(default)s)")
    run.add_argument("--libraries", type=Path, help="folder of a libllama built for this host (default: build it)")
    run.add_argument("--work", type=Path, help="where to build (default: a temporary folder)")
    for command in (pack, run):
        command.add_argument("folder", type=Path)
    args = parser.parse_args(argv)
    return _pack(args) if args.command == "pack" else _run(args)


# --- here -------------------------------------------------------------------------------------------------------------
def _pack(args: argparse.Namespace) -> int:
    import llama_cpp_build
    from peer_cache import default_cache

    source = args.llama_cpp or default_cache().llama_cpp / f"llama_cpp_python-{llama_cpp_build.VERSION}"
    if not source.is_dir():
        print(
            f"many_core: {source} does not exist; run `python bench/setup_peers.py --peer llama-cpp`", file=sys.stderr
        )
        return 1
    with tempfile.TemporaryDirectory(prefix="trivet-pack-") as temporary:
        content = Path(temporary) / "content"
        wheels = content / "wheels"
        _download(args.wheel or _build_wheel(Path(temporary)), wheels, args.python_version)
        for wheel in sorted(wheels.glob("*.whl")):
            store(wheel)
        llama_cpp_build.copy_needed(source, content / "llama_cpp_python")
        shutil.rmtree(args.folder, ignore_errors=True)
        args.folder.mkdir(parents=True)
        with tarfile.open(args.folder / _ARCHIVE, "w:xz", preset=1) as archive:
            archive.add(content, arcname=".")
    shutil.copytree(_BENCH, args.folder / "bench", ignore=shutil.ignore_patterns("__pycache__"))
    size = sum(path.stat().st_size for path in args.folder.rglob("*") if path.is_file())
    print(f"{args.folder}: {size / 1e6:.1f} MB, for Python {args.python_version} on Linux x86-64")
    return 0


def _build_wheel(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(_BENCH.parent)]
    subprocess.run(command, env={**os.environ, "CMAKE_ARGS": "-DTRIVET_CUDA=OFF"}, check=True)
    return next(folder.glob("trivet-*.whl"))


def _download(wheel: Path, folder: Path, python_version: str) -> None:
    """trivet's wheel, and the wheels that it and the tools need, for the host's Python."""
    pip: list[str] = [sys.executable, "-m", "pip", "download", "-q", "--only-binary=:all:", "--implementation", "cp"]
    pip += ["--python-version", python_version, *(f"--platform={name}" for name in (*_PLATFORMS, "linux_x86_64"))]
    pip += [f"--abi={name}" for name in ("cp" + python_version.replace(".", ""), "abi3", "none")]
    subprocess.run([*pip, "-d", str(folder), str(wheel), *_PACKAGES], check=True)
    for path in folder.iterdir():
        if path.name.startswith(_UNUSED):
            path.unlink()


def store(wheel: Path) -> None:
    """Write the wheel again without compression: the archive around it compresses better."""
    stored = wheel.with_suffix(".stored")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(stored, "w", zipfile.ZIP_STORED) as new:
        for item in old.infolist():
            new.writestr(item, old.read(item), compress_type=zipfile.ZIP_STORED)
    stored.replace(wheel)


# --- there ------------------------------------------------------------------------------------------------------------
def _run(args: argparse.Namespace) -> int:
    """Make the environments, then measure with the Python of trivet's: `measure` runs in it."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="trivet-many-core-") as temporary:
        work = args.work or Path(temporary)
        with tarfile.open(args.folder / _ARCHIVE) as archive:
            archive.extractall(work)
        _environment(work / "llama-cpp", work / "wheels", *_LLAMA_CPP_NEEDS)
        python = _environment(work / "trivet", work / "wheels")
        code = "import sys; sys.path.insert(0, sys.argv[1]); import many_core; many_core.measure(*sys.argv[2:])"
        left = 60 * args.minutes - (time.monotonic() - started)
        libraries = str(args.libraries.resolve()) if args.libraries else ""
        command = [str(python), "-c", code, str(_BENCH), str(work), str(args.output.resolve()), str(left), libraries]
        done = subprocess.run(command, env={**os.environ, "ORT_DISABLE_TELEMETRY": "1"}, check=False)
    return done.returncode


def _environment(folder: Path, wheels: Path, *names: str) -> Path:
    """The Python of a new environment with these of the wheels, or all. It may lack a pip, so this one installs."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-index", "--no-deps"]
    chosen = [str(path) for path in wheels.glob("*.whl") if not names or path.name.partition("-")[0].lower() in names]
    subprocess.run([*pip, *chosen], check=True)
    return python


class Budget:
    """What fits before the deadline, judged by the thread-seconds that a cell needed before."""

    def __init__(self, seconds: float) -> None:
        self.skipped: list[str] = []
        self._deadline = time.monotonic() + seconds
        self._needed: dict[str, float] = {}

    def allows(self, what: str, cell: str, threads: int) -> bool:
        """Whether `cell` may begin; if not, it is noted as skipped."""
        estimate = self._needed.get(cell, 15.0 * threads) / threads
        if time.monotonic() + estimate <= self._deadline:
            return True
        self.skipped.append(f"{what}: {cell}")
        return False

    def took(self, cell: str, threads: int, seconds: float) -> None:
        self._needed[cell] = max(self._needed.get(cell, 0.0), seconds * threads)


def measure(work_text: str, output_text: str, seconds_text: str, libraries_text: str) -> None:
    """Build llama.cpp unless it is there, write the models, and measure what _plan says until the time is over."""
    from compare import new_report
    from engines import EngineSpec, own_engine
    from growth import parallel_efficiency, thread_counts
    from limits import describe, measure_limits
    from measure import refuse_noise
    from tables import markdown, merge

    work, output, budget = Path(work_text), Path(output_text), Budget(float(seconds_text))
    specs = [own_engine(), EngineSpec("llama-cpp", str(_install_llama_cpp(work, libraries_text)))]
    models = _write_models(work)
    counts = thread_counts(len(os.sched_getaffinity(0)))
    noise = refuse_noise(allowed=True)
    limits = measure_limits(counts=counts)
    print("\n".join(describe(limits)), flush=True)
    report = new_report(argparse.Namespace(threads=max(counts), rounds=2), noise, limits)
    decode: dict[str, Any] = {}
    for model, threads, names in _plan(models, counts):
        print(f"\n{model.name}, {threads} threads", flush=True)
        result = _measure(model, threads, names, specs, limits[str(threads)], budget)
        report["models"].append(result)
        if model == models[0] and "decode-128" in result["cells"]:
            decode[str(threads)] = result["cells"]["decode-128"]
        report |= {"skipped": budget.skipped, "efficiency": parallel_efficiency(decode)}
        output.write_text(json.dumps(report, indent=1) + "\n")
    print("\n".join(["", *markdown(merge([report])), "", f"parallel efficiency of decode: {report['efficiency']}"]))
    print(f"left out for time: {', '.join(budget.skipped) or 'nothing'}; written to {output}")


def _install_llama_cpp(work: Path, libraries_text: str) -> Path:
    """The Python that has llama.cpp, with the libraries of that folder or newly built ones."""
    import llama_cpp_build

    started = time.monotonic()
    python = work / "llama-cpp" / "bin" / "python"
    log = work / "llama-cpp.log"

    def run(command: list[str | Path]) -> None:
        with log.open("a") as output:
            subprocess.run(list(map(str, command)), stdout=output, stderr=subprocess.STDOUT, check=True)

    source = work / "llama_cpp_python"
    try:
        libraries = Path(libraries_text or llama_cpp_build.build(source, work / "llama-build", run, tools=False))
    except subprocess.CalledProcessError:
        print(log.read_text()[-3000:], file=sys.stderr)
        raise
    llama_cpp_build.install_package(python, source, libraries)
    print(f"llama.cpp there after {time.monotonic() - started:.0f} s", flush=True)
    return python


def _write_models(work: Path) -> list[Path]:
    from random_gguf import SHAPES, write_model

    paths = [work / f"{_SHAPE}-random-{mix}.gguf" for mix in _MIXES]
    for path, mix in zip(paths, _MIXES, strict=True):
        if not path.exists():
            write_model(SHAPES[_SHAPE], mix, path, name=path.stem)
    return paths


def _plan(models: Sequence[Path], counts: Sequence[int]) -> Iterator[tuple[Path, int, list[str]]]:
    """(model, threads, cells), the ones that matter most first."""
    most, first = max(counts), models[0]
    yield first, most, ["prefill-512", "decode-128", "concurrent-16", "prefill-2048", "decode-2048"]
    for threads in sorted(set(counts) - {most}):
        yield first, threads, ["prefill-512", "decode-128"]
    for model in models[1:]:
        yield model, most, ["prefill-512", "decode-128", "concurrent-16"]
    for threads in sorted(set(counts) - {most}, reverse=True):
        yield first, threads, ["concurrent-16"]
    for model in models[1:]:
        for threads in sorted(set(counts) - {most}):
            yield model, threads, ["prefill-512", "decode-128"]


def _measure(
    model: Path, threads: int, names: Sequence[str], specs: Sequence[Any], limits: dict[str, Any], budget: Budget
) -> dict[str, Any]:
    """The cells that fit into the budget, as a model of compare.py's report."""
    from cells import Shape, all_cells
    from engines import running
    from measure import cell_result, measure_cell
    from tables import print_cell

    label = f"{model.name}, {threads} threads"
    result: dict[str, Any] = {"model": label, "threads": threads, "engines": {}, "cells": {}}
    names = [name for name in names if budget.allows(label, name, threads)]
    if not names:
        return result
    cells = {cell.name: cell for cell in all_cells(Shape()) if cell.name in names}
    paths = {spec.name: model for spec in specs}
    context = max(cell.context() for cell in cells.values())
    with running(specs, paths, threads=threads, context=context) as (engines, loaded):
        result["engines"] = loaded
        for name in names:
            if not budget.allows(label, name, threads):
                continue
            started = time.monotonic()
            runs = measure_cell(cells[name], engines, 2 if threads > 2 else 1, repeats_noisy=False)
            result["cells"][name] = cell_result(cells[name], runs, loaded["trivet"]["cost"], limits)
            print_cell(name, result["cells"][name])
            budget.took(name, threads, time.monotonic() - started)
    return result


if __name__ == "__main__":
    sys.exit(main())
