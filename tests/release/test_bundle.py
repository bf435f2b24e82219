"""What is frozen: the spec, the pins, the owners and licences; and the modules of the frozen program alone."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import platform
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from bundle import BundleError, Owners, collect, notices, refused_licences
from bundle_documents import spdx
from made_up_bundle import ROOT, make_tree

FREEZER = ROOT / "packaging" / "pyinstaller"
EXCLUDES_PROBE = """
import importlib, importlib.util, os, pkgutil, sys
os.environ["ORT_DISABLE_TELEMETRY"] = "1"
excluded = set({excluded!r})

class Excluded:
    def find_spec(self, name, path=None, target=None):
        if any(name == entry or name.startswith(entry + ".") for entry in excluded):
            raise ModuleNotFoundError(f"excluded: {{name}}", name=name)

sys.meta_path.insert(0, Excluded())
import trivet
for module in pkgutil.walk_packages(trivet.__path__, "trivet."):
    if not any(part in module.name for part in ("_pyinstaller", "libtrivet", "__main__")):
        importlib.import_module(module.name)
import huggingface_hub, uvicorn.lifespan.on, uvicorn.loops.auto, uvicorn.protocols.http.auto
huggingface_hub.HfApi, huggingface_hub.hf_hub_download
print("all imported")
"""


def spec_constant(name: str) -> Any:
    for node in ast.parse((FREEZER / "trivet.spec").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    raise AssertionError(name)


def test_nothing_that_is_used_is_excluded() -> None:
    """Every module of trivet can be imported while the excluded ones cannot."""
    probe = EXCLUDES_PROBE.format(excluded=spec_constant("EXCLUDED"))
    done = subprocess.run(
        [sys.executable, "-c", probe], capture_output=True, text=True, timeout=250, env=_environment()
    )
    assert done.stdout == "all imported\n", done.stderr


def _environment() -> dict[str, str]:
    return {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT / "packaging" / "python")}


def test_the_spec_keeps_the_rules() -> None:
    text = (FREEZER / "trivet.spec").read_text(encoding="utf-8")
    assert "readline" in spec_constant("EXCLUDED")
    assert "upx=True" not in text and text.count("upx=False") == 2
    assert text.count("strip=False") == 2
    assert not any(name.startswith(("numpy", "onnxruntime")) for name in spec_constant("STRIPPED"))


def test_pins_hold_every_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins = {}
    for line in (FREEZER / "requirements.txt").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            match = re.fullmatch(r"([\w.-]+)==([\w.]+)( --hash=sha256:[0-9a-f]{64}){1,2}", line)
            assert match is not None, line
            pins[_normalised(match[1])] = match[2]
    wanted = [requirement for requirement in project["dependencies"] if ";" not in requirement]
    missing = [name for name in wanted if _normalised(re.split(r"[^\w.-]", name, maxsplit=1)[0]) not in pins]
    assert not missing, f"packaging/pyinstaller/requirements.txt pins no {', '.join(missing)}"


def test_licences_of_the_pins_are_known() -> None:
    """As far as the pinned packages are installed here."""
    table = tomllib.loads((ROOT / "sbom" / "bundle.toml").read_text(encoding="utf-8"))
    judged = 0
    for line in (FREEZER / "requirements.txt").read_text(encoding="utf-8").splitlines():
        name = line.partition("==")[0]
        if line.startswith("#") or not _is_installed(name) or name in ("altgraph", "packaging", "setuptools"):
            continue
        named = table["python"].get(_normalised(name).replace("-", "_"))
        licence = importlib.metadata.metadata(name)["License-Expression"] or named
        assert licence is not None, f"sbom/bundle.toml names no licence for {name}"
        assert refused_licences(licence, table["allowed"]["licenses"]) == [], name
        judged += 1
    assert judged > 10


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_cpu_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FREEZER))
    from trivet_bundle import cpu_check

    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    every = 1 << 0 | 1 << 9 | 1 << 13 | 1 << 19 | 1 << 20 | 1 << 23
    monkeypatch.setattr(cpu_check, "_cpuid_leaf_1", lambda: [0, 0, every, 0])
    assert cpu_check.missing_cpu_features(tmp_path) == []
    monkeypatch.setattr(cpu_check, "_cpuid_leaf_1", lambda: [0, 0, every & ~(1 << 20), 0])
    assert cpu_check.missing_cpu_features(tmp_path) == ["SSE4.2"]
    monkeypatch.setattr(cpu_check, "_cpuid_leaf_1", lambda: None)  # an old C library: what the kernel says
    monkeypatch.setattr(cpu_check, "_cpuinfo_flags", lambda: {"fpu", "pni", "ssse3", "cx16", "sse4_1", "sse4_2"})
    assert cpu_check.missing_cpu_features(tmp_path) == ["POPCNT"]
    for baseline, missing in (("x86-64-v2", ["POPCNT"]), ("x86-64", [])):
        (tmp_path / "manifest.json").write_text(json.dumps({"target": {"cpu_baseline": baseline}}))
        assert cpu_check.missing_cpu_features(tmp_path) == missing
    (tmp_path / "manifest.json").unlink()
    monkeypatch.setattr(cpu_check, "_cpuinfo_flags", set)
    assert cpu_check.missing_cpu_features(tmp_path) == []
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert cpu_check.missing_cpu_features(tmp_path) == []


def test_an_early_interrupt_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FREEZER))
    import entry

    def interrupted() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(entry, "main", interrupted)
    assert entry.guarded_main() == 130
    starts = (FREEZER / "entry.py").read_text(encoding="utf-8").partition('if __name__ == "__main__":')[2]
    assert starts.strip() == "sys.exit(guarded_main())"


def test_help_of_the_frozen_program_lists_verify_self() -> None:
    def frozen(*arguments: str) -> str:
        command = [sys.executable, str(FREEZER / "entry.py"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=_environment()).stdout

    assert "\n  doctor       describe this installation" in frozen("--help")
    assert "\n  verify-self  compare the files of this archive with its manifest\n\n" in frozen("--help")
    assert frozen("help", "verify-self") == frozen("verify-self", "--help")
    assert frozen("verify-self", "--help").startswith("usage: trivet verify-self [--json]")


def test_verify_self(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(FREEZER))
    from trivet_bundle.verify_self import problems, verify_self

    tree = make_tree(tmp_path / "tree")
    files = json.loads((tree / "manifest.json").read_text())["files"]
    assert problems(tree, files) == []
    monkeypatch.setattr(sys, "executable", str(tree / "bin" / "trivet"))
    assert verify_self([]) == 0 and "files are as built" in capsys.readouterr().out
    assert verify_self(["--what"]) == 2 and "takes only --json" in capsys.readouterr().err
    (tree / "lib" / "extra").write_bytes(b"")
    (tree / "LICENSE").write_bytes(b"licence of trivex\n")
    (tree / "VERSION").unlink()
    (tree / "trivet").chmod(0o644)
    assert problems(tree, files) == [
        "not listed: lib/extra",
        "missing: VERSION",
        "another digest: LICENSE",
        "mode 0644 instead of 0755: trivet",
    ]
    assert verify_self(["--json"]) == 1
    assert len(json.loads(capsys.readouterr().out)["problems"]) == 4


def test_licences() -> None:
    allowed = ["MIT", "GPL-3.0-or-later WITH GCC-exception-3.1"]
    assert refused_licences("MIT AND GPL-3.0-or-later WITH GCC-exception-3.1", allowed) == []
    assert refused_licences("GPL-3.0-or-later OR MIT", allowed) == []
    assert refused_licences("MIT AND GPL-3.0-or-later", allowed) == ["GPL-3.0-or-later"]
    assert refused_licences("Proprietary", allowed) == ["Proprietary"]


@pytest.fixture
def site_packages(tmp_path: Path) -> Path:
    """A folder with two distributions: one of everything, and the freezer."""
    site = tmp_path / "site"
    for name, licence in (("good", "MIT"), ("pyinstaller", ""), ("trivet", "Apache-2.0")):
        info = site / f"{name}-1.0.dist-info"
        (info / "licenses").mkdir(parents=True)
        expression = f"License-Expression: {licence}\n" if licence else ""
        (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: 1.0\n{expression}")
        (info / "licenses" / "LICENSE").write_text(f"text of {name}")
        (site / f"{name}.py").write_text("")
        record = [f"{name}.py,,", f"{info.name}/METADATA,,", f"{info.name}/licenses/LICENSE,,"]
        (info / "RECORD").write_text("\n".join(record) + "\n")
    return site


def owners(site: Path) -> Owners:
    return Owners(site, Path("/usr"), "3.11.2", "debian-12")


def test_owners(site_packages: Path) -> None:
    sources = {
        "files": [["good.py", str(site_packages / "good.py"), "DATA"], ["link", "good.py", "SYMLINK"]],
        "modules": [["pyiboot", str(site_packages / "pyinstaller.py")], ["namespace", "-"]],
    }
    found = {component.name: component for component in collect(sources, owners(site_packages))}
    assert found["good"].files == ["lib/good.py"] and found["good"].license == "MIT"
    assert found["pyinstaller-bootloader"].modules == ["pyiboot"]
    text = notices(found.values())
    assert "\ngood 1.0\nLicence: MIT\n" in text and "text of good" in text and "text of pyinstaller" in text


def test_what_the_root_compiled_has_an_owner(site_packages: Path, tmp_path: Path) -> None:
    """Libraries and the interpreter of the release root count as the Debian source packages they were made from."""
    prefix = tmp_path / "local"
    for package in ("openssl", "python3.11"):
        (prefix / "share/doc" / package).mkdir(parents=True)
        (prefix / "share/doc" / package / "copyright").write_text(f"copyright of {package}")
    compiled = {"openssl": "3.0.20-1~deb12u2", "python3.11": "3.11.2-6+deb12u8"}
    found = Owners(site_packages, prefix, "3.11.2", "debian-11", compiled=compiled)
    library = found.owner("libssl.so.3", str(prefix / "lib/libssl.so.3"))
    assert (library.kind, library.version) == ("compiled", "3.0.20-1~deb12u2")
    assert library.purl == "pkg:deb/debian/openssl@3.0.20-1~deb12u2?arch=source"
    assert found.owner("libcrypto.so.3", str(prefix / "lib/libcrypto.so.3")) is library
    interpreter = found.owner("libpython3.11.so.1.0", str(prefix / "lib/libpython3.11.so.1.0"))
    assert interpreter.purl == "pkg:deb/debian/python3.11@3.11.2-6+deb12u8?arch=source"
    assert ("copyright", "copyright of python3.11") in interpreter.texts
    with pytest.raises(BundleError, match="nobody owns libssl"):  # of a system whose Python was not compiled by us
        Owners(site_packages, prefix, "3.11.2", "debian-11").owner("libssl.so.3", str(prefix / "lib/libssl.so.3"))


def test_a_library_with_code_of_a_package(site_packages: Path, tmp_path: Path) -> None:
    """The CUDA runtime inside of libtrivet_cuda: named, with its licence and the text of that, also in SPDX."""
    inside = tmp_path / "packages" / "nvidia_cuda_runtime-13.0.96.dist-info"
    (inside / "licenses").mkdir(parents=True)
    (inside / "METADATA").write_text(
        "Metadata-Version: 2.4\nName: nvidia-cuda-runtime\nVersion: 13.0.96\n"
        "License-Expression: LicenseRef-NVIDIA-Proprietary\n"
    )
    (inside / "licenses/License.txt").write_text("terms of NVIDIA")
    (inside / "RECORD").write_text(f"{inside.name}/METADATA,,\n{inside.name}/licenses/License.txt,,\n")
    name = "trivet/backends/cuda/libtrivet_cuda.so"
    found = Owners(site_packages, Path("/usr"), "3.11.2", "debian-12", linked=inside.parent).owner(
        name, f"/site/{name}"
    )
    assert (found.name, found.kind, found.version) == ("libtrivet-cuda", "linked", "1.0")
    text = notices([found])
    assert (
        "Compiled in: nvidia-cuda-runtime 13.0.96 (LicenseRef-NVIDIA-Proprietary)" in text and "terms of NVIDIA" in text
    )
    document = json.loads(spdx("trivet", "1.0", [found], [], 0))
    (licence,) = document["hasExtractedLicensingInfos"]
    assert (licence["licenseId"], licence["extractedText"]) == ("LicenseRef-NVIDIA-Proprietary", "terms of NVIDIA")
    with pytest.raises(BundleError, match="nvidia-cuda-runtime is not installed"):
        owners(site_packages).owner(name, f"/site/{name}")


def test_a_part_nobody_answers_for(site_packages: Path, tmp_path: Path) -> None:
    (tmp_path / "stray.so").write_bytes(b"")
    with pytest.raises(BundleError, match=r"nobody owns stray\.so"):
        owners(site_packages).owner("stray.so", str(tmp_path / "stray.so"))
    metadata = site_packages / "good-1.0.dist-info" / "METADATA"
    text = metadata.read_text()
    for licence, complaint in (("", "is not known"), ("License-Expression: GPL-3.0-only\n", "no bundle may hold")):
        metadata.write_text(text.replace("License-Expression: MIT\n", licence))
        with pytest.raises(BundleError, match=complaint):
            owners(site_packages).owner("good.py", str(site_packages / "good.py"))
    metadata.write_text(text)
    record = site_packages / "good-1.0.dist-info" / "RECORD"
    record.write_text("good.py,,\n")
    with pytest.raises(BundleError, match="no licence text"):
        owners(site_packages).owner("good.py", str(site_packages / "good.py"))


def test_sboms_are_valid(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree")
    cyclonedx = pytest.importorskip("cyclonedx.validation.json", reason="cyclonedx-python-lib is not installed")
    from cyclonedx.schema import SchemaVersion

    validator = cyclonedx.JsonStrictValidator(SchemaVersion.V1_6)
    assert validator.validate_str((tree / "sbom.cdx.json").read_text()) is None


def test_the_spdx_sbom_is_valid(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree")
    parser = pytest.importorskip("spdx_tools.spdx.parser.parse_anything", reason="spdx-tools is not installed")
    from spdx_tools.spdx.validation.document_validator import validate_full_spdx_document

    document = parser.parse_file(str(tree / "sbom.spdx.json"))
    assert [message.validation_message for message in validate_full_spdx_document(document)] == []
