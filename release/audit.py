"""Static gates over an unpacked tree: what it holds, what it links to, what it needs, which paths it betrays."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .archive import tree_files
from .elf import ElfFile, is_elf, max_version, parse_elf, version_key
from .errors import GateError
from .frozen import frozen_modules, zipped_modules
from .manifest import MANIFEST_NAME

ALLOWLISTS = Path(__file__).with_name("allowlists")
KNOWN_PATHS = Path(__file__).with_name("known_paths.json")
# Of the C library; everything else must be in the bundle.
HOST_LIBRARIES = {
    "libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libutil.so.1",
    "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1",
}  # fmt: skip
# Drivers belong to the machine, the CUDA runtime is linked statically; readline is under GPL-3.
REFUSED_LIBRARIES = re.compile(r"lib(cuda|cudart|nvidia|vulkan|amdhip|hsa|readline|tinfo|avcodec|avformat)\b")
_REFUSED_NAMES = re.compile(
    r"(?i)\.(o|a|c|cc|cpp|cu|h|hpp|inc|pyx|py|gguf|safetensors|onnx|bin|pem|key|p12|env|npmrc|netrc|pypirc)$"
    r"|(^|/)(tokenizer\.json|tokenizer\.model|id_rsa|id_ed25519|\.env|\.git|credentials)"
)
_SECRETS = re.compile(
    rb"-----BEGIN [A-Z ]*PRIVATE KEY-----\n|\bAKIA[0-9A-Z]{16}\b"
    rb"|\bghp_[A-Za-z0-9]{36}\b|\bhf_[A-Za-z0-9]{34}\b|\bpypi-AgEI[\w-]{20,}"
)
# Paths of a machine that builds. /usr and /etc are where programs look for files of their host.
_BUILD_PATH = re.compile(
    rb"(?<![\w.:/-])/(?:root|home|tmp|work|build|builds|compile|src|mnt|opt|workspace|project|io|Users|github|__w|var/tmp|onnxruntime_src)"
    rb"/[\w.+@~-][\w.+@~/-]*"
)


@dataclass(frozen=True, slots=True)
class TargetFacts:
    libc_floor: str | None  # newest GLIBC symbol version that any file needs
    libstdcxx: str | None  # newest GLIBCXX and CXXABI, for readers
    host_libraries: tuple[str, ...]  # needed and not bundled


def elf_files(tree: Path) -> Iterator[tuple[str, ElfFile]]:
    """(path, parsed) of every ELF file below `tree`, sorted; links are not followed."""
    for path in sorted(tree.rglob("*")):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                if not is_elf(file.read(4)):
                    continue
            yield path.relative_to(tree).as_posix(), parse_elf(path.read_bytes())


def describe_target(tree: Path) -> TargetFacts:
    """What a machine must offer to run the tree."""
    files = dict(elf_files(tree))
    bundled = {path.name for path in tree.rglob("*")}
    versions = tuple(version for file in files.values() for version in file.versions)
    glibcxx, cxxabi = max_version(versions, "GLIBCXX"), max_version(versions, "CXXABI")
    needed = {name for file in files.values() for name in file.needed}
    return TargetFacts(
        libc_floor=max_version(versions, "GLIBC"),
        libstdcxx=f"GLIBCXX_{glibcxx} CXXABI_{cxxabi}" if glibcxx else None,
        host_libraries=tuple(sorted(needed - bundled)),
    )


def allowed_paths(artifact_id: str, recipe: str, version: str) -> set[str]:
    """The exact paths that the archive may and must hold.

    A line is PATH, PATH <tab> RECIPE for one recipe alone, or `include FILE` for the lines of another list.
    """
    return {path.replace("{version}", version) for path in _listed_paths(f"{artifact_id}.txt", recipe)}


def _listed_paths(name: str, recipe: str) -> Iterator[str]:
    file = ALLOWLISTS / name
    if not file.is_file():
        raise GateError(f"there is no allowlist {name}")
    for line in file.read_text(encoding="utf-8").splitlines():
        path, _, only = line.partition("\t")
        if path.startswith("include "):
            yield from _listed_paths(path.removeprefix("include "), recipe)
        elif path and not path.startswith("#") and only in ("", recipe):
            yield path


def content_problems(tree: Path, manifest: Mapping[str, Any], allowed: set[str]) -> list[str]:
    """Gate "contents": exactly the allowed files, as the manifest lists them, none that no bundle may hold."""
    present = tree_files(tree)
    names = {entry["path"] for entry in present}
    out = [f"not allowed: {name}" for name in sorted(names - allowed)]
    out += [f"missing: {name}" for name in sorted(allowed - names)]
    listed = {entry["path"]: entry for entry in manifest["files"]}
    for entry in present:
        name = entry["path"]
        if name == MANIFEST_NAME:
            continue
        if name not in listed:
            out.append(f"not in the manifest: {name}")
        elif listed[name] != entry:
            changed = sorted(key for key in {*entry, *listed[name]} if entry.get(key) != listed[name].get(key))
            out.append(f"not as in the manifest ({', '.join(changed)}): {name}")
        if _REFUSED_NAMES.search(name) and name not in allowed:
            out.append(f"a bundle never holds such a file: {name}")
        if "link" not in entry:
            out += _file_problems(tree / name, name, entry["mode"])
    return out + [f"in the manifest only: {name}" for name in sorted(set(listed) - names)]


def _file_problems(path: Path, name: str, mode: str) -> list[str]:
    out = []
    bits = path.stat().st_mode & 0o7777
    if bits not in (0o644, 0o755):
        out.append(f"mode {bits:04o}: {name}")
    if (mode == "0755") != (name == "trivet"):
        out.append(f"mode {mode}; of all files only the program is executable: {name}")
    if _SECRETS.search(path.read_bytes()):
        out.append(f"holds something like a credential: {name}")
    return out


def elf_problems(tree: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Gate "elf": architecture, needed libraries, search paths, symbol versions, stacks and segments of binaries."""
    files = dict(elf_files(tree))
    out = [] if files else ["the tree holds no ELF file"]
    target = manifest["target"]
    for name, file in files.items():
        out += _binary_problems(name, file, target["arch"])
        for library in file.needed:
            if library not in HOST_LIBRARIES and not _is_found(tree, name, file, library):
                out.append(f"needs {library}, which is neither bundled nor of the C library: {name}")
        floor = max_version(file.versions, "GLIBC")
        if floor and target["libc_floor"] and version_key(floor) > version_key(target["libc_floor"]):
            out.append(f"needs GLIBC_{floor}, the manifest says {target['libc_floor']}: {name}")
    out += _runtime_problems(tree, files)
    facts = describe_target(tree)
    for field in ("libc_floor", "libstdcxx"):
        if getattr(facts, field) != target[field]:
            out.append(f"target.{field} is {target[field]}, the files need {getattr(facts, field)}")
    if list(facts.host_libraries) != target["host_libraries"]:
        out.append(f"target.host_libraries is {target['host_libraries']}, the files need {list(facts.host_libraries)}")
    return out


