"""The emulated system of another architecture: its packages are on record, who owns its files, what is refused."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
from bundle import BundleError, Owners

from release import environment, system
from release.architectures import ARCHITECTURES, Architecture
from release.audit import KNOWN_PATHS
from release.build import BuildOptions, build
from release.errors import BuildError
from release.system import System, record_packages, system_for

ARM = ARCHITECTURES["aarch64"]


@pytest.fixture
def x86_64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")


@pytest.fixture
def debian(tmp_path: Path) -> Path:
    """A system of one package, zlib1g for arm64, unpacked and on record."""
    if shutil.which("dpkg-deb") is None:
        pytest.skip("dpkg-deb is not installed")
    tree = tmp_path / "zlib1g"
    library = tree / "lib/aarch64-linux-gnu/libz.so.1.2.13"
    library.parent.mkdir(parents=True)
    library.write_bytes(b"library")
    (tree / "usr/share/doc/zlib1g").mkdir(parents=True)
    (tree / "usr/share/doc/zlib1g/copyright").write_text("copyright of zlib")
    (tree / "DEBIAN").mkdir()
    fields = {"Package": "zlib1g", "Version": "1:1.2.13", "Architecture": "arm64", "Multi-Arch": "same"}
    control = "".join(f"{name}: {value}\n" for name, value in {**fields, "Maintainer": "x", "Description": "x"}.items())
    (tree / "DEBIAN/control").write_text(control)
    subprocess.run(["dpkg-deb", "--build", tree, tmp_path / "zlib1g.deb"], check=True, capture_output=True)
    subprocess.run(["dpkg-deb", "-x", tmp_path / "zlib1g.deb", tmp_path / "system"], check=True)
    record_packages(tmp_path / "system", [tmp_path / "zlib1g.deb"])
    (tmp_path / "system" / "lib/aarch64-linux-gnu/libz.so.1").symlink_to(library.name)  # as ldconfig makes them
    return tmp_path / "system"


def test_a_system_that_failed_leaves_nothing(x86_64: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(making: Path, architecture: Architecture) -> None:
        (making / "usr").mkdir(parents=True)
        raise BuildError("the mirror is gone")

    monkeypatch.setenv("TRIVET_RELEASE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(system, "_make", half)
    with pytest.raises(BuildError, match="the mirror is gone"):
        system.system_for("aarch64")
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_owner_of_a_file_of_another_system(debian: Path, tmp_path: Path) -> None:
    owners = Owners(tmp_path / "site", Path("/usr"), "3.11.2", "debian-12", system=debian)
    found = owners.owner("libz.so.1", "/lib/aarch64-linux-gnu/libz.so.1")
    assert (found.name, found.version, found.license) == ("zlib1g", "1:1.2.13", "Zlib")
    assert found.texts == [("copyright", "copyright of zlib")]
    with pytest.raises(BundleError, match="no Debian package owns"):
        owners.owner("libm.so.6", "/lib/aarch64-linux-gnu/libm.so.6")


def test_this_machine_is_its_own_system(x86_64: None) -> None:
    system = system_for("x86_64")
    assert not system.is_foreign and system.path("/etc/os-release") == Path("/etc/os-release")
    assert system.run(["pwd"], [Path("/usr")]) == "/usr\n"


def test_a_system_needs_its_tools(x86_64: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIVET_RELEASE_CACHE", str(tmp_path))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(BuildError, match="a system of arm64 is made with mmdebstrap, which is not installed"):
        system_for("aarch64")
    assert not list(tmp_path.iterdir())
    with pytest.raises(BuildError, match="qemu-aarch64-static is not installed"):
        System(ARM, tmp_path).run(["true"], [tmp_path])


def test_what_cannot_be_built_here(x86_64: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact_id = "linux-aarch64-glibc-cpu"
    with pytest.raises(BuildError, match=r"on x86_64, linux-aarch64-glibc-cpu is built by the recipe quick"):
        build(artifact_id, BuildOptions("release", tmp_path / "out", tmp_path / "work"))
    with pytest.raises(BuildError, match=r"with the Python of Debian 12"):
        build(artifact_id, BuildOptions("quick", tmp_path / "out", tmp_path / "work", base_python=Path("/opt/python")))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(BuildError, match=r"is cross-compiled: install g\+\+-aarch64-linux-gnu"):
        build(artifact_id, BuildOptions("quick", tmp_path / "out", tmp_path / "work"))
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")  # nothing emulates x86-64 for a whole archive
    with pytest.raises(BuildError, match="is built on linux x86_64; this is linux aarch64"):
        build("linux-x86_64-glibc-cpu", BuildOptions("quick", tmp_path / "out", tmp_path / "work"))


def test_wheels_are_taken_for_the_other_architecture(x86_64: None, tmp_path: Path) -> None:
    """pip runs on this machine's Python, so it must be told; a wheel for this machine would be frozen unseen."""
    python = tmp_path / "bin" / "python"
    (tmp_path / "lib/python3.11/site-packages").mkdir(parents=True)
    pip, install = environment._pip(System(ARM, tmp_path), python)
    assert python not in pip + install
    words = [str(word) for word in install]
    assert words[words.index("--python-version") + 1] == "3.11"
    assert {word for word in words if "x86_64" in word} == set()
    assert "--platform=manylinux_2_28_aarch64" in words and "--platform=linux_aarch64" in words
    native, _ = environment._pip(System(ARCHITECTURES["x86_64"], Path("/")), python)
    assert native[-1] == python


def test_what_a_python_of_debian_leaves_is_known_for_each_architecture() -> None:
    known = json.loads(KNOWN_PATHS.read_text())
    for architecture in ARCHITECTURES.values():
        assert known[f"trivet:_sysconfigdata__{architecture.triplet}"]["example"].startswith("/build/")
