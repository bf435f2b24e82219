"""`release build`: environment -> frozen program -> staged tree -> archive, checksum and provenance."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import provenance, root
from .architectures import architecture_of
from .archive import sha256_file, tree_files, write_archive
from .audit import describe_target
from .channel import compute_channel
from .cubins import CUDA_LIBRARY, declared_architectures, read_device_code, sm_facts
from .cuda import cuda_library, cuobjdump
from .environment import BACK_ENDS, DEFAULT_PYTHON, PINS, Environment, make_environment
from .errors import BuildError
from .evidence import GATES, SM_GATES, TIER_GATES, collect
from .manifest import MANIFEST_NAME, SCHEMA_NAME, check_manifest, to_bytes
from .matrix import Tuple, load_matrix
from .names import PROJECT, archive_name
from .process import run
from .source import Source, read_source, refuse_in_tree
from .stage import check_links, owners_of, stage_tree, tree_size
from .system import system_for
from .tiers import tier_facts

RECIPES = ("quick", "release")


@dataclass(frozen=True, slots=True)
class BuildOptions:
    recipe: str  # RECIPES: "quick" = this system's Python and wheels of the index; "release" = all in the release root
    out: Path  # folder of the three files
    work: Path  # empty folder for everything on the way
    wheel: Path | None = None  # trivet's wheel; None = build it from a copy of the tree
    base_python: Path = DEFAULT_PYTHON
    key: Path | None = None  # PEM file of an Ed25519 key that signs the provenance
    fresh_cuda: bool = False  # compile the CUDA library in `work`, whatever the cache holds


def build(artifact_id: str, options: BuildOptions) -> Path:
    """Build one tuple and return its archive. MatrixError for a tuple that may not be, BuildError if a step fails."""
    matrix = load_matrix()
    entry = matrix.require_buildable(artifact_id, "built")
    _check_host(entry, options)
    source = read_source()
    refuse_in_tree(options.out)
    options.work.mkdir(parents=True, exist_ok=True)
    options.out.mkdir(parents=True, exist_ok=True)
    if any(options.work.iterdir()):
        raise BuildError(f"{options.work} is not empty; a build starts in an empty folder")
    if options.recipe == "release":
        if root.inside() is None:
            return _build_in_root(artifact_id, options)
        options = replace(options, base_python=root.PYTHON)
    environment = make_environment(
        options.work,
        recipe=options.recipe,
        wheel=options.wheel,
        base_python=options.base_python,
        epoch=source.epoch,
        system=system_for(entry.arch),
        cuda=cuda_library(options.work, fresh=options.fresh_cuda) if entry.backend == "cuda" else None,
    )
    frozen = freeze(environment, options.work, source.epoch)
    toolchain = _toolchain(environment)
    name = archive_name(source.version, artifact_id, entry.archive_format)
    tree = options.work / "stage" / name.top_folder
    tree.mkdir(parents=True)
    stage_tree(frozen, tree, owners=owners_of(environment), source=source, entry=entry, toolchain=toolchain)
    check_links(tree)
    manifest = embedded_manifest(tree, source, entry, environment, toolchain, options.recipe)
    check_manifest(manifest, matrix)
    (tree / MANIFEST_NAME).write_bytes(to_bytes(manifest))
    (tree / MANIFEST_NAME).chmod(0o644)
    archive = write_archive(tree, name, options.out, epoch=source.epoch)
    statement = provenance.statement(manifest, archive, epoch=source.epoch)
    provenance.write_envelope(statement, archive, options.key)
    return archive


def _build_in_root(artifact_id: str, options: BuildOptions) -> Path:
    """Have the root build it; the key stays outside, so the signing happens here."""
    if options.wheel is not None or options.base_python != DEFAULT_PYTHON:
        raise BuildError("the release recipe compiles its own Python and wheel; --python and --wheel are for quick")
    built = root.build_inside(artifact_id, options.work, ["--fresh-cuda"] if options.fresh_cuda else [])
    name = archive_name(read_source().version, artifact_id, load_matrix().find(artifact_id).archive_format)
    for file in (str(name), *name.companions):
        shutil.move(built / file, options.out / file)
    archive = options.out / str(name)
    if options.key is not None:
        provenance.write_envelope(provenance.read_envelope(archive, None), archive, options.key)
    return archive


def _check_host(entry: Tuple, options: BuildOptions) -> None:
    if options.recipe not in RECIPES:
        raise BuildError(f"recipe {options.recipe!r}; the recipes are {', '.join(RECIPES)}")
    if entry.backend == "cuda" and options.wheel is not None:
        raise BuildError(f"--wheel is for CPU archives; {entry.artifact_id} holds a CUDA library of known inputs")
    host = (platform.system().lower(), platform.machine())
    if host == (entry.os, entry.arch):
        return
    if host[0] != entry.os or not architecture_of(entry.arch).best_tiers:
        raise BuildError(f"{entry.artifact_id} is built on {entry.os} {entry.arch}; this is {host[0]} {host[1]}")
    if options.recipe != "quick" or options.base_python != DEFAULT_PYTHON:
        raise BuildError(f"on {host[1]}, {entry.artifact_id} is built by the recipe quick with the Python of Debian 12")
    if shutil.which(architecture_of(entry.arch).tool("g++")) is None:
        package = f"g++-{architecture_of(entry.arch).triplet}"
        raise BuildError(f"{entry.artifact_id} is cross-compiled: install {package} (Debian's name)")


def freeze(environment: Environment, work: Path, epoch: int) -> Path:
    """Run PyInstaller; the folder with the program's folder `trivet` and `sources.json`."""
    out = work / "frozen"
    settings = {
        "PATH": os.environ["PATH"],
        "HOME": str(work),
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "SOURCE_DATE_EPOCH": str(epoch),
        "PYTHONHASHSEED": "0",
        "PYINSTALLER_CONFIG_DIR": str(work / "pyinstaller-cache"),
        "ORT_DISABLE_TELEMETRY": "1",
    }
    command: list[str | Path] = [environment.python, "-m", "PyInstaller", "--noconfirm", "--log-level", "WARN"]
    command += ["--distpath", out, "--workpath", work / "freeze", PINS / "trivet.spec"]
    environment.system.run(command, [work, PINS], settings)
    shutil.copyfile(work / "freeze" / "trivet" / "sources.json", out / "sources.json")
    return out