def _runtime_problems(tree: Path, files: Mapping[str, ElfFile]) -> list[str]:
    """Symbol versions of the C++ runtime that a file needs and the bundled runtime is too old for."""
    runtime = tree / "lib" / "libstdc++.so.6"
    provided = runtime.read_bytes() if runtime.is_file() else b""
    return [
        f"needs {version}, which the bundled {runtime.name} does not have: {name}"
        for name, file in files.items()
        for version in file.versions
        if provided and version.startswith(("GLIBCXX_", "CXXABI_")) and version.encode() + b"\0" not in provided
    ]


def _binary_problems(name: str, file: ElfFile, arch: str) -> list[str]:
    out = []
    if file.machine != arch:
        out.append(f"is for {file.machine}, the bundle for {arch}: {name}")
    for path in file.rpath:
        inside = os.path.normpath(path.replace("$ORIGIN", os.path.dirname(f"top/{name}")).replace("${ORIGIN}", "top"))
        if not path.startswith(("$ORIGIN", "${ORIGIN}")):
            out.append(f"searches libraries in {path}: {name}")
        elif not (inside == "top" or inside.startswith("top/")):
            out.append(f"searches libraries outside of the bundle, in {path}: {name}")
    if file.executable_stack:
        out.append(f"wants an executable stack: {name}")
    if file.misaligned:
        out.append(f"has a segment that no loader accepts: {name}")
    for library in (*file.needed, os.path.basename(name)):
        if REFUSED_LIBRARIES.match(library):
            out.append(f"{library} is never bundled and never linked: {name}")
    return out


def _is_found(tree: Path, name: str, file: ElfFile, library: str) -> bool:
    """Whether the loader finds `library`: along the file's own search path, or in lib/, which the bootloader adds."""
    folder = str((tree / name).parent)
    places = [path.replace("$ORIGIN", folder).replace("${ORIGIN}", folder) for path in file.rpath]
    return any(os.path.exists(os.path.join(place, library)) for place in [*places, str(tree / "lib")])


def path_strings(tree: Path, forbidden: tuple[str, ...]) -> dict[str, list[str]]:
    """File -> build paths inside; frozen modules count as PROGRAM:MODULE. `forbidden`: more prefixes to look for."""
    out = {}
    for path in sorted(tree.rglob("*")):
        if path.is_file() and not path.is_symlink():
            name = path.relative_to(tree).as_posix()
            for part, data in _parts(name, path.read_bytes()):
                if found := build_paths(data, forbidden):
                    out[part] = found
    return out


def build_paths(data: bytes, forbidden: tuple[str, ...] = ()) -> list[str]:
    """Paths of a machine that builds, and those that begin with one of `forbidden`, sorted."""
    patterns = [_BUILD_PATH, *(re.compile(re.escape(prefix).encode() + rb"[\w.+@~/-]*") for prefix in forbidden)]
    return sorted({match.decode() for pattern in patterns for match in pattern.findall(data)})


def _parts(name: str, data: bytes) -> Iterator[tuple[str, bytes]]:
    yield name, data
    if name == "trivet":
        for module, code in frozen_modules(data):
            yield f"{name}:{module}", code
    elif name.endswith("base_library.zip"):
        for module, code in zipped_modules(data):
            yield f"{name}:{module}", code


def path_problems(tree: Path, forbidden: tuple[str, ...] = (), known_file: Path = KNOWN_PATHS) -> list[str]:
    """Gate "paths": no build path beyond those that third parties left, which are known file by file, by digest."""
    known = json.loads(known_file.read_text(encoding="utf-8"))
    out = []
    for name, found in path_strings(tree, forbidden).items():
        if strings_digest(found) not in known.get(name, {}).get("sha256", []):
            out.append(f"holds {len(found)} build paths that are not known, like {found[0]}: {name}")
    return out


def strings_digest(found: list[str]) -> str:
    return hashlib.sha256("\n".join(found).encode()).hexdigest()
