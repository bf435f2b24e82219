"""What machine code a libtrivet_cuda holds, held against backends/cuda/kernels.json: every kernel source for exactly
the SMs that are declared for it, and no PTX that would stand in for a missing one.

    python -m release.cubins [LIBRARY] [--cuobjdump PROGRAM] [--declaration FILE]

Ends with 1 and one line per problem. cuobjdump: one that is installed, else the pinned one of release/cuda.py.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .cuda import LIBRARY, cuobjdump
from .errors import GateError
from .source import ROOT

DECLARATION = ROOT / "backends" / "cuda" / "kernels.json"
CUDA_LIBRARY = f"lib/trivet/backends/cuda/{LIBRARY}"  # in a bundle
MAX_MB = 60.0  # of the library; a larger one needs a decision
_CUBIN = re.compile(r"sm_(\d+[af]?)")
# The unnamed namespace of a source gets the source's name: ..._GLOBAL__N__<hash>_<length of name_cu>_<name>_cu...
_KERNEL = re.compile(r"_GLOBAL__N__[0-9a-f]+_(\d+)_(\w+)")

Architectures = Mapping[str, set[str]]  # source -> SMs


@dataclass(frozen=True, slots=True)
class DeviceCode:
    built: Architectures
    ptx: frozenset[str]  # SMs that PTX is embedded for
    num_bytes: int  # of the library


def declared_architectures(declaration: Path = DECLARATION) -> dict[str, set[str]]:
    """What kernels.json asks for."""
    described = json.loads(declaration.read_text())
    everywhere = set(described["architectures"])
    return {name: everywhere if sms == "all" else set(sms) for name, sms in described["sources"].items()}


def own_sources(sm: str, declared: Architectures) -> list[str]:
    """Sources that not all SMs have code of, and this one has."""
    most = max(len(sms) for sms in declared.values())
    return sorted(name for name, sms in declared.items() if sm in sms and len(sms) < most)


def read_device_code(library: Path, program: str | Path) -> DeviceCode:
    """Ask cuobjdump; GateError if it finds nothing."""

    def listed(option: str) -> str:
        return subprocess.run([program, option, library], capture_output=True, text=True, check=False).stdout

    built = built_architectures(listed("--dump-elf-symbols"))
    if not built:
        raise GateError(f"{library.name}: cuobjdump finds no kernels")
    return DeviceCode(built, frozenset(_CUBIN.findall(listed("--list-ptx"))), library.stat().st_size)


def built_architectures(symbols: str) -> dict[str, set[str]]:
    """From the output of `cuobjdump --dump-elf-symbols`."""
    found: dict[str, set[str]] = defaultdict(set)
    architecture = ""
    for line in symbols.splitlines():
        if line.startswith("arch ="):
            match = _CUBIN.search(line)
            architecture = match.group(1) if match else ""
        elif "FUNC" in line and (kernel := _KERNEL.search(line)):
            found[kernel.group(2)[: int(kernel.group(1))].removesuffix("_cu")].add(architecture)
    return dict(found)


def code_problems(code: DeviceCode, declared: Architectures) -> list[str]:
    """One line per deviation; empty if there is none."""
    problems = []
    for name in sorted(code.built.keys() | declared.keys()):
        has, wanted = code.built.get(name, set()), declared.get(name, set())
        if name not in declared:
            problems.append(f"{name}.cu: not declared, built for SM {' '.join(sorted(has))}")
            continue
        if missing := wanted - has:
            problems.append(f"{name}.cu: no code for SM {' '.join(sorted(missing))}")
        if extra := has - wanted:
            problems.append(f"{name}.cu: code for SM {' '.join(sorted(extra))}, for which it is not declared")
    if code.ptx:
        problems.append(f"PTX is embedded: {' '.join(sorted(code.ptx))}")
    if code.num_bytes > MAX_MB * 1e6:
        problems.append(f"{code.num_bytes / 1e6:.1f} MB, expected at most {MAX_MB:g} MB")
    return problems


def sm_problems(sm: str, code: DeviceCode, declared: Architectures) -> list[str]:
    """What is wrong with the code for one SM."""
    missing = sorted(name for name, sms in declared.items() if sm in sms and sm not in code.built.get(name, set()))
    extra = sorted(name for name, sms in code.built.items() if sm in sms and sm not in declared.get(name, set()))
    return [
        *(f"no code of {name}.cu" for name in missing),
        *(f"code of {name}.cu, which is not declared for it" for name in extra),
        *([f"PTX for {sm} is embedded"] if sm in code.ptx else []),
    ]


def sm_facts(names: Iterable[str], code: DeviceCode, declared: Architectures) -> list[dict[str, Any]]:
    """What the manifest says about each SM before anything ran. `aot`: it has kernels that were written for it."""
    out = []
    for name in names:
        wanted = {source for source, sms in declared.items() if name in sms}
        own = [source for source in own_sources(name, declared) if name in code.built.get(source, set())]
        out.append(
            {
                "name": name,
                "sass": all(name in code.built.get(source, set()) for source in wanted),
                "aot": bool(own),
                "fallback": "aot" if own else "portable",
                "fast_paths": own,
            }
        )
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", type=Path, nargs="?", default=DECLARATION.with_name(LIBRARY))
    parser.add_argument("--cuobjdump", type=Path, help="default: on the PATH, else the pinned one")
    parser.add_argument("--declaration", type=Path, default=DECLARATION)
    args = parser.parse_args()
    try:
        code = read_device_code(args.library, args.cuobjdump or shutil.which("cuobjdump") or cuobjdump())
        problems = code_problems(code, declared_architectures(args.declaration))
    except GateError as error:
        problems = [str(error)]
    size = args.library.stat().st_size / 1e6
    print("\n".join(problems) if problems else f"{args.library.name}: as declared, {size:.1f} MB")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
