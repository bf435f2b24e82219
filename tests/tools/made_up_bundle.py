"""A made-up bundle that passes every static gate, and the tools to break it. Nothing here needs a build."""

from __future__ import annotations

import importlib.util
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

if "release" not in sys.modules:  # by file, so that the checkout's other folders do not become importable
    _spec = importlib.util.spec_from_file_location(
        "release", ROOT / "release" / "__init__.py", submodule_search_locations=[str(ROOT / "release")]
    )
    assert _spec is not None and _spec.loader is not None
    sys.modules["release"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["release"])
    sys.path.append(str(ROOT / "sbom"))

from bundle import Component, notices  # noqa: E402

from release import papers, stage  # noqa: E402  (stage also finds the modules of sbom/)
from release.archive import tree_files  # noqa: E402
from release.audit import describe_target  # noqa: E402
from release.channel import compute_channel  # noqa: E402
from release.evidence import GATES, TIER_GATES, GateResult, collect  # noqa: E402
from release.manifest import to_bytes  # noqa: E402
from release.matrix import load_matrix  # noqa: E402
from release.names import archive_name  # noqa: E402
from release.source import Source  # noqa: E402
from release.tiers import tier_facts  # noqa: E402

ARTIFACT = "linux-x86_64-glibc-cpu"
EPOCH = 1_700_000_000
SOURCE = Source("1.2.3", 1, "a" * 40, "v1.2.3", True, EPOCH)
TOOLCHAIN = {"python": "3.11.2", "pyinstaller": "6.0", "compiler": "c++ 12"}
DIGEST = "d" * 64

Manifest = dict[str, Any]


def elf(
    *,
    machine: int = 62,
    needed: tuple[str, ...] = ("libc.so.6",),
    runpath: str | None = None,
    versions: Mapping[str, tuple[str, ...]] | None = None,
    exports: tuple[str, ...] = (),
    stack_flags: int = 6,
    tail: bytes = b"",
) -> bytes:
    """A shared library with this dynamic section and no code."""
    versions = {"libc.so.6": ("GLIBC_2.17",)} if versions is None else versions
    strings = b"\0"

    def text(value: str) -> int:
        nonlocal strings
        strings += value.encode() + b"\0"
        return len(strings) - len(value) - 1

    tags = [(1, text(name)) for name in needed]
    if runpath is not None:
        tags.append((29, text(runpath)))
    needs = b""
    for index, (library, names) in enumerate(versions.items()):
        entries = b""
        for position, name in enumerate(names):
            following = 16 if position + 1 < len(names) else 0
            entries += struct.pack("<IHHII", 0, 0, 2, text(name), following)
        following = 16 + len(entries) if index + 1 < len(versions) else 0
        needs += struct.pack("<HHIII", 1, len(names), text(library), 16, following) + entries
    # A hash table with one bucket, whose chain is all symbols but the null one.
    symbols = bytes(24) + b"".join(struct.pack("<I20x", text(name)) for name in exports)
    chain = [0] * (len(exports) - 1) + [1] if exports else []
    hashed = struct.pack("<IIII8xI", 1, 1, 1, 0, 1 if exports else 0) + struct.pack(f"<{len(chain)}I", *chain)
    headers, size = 3, 64 + 3 * 56
    tags += [(5, size), (0x6FFFFFFE, size + len(strings)), (0x6FFFFFFF, len(versions))]
    tables = size + len(strings) + len(needs)
    tags += [(6, tables), (0x6FFFFEF5, tables + len(symbols)), (0, 0)]
    dynamic = b"".join(struct.pack("<qQ", tag, value) for tag, value in tags)
    start = tables + len(symbols) + len(hashed)
    total = start + len(dynamic) + len(tail)
    head = b"\x7fELF\x02\x01\x01" + bytes(9)
    head += struct.pack("<HHIQQQIHHHHHH", 3, machine, 1, 0, 64, 0, 0, 64, 56, headers, 0, 0, 0)
    head += struct.pack("<IIQQQQQQ", 1, 5, 0, 0, 0, total, total, 4096)
    head += struct.pack("<IIQQQQQQ", 2, 6, start, start, start, len(dynamic), len(dynamic), 8)
    head += struct.pack("<IIQQQQQQ", 0x6474E551, stack_flags, 0, 0, 0, 0, 0, 16)
    return head + strings + needs + symbols + hashed + dynamic + tail


def program(modules: Mapping[str, bytes]) -> bytes:
    """An ELF program with a PyInstaller archive at its end that holds these entries, uncompressed."""
    body, toc = b"", b""
    for name, data in modules.items():
        encoded = name.encode() + b"\0"
        toc += struct.pack("!IIIIBc", 18 + len(encoded), len(body), len(data), len(data), 0, b"m") + encoded
        body += data
    length = len(body) + len(toc) + 88
    cookie = struct.pack(
        "!8sIIII64s", b"MEI\014\013\012\013\016", length, len(body), len(toc), 311, b"libpython3.11.so.1.0"
    )
    return elf() + body + toc + cookie


