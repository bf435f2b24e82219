"""Puts a frozen program and its papers together as the tree that is packed. The tree starts as an empty folder."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import root
from .archive import tree_files
from .environment import Environment
from .errors import BuildError
from .matrix import Tuple
from .names import PROJECT
from .papers import CYCLONEDX_NAME, NOTICES_NAME, SPDX_NAME
from .source import ROOT, Source

sys.path.insert(0, str(ROOT / "sbom"))
from bundle import BundleError, Component, Owners, collect, notices
from bundle_documents import cyclonedx, spdx


def stage_tree(
    frozen: Path, tree: Path, *, owners: Owners, source: Source, entry: Tuple, toolchain: Mapping[str, str]
) -> None:
    """Fill `tree` (which must be empty) with the program below `frozen` and all papers but the manifest."""
    if any(tree.iterdir()):
        raise BuildError(f"{tree} is not empty")
    shutil.copytree(frozen / "trivet", tree, symlinks=True, dirs_exist_ok=True)
    (tree / "bin").mkdir()
    (tree / "bin" / "trivet").symlink_to("../trivet")
    try:
        components = collect(json.loads((frozen / "sources.json").read_text(encoding="utf-8")), owners)
    except BundleError as error:
        raise BuildError(str(error)) from error
    shutil.copyfile(ROOT / "LICENSE", tree / "LICENSE")
    (tree / "VERSION").write_text(version_text(source, entry, toolchain), encoding="utf-8")
    (tree / NOTICES_NAME).write_text(notices(components), encoding="utf-8")
    normalise_modes(tree)
    write_sboms(tree, components, source)
    normalise_modes(tree)


def version_text(source: Source, entry: Tuple, toolchain: Mapping[str, str]) -> str:
    """VERSION: one `name: value` a line, for people and scripts."""
    lines = {
        "project": PROJECT,
        "version": source.version,
        "tag": source.tag or "none",
        "commit": source.commit,
        "clean-tree": "yes" if source.clean_tree else "no",
        "compiler": toolchain["compiler"],
        "backend": entry.backend,
        "target": f"{entry.os}-{entry.arch}",
        "host-abi": entry.libc or entry.os,
        "abi-version": str(source.abi_version),
    }
    return "".join(f"{name}: {value}\n" for name, value in lines.items())


def normalise_modes(tree: Path) -> None:
    """Programs 0755, everything else 0644, whatever the umask was."""
    for path in tree.rglob("*"):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or is_program(path.relative_to(tree).as_posix()) else 0o644)


def is_program(name: str) -> bool:
    """Whether this path of the bundle is executable: the program alone. Shared libraries need no such bit."""
    return name == "trivet"


def write_sboms(tree: Path, components: list[Component], source: Source) -> None:
    """Both SBOMs of the tree; BuildError for a file without an owner."""
    own = next(component for component in components if component.kind == "own")
    own.files = sorted({*own.files, "LICENSE", "VERSION", NOTICES_NAME})
    files = [entry for entry in tree_files(tree) if "link" not in entry]
    owned = {path for component in components for path in component.files}
    if stray := sorted({entry["path"] for entry in files} ^ owned):
        raise BuildError(f"files and owners differ in: {', '.join(stray)}")
    for entry in files:
        entry["sha1"] = hashlib.sha1((tree / entry["path"]).read_bytes()).hexdigest()
    (tree / CYCLONEDX_NAME).write_text(cyclonedx(PROJECT, source.version, components, files), encoding="utf-8")
    (tree / SPDX_NAME).write_text(spdx(PROJECT, source.version, components, files, source.epoch), encoding="utf-8")


def owners_of(environment: Environment) -> Owners:
    text = environment.system.path("/etc/os-release").read_text(encoding="utf-8")
    release = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    distro = f"{release.get('ID', 'linux')}-{release.get('VERSION_ID', '')}".replace('"', "")
    facts = root.inside() or {}
    return Owners(
        environment.site_packages,
        environment.base_prefix,
        environment.python_version,
        distro,
        system=environment.system.root,
        compiled=facts.get("compiled", {}),
        linked=environment.cuda.packages if environment.cuda is not None else None,
    )


def tree_size(files: list[dict[str, Any]]) -> int:
    return sum(entry["size"] for entry in files if "link" not in entry)


def check_links(tree: Path) -> None:
    """BuildError for a link that leaves the tree or leads nowhere."""
    for path in tree.rglob("*"):
        if path.is_symlink():
            target = os.path.realpath(path)
            if (
                os.path.isabs(os.readlink(path))
                or not target.startswith(f"{os.path.realpath(tree)}/")
                or not os.path.exists(target)
            ):
                raise BuildError(f"{path.relative_to(tree)} links to {os.readlink(path)}")
