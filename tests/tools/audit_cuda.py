#!/usr/bin/env python3
"""Holds a built libtrivet_cuda against backends/cuda/kernels.json: every kernel source has machine code for exactly the
SMs that are declared for it, and no PTX stands in for a missing one.

    audit_cuda.py [LIBRARY] [--cuobjdump PROGRAM] [--declaration FILE] [--max-mb 60]

cuobjdump comes with CUDA or with the PyPI package nvidia-cuda-cuobjdump. Ends with 1 and one line per problem.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import site
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

CUDA = Path(__file__).resolve().parents[2] / "backends" / "cuda"
_CUBIN = re.compile(r"sm_(\d+[af]?)")
# The unnamed namespace of a source gets the source's name: ..._GLOBAL__N__<hash>_<length of name_cu>_<name>_cu...
_KERNEL = re.compile(r"_GLOBAL__N__[0-9a-f]+_(\d+)_(\w+)")


def find_cuobjdump() -> str | None:
    """On the PATH, or in the folder where the PyPI package puts it."""
    if found := shutil.which("cuobjdump"):
        return found
    for folder in (*site.getsitepackages(), site.getusersitepackages()):
        for candidate in sorted(Path(folder).glob("nvidia/*/bin/cuobjdump")):
            return str(candidate)
    return None


def declared_architectures(declaration: Path) -> dict[str, set[str]]:
    """Source -> SMs."""
    described = json.loads(declaration.read_text())
    everywhere = set(described["architectures"])
    return {name: everywhere if sms == "all" else set(sms) for name, sms in described["sources"].items()}


def built_architectures(symbols: str) -> dict[str, set[str]]:
    """Source -> SMs, from the output of `cuobjdump --dump-elf-symbols`."""
    found: dict[str, set[str]] = defaultdict(set)
    architecture = ""
    for line in symbols.splitlines():
        if line.startswith("arch ="):
            match = _CUBIN.search(line)
            architecture = match.group(1) if match else ""
        elif "FUNC" in line and (kernel := _KERNEL.search(line)):
            found[kernel.group(2)[: int(kernel.group(1))].removesuffix("_cu")].add(architecture)
    return dict(found)


def problems_of(
    built: dict[str, set[str]], declared: dict[str, set[str]], ptx: str, num_bytes: int, max_mb: float
) -> list[str]:
    """One line per deviation; empty if there is none."""
    problems = []
    for name in sorted(built.keys() | declared.keys()):
        has, wanted = built.get(name, set()), declared.get(name, set())
        if name not in declared:
            problems.append(f"{name}.cu: not declared, built for SM {' '.join(sorted(has))}")
            continue
        if missing := wanted - has:
            problems.append(f"{name}.cu: no code for SM {' '.join(sorted(missing))}")
        if extra := has - wanted:
            problems.append(f"{name}.cu: code for SM {' '.join(sorted(extra))}, for which it is not declared")
    if _CUBIN.search(ptx):
        problems.append(f"PTX is embedded: {' '.join(sorted(set(_CUBIN.findall(ptx))))}")
    if num_bytes > max_mb * 1e6:
        problems.append(f"{num_bytes / 1e6:.1f} MB, expected at most {max_mb:g} MB")
    return problems


def audit(library: Path, declaration: Path, cuobjdump: str, max_mb: float = 60) -> list[str]:
    """Problems of a library."""

    def run(*options: str) -> str:
        return subprocess.run([cuobjdump, *options, str(library)], capture_output=True, text=True, check=False).stdout

    built = built_architectures(run("--dump-elf-symbols"))
    if not built:
        return [f"{library}: {cuobjdump} finds no kernels"]
    return problems_of(built, declared_architectures(declaration), run("--list-ptx"), library.stat().st_size, max_mb)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", type=Path, nargs="?", default=CUDA / "libtrivet_cuda.so")
    parser.add_argument("--cuobjdump", default=find_cuobjdump())
    parser.add_argument("--declaration", type=Path, default=CUDA / "kernels.json")
    parser.add_argument("--max-mb", type=float, default=60)
    arguments = parser.parse_args()
    if arguments.cuobjdump is None:
        parser.error("cuobjdump not found: install CUDA or the PyPI package nvidia-cuda-cuobjdump")
    problems = audit(arguments.library, arguments.declaration, arguments.cuobjdump, arguments.max_mb)
    size = arguments.library.stat().st_size / 1e6
    print("\n".join(problems) if problems else f"{arguments.library.name}: as declared, {size:.1f} MB")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
