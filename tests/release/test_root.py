"""The release root: its pins, its cache key, what it shows of the machine; and copies of the tree that it builds."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from release import root, source
from release.__main__ import main
from release.build import BuildOptions, build
from release.errors import BuildError


def test_every_pin_names_its_files() -> None:
    pins = {pin.package: pin for pin in root.read_pins()}
    assert set(pins) == {"openssl", "python3.11"}
    for pin in pins.values():
        kinds = sorted(name.rpartition(".")[2] for name in pin.files)
        assert kinds == ["dsc", "gz", "xz"], pin
        assert all(name.startswith(f"{pin.package}_") for name in pin.files)


def test_a_malformed_pin_is_refused(tmp_path: Path) -> None:
    for text in ("openssl 3\n", f"{'0' * 64}  file.dsc\n", "a=1\nabc  file.dsc\n"):
        (tmp_path / "sources.txt").write_text(text)
        with pytest.raises(BuildError, match="neither PACKAGE=VERSION nor SHA256"):
            root.read_pins(tmp_path / "sources.txt")


def test_sources_must_have_their_digests(tmp_path: Path) -> None:
    (tmp_path / "a.dsc").write_bytes(b"source")
    good = root.Pin("a", "1", {"a.dsc": hashlib.sha256(b"source").hexdigest()})
    root.check_sources(tmp_path, [good])
    with pytest.raises(BuildError, match=r"a\.dsc has the SHA-256"):
        root.check_sources(tmp_path, [root.Pin("a", "1", {"a.dsc": "0" * 64})])
    with pytest.raises(BuildError, match=r"a 1 came without a\.tar\.gz"):
        root.check_sources(tmp_path, [root.Pin("a", "1", {"a.tar.gz": "0" * 64})])


def test_a_changed_recipe_is_another_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(root.RECIPE, tmp_path / "root")
    before = root.recipe_digest()
    monkeypatch.setattr(root, "RECIPE", tmp_path / "root")
    assert root.recipe_digest() == before
    for name in ("compile.sh", "packages.txt", "sources.txt", "pip.txt"):
        (tmp_path / "root" / name).open("a").write("#\n")
        assert root.recipe_digest() != before
        before = root.recipe_digest()


def test_no_root_without_its_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIVET_RELEASE_CACHE", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(BuildError, match="install debootstrap and run this with sudo"):
        root.ensure_root()
    kept = tmp_path / f"root-{root.recipe_digest()[:16]}" / root.FACTS
    kept.parent.mkdir(parents=True)
    kept.write_text("{}")
    assert root.ensure_root() == kept.parents[4]


def test_a_root_that_failed_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for the next build to find nor to fill the disk with."""

    def half(making: Path, digest: str) -> None:
        (making / "usr").mkdir(parents=True)
        raise BuildError("the mirror is gone")

    monkeypatch.setenv("TRIVET_RELEASE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/sbin/debootstrap")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(root, "_make", half)
    with pytest.raises(BuildError, match="the mirror is gone"):
        root.ensure_root()
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_release_recipe_takes_no_foreign_python(tmp_path: Path) -> None:
    options = BuildOptions("release", tmp_path / "out", tmp_path / "work", base_python=Path("/usr/bin/python3.99"))
    with pytest.raises(BuildError, match="--python and --wheel are for quick"):
        build("linux-x86_64-glibc-cpu", options)


def test_a_copy_of_the_tree_knows_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the root there is no git; a copy of a copy is the same tree."""
    facts = source.read_source()
    source.copy_source(tmp_path / "copy")
    monkeypatch.setattr(source, "ROOT", tmp_path / "copy")
    monkeypatch.setattr(source, "_git", lambda *arguments: pytest.fail("git was asked"))
    assert source.read_source() == facts
    source.copy_source(tmp_path / "again")
    for folder in ("copy", "again"):
        assert (tmp_path / folder / "release" / "root" / "compile.sh").is_file()
        assert not (tmp_path / folder / ".git").exists()
    names = [
        sorted(path.relative_to(tmp_path / folder).as_posix() for path in (tmp_path / folder).rglob("*"))
        for folder in ("copy", "again")
    ]
    assert names[0] == names[1]


def test_results_stay_out_of_the_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An archive or a report that git sees would make the tree of the second build unclean, and another archive."""
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    subprocess.run(["git", "init", "-q", checkout], check=True)
    shutil.copy(source.ROOT / ".gitignore", checkout)
    monkeypatch.setattr(source, "ROOT", checkout)
    for folder in (checkout / "dist", checkout / "evidence", checkout / "build/unverified", tmp_path / "out"):
        source.refuse_in_tree(folder)
    for folder in (checkout / "out", checkout / "release" / "dist", checkout):
        with pytest.raises(BuildError, match="is in the source tree"):
            source.refuse_in_tree(folder)


@pytest.mark.parametrize(
    "command", ["build X --out HERE", "rebuild none.tar.gz --evidence HERE", "all X --evidence HERE"]
)
def test_every_command_that_builds_asks(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = {"X": "linux-x86_64-glibc-cpu", "HERE": str(source.ROOT / "results")}
    assert main([words.get(word, word) for word in command.split()]) == 1
    assert "results is in the source tree" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts need the superuser")
def test_a_root_shows_only_what_it_is_given(tmp_path: Path) -> None:
    """A root of nothing but this machine's /usr: read-only, its own /build, and mounts that end with the command."""
    folder, work = tmp_path / "root", tmp_path / "work with space"
    for name in ("build", "etc", "proc", "dev", "tmp", "usr"):
        (folder / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64", "sbin"):
        (folder / name).symlink_to(f"usr/{name}")
    for name in ("resolv.conf", "hosts", "pip.conf"):
        (folder / "etc" / name).touch()
    (folder / "etc/ssl/certs").mkdir(parents=True)
    work.mkdir()
    (work / "given").write_text("yes")
    script = 'pwd; cat given; echo; echo back >made; echo "$WORD"; touch /new || echo closed; ls /root || echo absent'
    try:
        seen = root.enter(
            folder,
            ["sh", "-c", script],
            mounts={"/usr": "ro:/usr", "/build/here": str(work)},
            settings={"WORD": "said"},
            folder="/build/here",
        )
    except BuildError as error:
        if "unshare" in str(error) and "Operation not permitted" in str(error):
            pytest.skip("this machine allows no mounts")
        raise
    assert seen.split() == ["/build/here", "yes", "said", "closed", "absent"]
    assert (work / "made").read_text() == "back\n"
    assert list((folder / "build").iterdir()) == [] and list((folder / "usr").iterdir()) == []
