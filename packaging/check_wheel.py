#!/usr/bin/env python3
"""Check that a wheel holds exactly what it should: the four folders' Python files, the op library, its metadata.

    check_wheel.py WHEEL

A file that is missing, or that nobody asked for, is an error that names it.
"""

from __future__ import annotations

import re
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = {  # folder in the wheel <- folder in the repository
    "trivet": ROOT / "packaging" / "python" / "trivet",
    "trivet/app": ROOT / "app",
    "trivet/runtime": ROOT / "runtime",
    "trivet/backends": ROOT / "backends",
    "trivet/exporters": ROOT / "exporters",
}
SHIPPED_SUFFIXES = {".py", ".typed", ".jinja", ".json", ".tcss"}
LIBRARIES = {"trivet/backends/cpu/libtrivet_cpu.so"}
METADATA = {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE", "sboms/trivet.cdx.json"}


def python_files() -> set[str]:
    """Paths in the wheel of every source file that ships."""
    found = set()
    for prefix, folder in SOURCES.items():
        for path in folder.rglob("*"):  # does not enter the links that packaging/link.py makes
            if path.is_file() and path.suffix in SHIPPED_SUFFIXES:
                found.add(f"{prefix}/{path.relative_to(folder).as_posix()}")
    return found


def expected_files(dist_info: str) -> set[str]:
    return python_files() | LIBRARIES | {f"{dist_info}/{name}" for name in METADATA}


def problems(wheel: Path) -> list[str]:
    """What is wrong with the wheel; empty if nothing."""
    match = re.fullmatch(r"(trivet-([\w.]+))-py3-none-(\w+)\.whl", wheel.name)
    if not match or match[3] == "any":
        return [f"{wheel.name}: expected trivet-VERSION-py3-none-PLATFORM.whl"]
    dist_info = f"{match[1]}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        names = [info.filename for info in archive.infolist() if not info.is_dir()]
        metadata = Parser().parsestr(archive.read(f"{dist_info}/METADATA").decode())
    expected = expected_files(dist_info)
    out = [f"missing: {name}" for name in sorted(expected - set(names))]
    out += [f"not expected: {name}" for name in sorted(set(names) - expected)]
    out += [f"twice: {name}" for name in sorted({n for n in names if names.count(n) > 1})]
    if metadata["Version"] != match[2]:
        out.append(f"METADATA says version {metadata['Version']}")
    return out


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    wheel = Path(sys.argv[1])
    if found := problems(wheel):
        sys.exit(f"{wheel.name}:\n  " + "\n  ".join(found))
    print(f"{wheel.name}: exactly the files it should hold, {wheel.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