def component(name: str, **fields: Any) -> Any:
    made = Component(name, "1.0", "python", f"pkg:pypi/{name}@1.0", "MIT", [("LICENSE", f"licence of {name}")])
    for field, value in fields.items():
        setattr(made, field, value)
    return made


def make_tree(
    tree: Path, *, extra: Mapping[str, bytes] | None = None, modules: Mapping[str, bytes] | None = None
) -> Path:
    """A whole bundle below `tree`, with SBOMs, notices and manifest that fit it."""
    files = {
        "trivet": program(modules or {"entry": b"code"}),
        "lib/libdep.so.1": elf(),
        "lib/pkg/ext.so": elf(needed=("libc.so.6", "libdep.so.1"), runpath="$ORIGIN/.."),
        "LICENSE": b"licence of trivet\n",
        **(extra or {}),
    }
    for name, data in files.items():
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    (tree / "bin").mkdir()
    (tree / "bin" / "trivet").symlink_to("../trivet")
    entry = load_matrix().find(ARTIFACT)
    (tree / "VERSION").write_text(stage.version_text(SOURCE, entry, TOOLCHAIN))
    components = [
        component("trivet", kind="own", files=["trivet", "lib/pkg/ext.so", *(extra or {})]),
        component("dep", files=["lib/libdep.so.1"]),
    ]
    (tree / papers.NOTICES_NAME).write_text(notices(components))
    stage.normalise_modes(tree)
    stage.write_sboms(tree, components, SOURCE)
    stage.normalise_modes(tree)
    write_manifest(tree)
    return tree


def write_manifest(tree: Path) -> Manifest:
    """Describe the tree as it is now."""
    (tree / "manifest.json").unlink(missing_ok=True)
    manifest = make_manifest(tree)
    (tree / "manifest.json").write_bytes(to_bytes(manifest))
    (tree / "manifest.json").chmod(0o644)
    return manifest


def make_manifest(tree: Path) -> Manifest:
    entry = load_matrix().find(ARTIFACT)
    files, target = tree_files(tree), describe_target(tree)
    manifest: Manifest = {
        "schema": "trivet.release-manifest.v1",
        "project": "trivet",
        "version": SOURCE.version,
        "artifact_id": ARTIFACT,
        "abi_version": 1,
        "archive": None,
        "source": {"commit": SOURCE.commit, "tag": SOURCE.tag, "clean_tree": True},
        "build": {
            "recipe": "release",
            "command": "build",
            "toolchain": dict(TOOLCHAIN),
            "options": [],
            "dependencies": [{"name": "dep", "version": "1.0"}],
            "inputs_sha256": DIGEST,
        },
        "target": {
            "os": "linux",
            "arch": "x86_64",
            "libc": "glibc",
            "backend": "cpu",
            "libc_floor": target.libc_floor,
            "libstdcxx": target.libstdcxx,
            "cpu_baseline": "x86-64",
            "cpu_baseline_reason": "made up",
            "host_libraries": list(target.host_libraries),
        },
        "package": {
            "form": "one-dir",
            "python_bundled": True,
            "static_core": False,
            "size": stage.tree_size(files),
            "num_files": len(files),
        },
        "driver": [],
        "cpu_tiers": [tier | {"evidence": collect(TIER_GATES, [])} for tier in tier_facts(entry.arch, entry.cpu_tiers)],
        "sms": [],
        "evidence": collect(GATES, []),
        "limits": list(entry.limits),
        "files": files,
    }
    manifest["channel"] = compute_channel(manifest, entry)
    return manifest


def passed(gate: str, subject: str = "", digest: str = DIGEST) -> GateResult:
    return GateResult(gate, "passed", f"run {gate}", subject=subject, archive_sha256=digest)


def verified(manifest: Manifest, digest: str = DIGEST, archive: str | None = None, size: int = 1) -> Manifest:
    """The manifest after every gate has passed on the archive with this digest."""
    entry = load_matrix().find(manifest["artifact_id"])
    results = [passed(gate, digest=digest) for gates in GATES.values() for gate in gates]
    name = archive or str(archive_name(manifest["version"], ARTIFACT, "tar.gz"))
    out: Manifest = manifest | {
        "archive": {"name": name, "sha256": digest, "size": size},
        "evidence": collect(GATES, results),
    }
    out["cpu_tiers"] = []
    for tier in tier_facts(entry.arch, entry.cpu_tiers):
        about = [passed(gate, tier["name"], digest) for gates in TIER_GATES.values() for gate in gates]
        evidence = collect(TIER_GATES, about, tier["name"])
        out["cpu_tiers"].append(tier | {"detected": True, "selected": True, "evidence": evidence})
    out["channel"] = compute_channel(out, entry)
    return out


def make_manifest_without_itself(tree: Path) -> Manifest:
    (tree / "manifest.json").unlink(missing_ok=True)
    return make_manifest(tree)
