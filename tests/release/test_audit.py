"""Static gates over the made-up bundle: it passes, and each way to break it fails for its own reason."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from made_up_bundle import SOURCE, component, elf, make_tree, program, write_manifest

from release import stage
from release.architectures import ARCHITECTURES
from release.archive import tree_files
from release.audit import allowed_paths, content_problems, elf_problems, path_problems, path_strings, strings_digest
from release.elf import max_version, parse_elf
from release.errors import BuildError, GateError
from release.frozen import frozen_modules
from release.matrix import load_matrix
from release.papers import paper_problems
from release.tiers import poison


def allowed(tree: Path) -> set[str]:
    return {entry["path"] for entry in tree_files(tree)}


def manifest_of(tree: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((tree / "manifest.json").read_text())
    return found


@pytest.fixture
def known(tmp_path: Path) -> Path:
    path = tmp_path / "known.json"
    path.write_text("{}")
    return path


def test_the_made_up_bundle_passes(tree: Path, known: Path) -> None:
    manifest = manifest_of(tree)
    assert content_problems(tree, manifest, allowed(tree)) == []
    assert elf_problems(tree, manifest) == []
    assert path_problems(tree, (), known) == []
    assert paper_problems(tree, manifest) == []


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("lib/extra.so", "not allowed: lib/extra.so"),
        ("lib/kernel.o", "a bundle never holds such a file: lib/kernel.o"),
        ("lib/source.cc", "a bundle never holds such a file: lib/source.cc"),
        ("model.gguf", "a bundle never holds such a file: model.gguf"),
        ("lib/tokenizer.json", "a bundle never holds such a file: lib/tokenizer.json"),
        (".env", "a bundle never holds such a file: .env"),
        ("lib/key.pem", "a bundle never holds such a file: lib/key.pem"),
    ],
)
def test_an_extra_file(name: str, complaint: str, tree: Path) -> None:
    before, manifest = allowed(tree), manifest_of(tree)
    (tree / name).write_bytes(b"x")
    found = content_problems(tree, manifest, before)
    assert complaint in found and f"not in the manifest: {name}" in found


def test_a_missing_and_a_changed_file(tree: Path) -> None:
    before, manifest = allowed(tree), manifest_of(tree)
    (tree / "LICENSE").unlink()
    (tree / "lib/libdep.so.1").write_bytes(elf(tail=b"changed"))
    found = content_problems(tree, manifest, before)
    assert "missing: LICENSE" in found and "in the manifest only: LICENSE" in found
    assert "not as in the manifest (sha256, size): lib/libdep.so.1" in found


@pytest.mark.parametrize(
    ("name", "mode", "complaint"),
    [
        ("trivet", 0o644, "not as in the manifest (mode): trivet"),
        ("lib/libdep.so.1", 0o755, "mode 0755; of all files only the program is executable: lib/libdep.so.1"),
        ("VERSION", 0o666, "mode 0666: VERSION"),
        ("trivet", 0o4755, "mode 4755: trivet"),
    ],
)
def test_a_wrong_mode(name: str, mode: int, complaint: str, tree: Path) -> None:
    before, manifest = allowed(tree), manifest_of(tree)
    (tree / name).chmod(mode)
    assert complaint in content_problems(tree, manifest, before)


def test_a_credential(tree: Path) -> None:
    secret = "-----BEGIN " + "PRIVATE KEY-----\nabc"
    (tree / "LICENSE").write_text(secret)
    found = content_problems(tree, manifest_of(tree), allowed(tree))
    assert "holds something like a credential: LICENSE" in found


@pytest.mark.parametrize(
    ("library", "complaint"),
    [
        (elf(machine=183), "is for aarch64, the bundle for x86_64"),
        (elf(machine=8), "is for 8, the bundle for x86_64"),
        (elf(needed=("libc.so.6", "libother.so.2")), "needs libother.so.2, which is neither bundled nor"),
        (elf(needed=("libcuda.so.1",)), "libcuda.so.1 is never bundled and never linked"),
        (elf(needed=("libreadline.so.8",)), "libreadline.so.8 is never bundled"),
        (elf(runpath="/opt/build/lib"), "searches libraries in /opt/build/lib"),
        (elf(runpath="$ORIGIN/../../.."), "outside of the bundle"),
        (elf(runpath="$ORIGIN:/srv/x/lib"), "searches libraries in /srv/x/lib"),
        (elf(stack_flags=7), "wants an executable stack"),
        (elf(versions={"libc.so.6": ("GLIBC_2.38",)}), "needs GLIBC_2.38, the manifest says 2.17"),
        (
            elf(versions={"libc.so.6": ("GLIBC_2.17",), "libstdc++.so.6": ("GLIBCXX_3.4.30", "CXXABI_1.3.13")}),
            "libstdcxx",
        ),
    ],
)
def test_a_bad_library(library: bytes, complaint: str, tree: Path) -> None:
    manifest = manifest_of(tree)
    (tree / "lib/libdep.so.1").write_bytes(library)
    assert any(complaint in text for text in elf_problems(tree, manifest)), elf_problems(tree, manifest)


def test_a_dropped_library_and_a_driver(tree: Path) -> None:
    manifest = manifest_of(tree)
    (tree / "lib/libdep.so.1").unlink()
    assert any("needs libdep.so.1" in text for text in elf_problems(tree, manifest))
    (tree / "lib/libcuda.so.1").write_bytes(elf())
    assert any("libcuda.so.1 is never bundled" in text for text in elf_problems(tree, manifest))


def test_no_library_at_all(tmp_path: Path, tree: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "the tree holds no ELF file" in elf_problems(tmp_path / "empty", manifest_of(tree))


def test_a_damaged_library(tree: Path) -> None:
    (tree / "lib/libdep.so.1").write_bytes(elf()[:200])
    with pytest.raises(GateError, match="damaged ELF"):
        elf_problems(tree, manifest_of(tree))


def test_elf_fields() -> None:
    data = elf(
        needed=("libc.so.6", "libm.so.6"),
        runpath="$ORIGIN:$ORIGIN/x",
        versions={"libc.so.6": ("GLIBC_2.2.5", "GLIBC_2.17", "GLIBC_PRIVATE"), "libm.so.6": ("GLIBC_2.29",)},
    )
    parsed = parse_elf(data)
    assert (parsed.machine, parsed.needed, parsed.rpath) == (
        "x86_64",
        ("libc.so.6", "libm.so.6"),
        ("$ORIGIN", "$ORIGIN/x"),
    )
    assert max_version(parsed.versions, "GLIBC") == "2.29"
    assert max_version(parsed.versions, "GLIBCXX") is None
    assert not parsed.executable_stack and not parsed.misaligned and parsed.interpreter is None


@pytest.mark.parametrize("where", ["library", "module", "text"])
def test_a_build_path(where: str, tmp_path: Path, known: Path) -> None:
    path = b"/home/" + b"builder/trivet/x.cc"
    modules = {"entry": b"co_filename " + path} if where == "module" else None
    extra = {"library": {"lib/a.so": elf(tail=path)}, "text": {"lib/a.txt": path}}.get(where)
    tree = make_tree(tmp_path / "made", extra=extra, modules=modules)
    name = {"library": "lib/a.so", "module": "trivet:entry", "text": "lib/a.txt"}[where]
    found = path_problems(tree, (), known)
    assert [text for text in found if text.endswith(f": {name}")]
    # Known, by the digest of exactly these strings, and no others.
    strings = path_strings(tree, ())
    known.write_text(json.dumps({part: {"sha256": [strings_digest(values)]} for part, values in strings.items()}))
    assert path_problems(tree, (), known) == []
    known.write_text(
        json.dumps({part: {"sha256": [strings_digest([*values, "/x"])]} for part, values in strings.items()})
    )
    assert path_problems(tree, (), known)


def test_a_forbidden_prefix(tmp_path: Path, known: Path) -> None:
    tree = make_tree(tmp_path / "made", modules={"entry": b"/strange/place/x.py"})
    assert path_problems(tree, (), known) == []
    assert "/strange/place/x.py" in path_problems(tree, ("/strange",), known)[0]


def test_a_program_without_its_archive(tree: Path, known: Path) -> None:
    (tree / "trivet").write_bytes(elf())
    with pytest.raises(GateError, match="no PyInstaller archive"):
        path_problems(tree, (), known)
    assert dict(frozen_modules(program({"a": b"1", "b": b"22"}))) == {"a": b"1", "b": b"22"}


def _edit(name: str, change: Callable[[str], str]) -> Callable[[Path], None]:
    def edit(tree: Path) -> None:
        path = tree / name
        path.write_text(change(path.read_text()))

    return edit


def _drop_component(text: str) -> str:
    bom = json.loads(text)
    bom["components"] = [item for item in bom["components"] if item["name"] != "dep"]
    return json.dumps(bom)


def _add_component(text: str) -> str:
    bom = json.loads(text)
    bom["components"].append({**bom["components"][0], "name": "ghost", "components": []})
    return json.dumps(bom)


def _drop_spdx_file(text: str) -> str:
    document = json.loads(text)
    document["files"].pop()
    return json.dumps(document)


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (
            _edit("VERSION", lambda text: text.replace("1.2.3", "1.2.4")),
            "VERSION says version: 1.2.4, the manifest 1.2.3",
        ),
        (_edit("VERSION", lambda text: text.replace("a" * 40, "b" * 40)), "VERSION says commit"),
        (_edit("VERSION", lambda text: text.replace("clean-tree: yes", "clean-tree: no")), "VERSION says clean-tree"),
        (_edit("VERSION", lambda text: text + "more: 1\n"), "VERSION says more: 1, the manifest None"),
        (_edit("sbom.cdx.json", _drop_component), "CycloneDX SBOM describes no component for lib/libdep.so.1"),
        (_edit("sbom.cdx.json", _add_component), "only one SBOM names ghost"),
        (_edit("sbom.spdx.json", _drop_spdx_file), "SPDX SBOM describes no component"),
        (
            _edit("THIRD-PARTY-NOTICES.txt", lambda text: text.replace("Licence: MIT", "Licence: BSD")),
            "the notices lack dep",
        ),
    ],
)
def test_papers_that_lie(edit: Callable[[Path], None], complaint: str, tree: Path) -> None:
    manifest = manifest_of(tree)
    edit(tree)
    assert any(complaint in text for text in paper_problems(tree, manifest)), paper_problems(tree, manifest)


def test_a_file_without_an_owner(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "made")
    for name in ("sbom.cdx.json", "sbom.spdx.json", "manifest.json"):
        (tree / name).unlink()
    (tree / "lib" / "stray.so").write_bytes(elf())
    components = [component("trivet", kind="own", files=["trivet", "lib/libdep.so.1", "lib/pkg/ext.so"])]
    with pytest.raises(BuildError, match=r"differ in: lib/stray.so$"):
        stage.write_sboms(tree, components, SOURCE)


def test_every_file_has_a_component(tree: Path) -> None:
    bom = json.loads((tree / "sbom.cdx.json").read_text())
    described = [nested["name"] for item in bom["components"] for nested in item.get("components", [])]
    expected = {entry["path"] for entry in tree_files(tree) if "link" not in entry}
    assert sorted(described) == sorted(expected - {"manifest.json", "sbom.cdx.json", "sbom.spdx.json"})


def test_links_stay_inside(tree: Path) -> None:
    stage.check_links(tree)
    for target in ("/etc/passwd", "../../outside", "nowhere"):
        link = tree / "lib" / "link"
        link.symlink_to(target)
        with pytest.raises(BuildError, match="lib/link links to"):
            stage.check_links(tree)
        link.unlink()


def test_modes_do_not_depend_on_the_umask(tmp_path: Path) -> None:
    previous = os.umask(0o077)
    try:
        first = make_tree(tmp_path / "first")
    finally:
        os.umask(previous)
    second = make_tree(tmp_path / "second")
    assert tree_files(first) == tree_files(second)
    assert write_manifest(first) == write_manifest(second)


def test_every_buildable_tuple_has_an_allowlist_of_its_own() -> None:
    for entry in load_matrix().tuples:
        if entry.state == "buildable":
            paths = allowed_paths(entry.artifact_id, "quick", "1.2.3")
            modules = {path for path in paths if ".cpython-" in path}
            assert {"trivet", "lib/trivet/backends/cpu/libtrivet_cpu.so"} <= paths and modules
            assert all(f"-{entry.arch}-linux-gnu.so" in path for path in modules)


def test_poison_changes_the_named_instructions_only(tmp_path: Path) -> None:
    library = tmp_path / "x.so"
    library.write_bytes(bytes(range(16)))
    poison(library, [4, 10], ARCHITECTURES["x86_64"].illegal_instruction)
    assert library.read_bytes() == bytes([0, 1, 2, 3, 0x0F, 0x0B, 6, 7, 8, 9, 0x0F, 0x0B, 12, 13, 14, 15])


def test_a_library_that_is_newer_than_the_bundled_runtime(tmp_path: Path) -> None:
    """As when one file was compiled elsewhere, with a newer compiler than the libstdc++ that travels with it."""
    newer = elf(needed=("libstdc++.so.6",), versions={"libstdc++.so.6": ("CXXABI_1.3.13",)})
    for tail, complaints in ((b"CXXABI_1.3.13\0", 0), (b"CXXABI_1.3.12\0", 1)):
        runtime = elf(needed=("libc.so.6",), tail=tail)
        tree = make_tree(tmp_path / str(complaints), extra={"lib/libstdc++.so.6": runtime, "lib/newer.so": newer})
        manifest = json.loads((tree / "manifest.json").read_text())
        found = [text for text in elf_problems(tree, manifest) if "CXXABI_1.3.13, which the bundled" in text]
        assert len(found) == complaints