def _toolchain(environment: Environment) -> dict[str, str]:
    system = environment.system
    tools = {
        "compiler": run([system.architecture.tool("g++"), "--version"]).splitlines()[0],
        "python": environment.python_version,
        "pyinstaller": environment.distributions["pyinstaller"],
        "strip": system.run(["strip", "--version"], [environment.site_packages]).splitlines()[0],
    }
    if system.is_foreign:
        tools["emulator of python and strip"] = run([system.architecture.qemu, "--version"]).splitlines()[0]
    if environment.cuda is not None:
        tools |= environment.cuda.toolchain
    if (facts := root.inside()) is not None:
        tools |= {"root": f"{facts['suite']} {facts['recipe_sha256']}"}
        tools |= {f"compiled {name}": version for name, version in facts["compiled"].items()}
    return tools


def embedded_manifest(
    tree: Path, source: Source, entry: Tuple, environment: Environment, toolchain: Mapping[str, str], recipe: str
) -> dict[str, Any]:
    """The manifest that travels inside: what was built, and no evidence, for the archive does not exist yet."""
    files = tree_files(tree)
    manifest: dict[str, Any] = {
        "schema": SCHEMA_NAME,
        "project": PROJECT,
        "version": source.version,
        "artifact_id": entry.artifact_id,
        "abi_version": source.abi_version,
        "archive": None,
        "source": {"commit": source.commit, "tag": source.tag, "clean_tree": source.clean_tree},
        "build": _build_section(tree, entry, environment, toolchain, recipe),
        "target": _target_section(tree, entry, environment),
        "package": {
            "form": "one-dir",
            "python_bundled": True,
            "static_core": False,
            "size": tree_size(files),
            "num_files": len(files),
        },
        "driver": list(entry.external),
        "cpu_tiers": [tier | {"evidence": collect(TIER_GATES, [])} for tier in tier_facts(entry.arch, entry.cpu_tiers)],
        "sms": _sm_section(tree, entry),
        "evidence": collect(GATES, []),
        "limits": list(entry.limits),
        "files": files,
    }
    manifest["channel"] = compute_channel(manifest, entry)
    return manifest


def _sm_section(tree: Path, entry: Tuple) -> list[dict[str, Any]]:
    """What the CUDA library holds for each SM, read from it; nothing of a bundle without one."""
    if entry.backend != "cuda":
        return []
    facts = sm_facts(entry.sms, read_device_code(tree / CUDA_LIBRARY, cuobjdump()), declared_architectures())
    return [fact | {"evidence": collect(SM_GATES, [])} for fact in facts]


def _build_section(
    tree: Path, entry: Tuple, environment: Environment, toolchain: Mapping[str, str], recipe: str
) -> dict[str, Any]:
    packages = [{"name": name, "version": version} for name, version in environment.distributions.items()]
    how = ["one-dir", "no UPX", "bootloader with zlib inside", "strip of libraries that survive it"]
    return {
        "recipe": recipe,
        "command": f"python -m release build {entry.artifact_id} --recipe {recipe}",
        "toolchain": dict(toolchain),
        "options": [*BACK_ENDS[entry.backend], *how],
        "dependencies": packages,
        "inputs_sha256": _inputs_digest(packages, toolchain, tree),
    }


def _target_section(tree: Path, entry: Tuple, environment: Environment) -> dict[str, Any]:
    """What a machine must be and have; the floors are those of the bundled files, not of what built them."""
    target = describe_target(tree)
    return {
        "os": entry.os,
        "arch": entry.arch,
        "libc": entry.libc,
        "backend": entry.backend,
        "libc_floor": target.libc_floor,
        "libstdcxx": target.libstdcxx,
        "cpu_baseline": environment.cpu_baseline,
        "cpu_baseline_reason": environment.cpu_baseline_reason,
        "host_libraries": list(target.host_libraries),
    }


def _inputs_digest(packages: list[dict[str, str]], toolchain: Mapping[str, str], tree: Path) -> str:
    """Digest of everything that decides about the bytes: pins, spec, packages, tools, and the op library."""
    inputs = {
        "packages": packages,
        "toolchain": dict(toolchain),
        "pins": [sha256_file(path) for path in sorted(PINS.glob("requirements*.txt"))],
        "spec": [sha256_file(path) for path in [*sorted(PINS.rglob("*.py")), PINS / "trivet.spec"]],
        "libraries": [sha256_file(path) for path in sorted((tree / "lib" / "trivet").rglob("libtrivet_*"))],
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()
