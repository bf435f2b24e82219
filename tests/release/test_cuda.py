"""A CUDA archive: its machine code, the manifest's SMs, what it says without a GPU, and how its library is cached."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from made_up_bundle import DIGEST, EPOCH, Manifest, elf, make_tree, passed

from release import build as build_module
from release import cubins, cuda, gpu
from release import rebuild as rebuild_module
from release import verify as verify_module
from release.archive import write_archive
from release.audit import allowed_paths, elf_problems
from release.build import BuildOptions
from release.cubins import CUDA_LIBRARY, DeviceCode, code_problems, declared_architectures, sm_facts, sm_problems
from release.errors import BuildError, GateError
from release.evidence import GATES, SM_GATES, GateResult, collect
from release.matrix import Matrix, Tuple, load_matrix, size_problems
from release.names import archive_name
from release.rebuild import NOT_TWICE, rebuild
from release.runs import Runner

CUDA = "linux-x86_64-glibc-cuda"
DECLARED = declared_architectures()
SMS = load_matrix().sms


def as_declared() -> DeviceCode:
    return DeviceCode({name: set(sms) for name, sms in DECLARED.items()}, frozenset(), 1)


def symbols(built: cubins.Architectures) -> str:
    """As cuobjdump prints them."""
    lines = []
    for sm in sorted({sm for sms in built.values() for sm in sms}):
        lines += ["Fatbin elf code:", "================", f"arch = sm_{sm}", "code version = [1,8]", "symbols:"]
        names = [name for name, sms in built.items() if sm in sms]
        lines += [
            f"STT_FUNC STB_GLOBAL x _GLOBAL__N__0a1b_{len(name) + 3}_{name}_cu_9f_{name}_kernel" for name in names
        ]
    return "\n".join(lines)


def test_declaration_and_matrix_name_the_same_sms(matrix: Matrix) -> None:
    assert json.loads(cubins.DECLARATION.read_text())["architectures"] == list(matrix.sms)
    assert [sm for sm in matrix.sms if cubins.own_sources(sm, DECLARED)] == list(matrix.aot_sms) == ["90a"]
    assert matrix.find(CUDA).max_channel == "preview"


@pytest.mark.parametrize("sm", SMS)
def test_a_missing_sm(sm: str) -> None:
    code = as_declared()
    for sms in code.built.values():
        sms.discard(sm)
    wanted = [f"{name}.cu: no code for SM {sm}" for name, sms in sorted(DECLARED.items()) if sm in sms]
    assert code_problems(code, DECLARED) == wanted
    assert f"no code of {min(DECLARED)}.cu" in sm_problems(sm, code, DECLARED)
    other = next(name for name in SMS if name != sm)
    assert sm_problems(other, code, DECLARED) == []
    assert [fact["name"] for fact in sm_facts(SMS, code, DECLARED) if not fact["sass"]] == [sm]


@pytest.mark.parametrize("sm", [sm for sm in SMS if sm != "90a"])
def test_a_feature_source_for_another_sm(sm: str) -> None:
    code = as_declared()
    code.built["matmul_wgmma"].add(sm)
    assert code_problems(code, DECLARED) == [f"matmul_wgmma.cu: code for SM {sm}, for which it is not declared"]
    assert sm_problems(sm, code, DECLARED) == ["code of matmul_wgmma.cu, which is not declared for it"]
    assert sm_problems("90a", code, DECLARED) == []


def test_ptx_and_size() -> None:
    code = DeviceCode(as_declared().built, frozenset({"90a"}), 61_000_000)
    assert code_problems(code, DECLARED) == ["PTX is embedded: 90a", "61.0 MB, expected at most 60 MB"]
    assert sm_problems("90a", code, DECLARED) == ["PTX for 90a is embedded"]


def test_facts_of_the_sms() -> None:
    facts = {fact["name"]: fact for fact in sm_facts(SMS, as_declared(), DECLARED)}
    assert facts["90a"] == {
        "name": "90a", "sass": True, "aot": True, "fallback": "aot",
        "fast_paths": ["matmul_wgmma", "matmul_wgmma_blocks"],
    }  # fmt: skip
    assert facts["89"] == {"name": "89", "sass": True, "aot": False, "fallback": "portable", "fast_paths": []}


@pytest.fixture
def entry() -> Tuple:
    return load_matrix().find(CUDA)


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Plays cuobjdump: prints what the file beside it says."""
    program = tmp_path / "cuobjdump"
    program.write_text('#!/bin/sh\n[ "$1" = --list-ptx ] || cat "$0.txt"\n')
    program.chmod(0o755)
    monkeypatch.setattr(gpu, "cuobjdump", lambda: program)
    return program


def judged(tree: Path, entry: Tuple, reader: Path, built: cubins.Architectures) -> list[str]:
    reader.with_name("cuobjdump.txt").write_text(symbols(built))
    sms = [fact | {"evidence": collect(SM_GATES, [])} for fact in sm_facts(SMS, as_declared(), DECLARED)]
    return gpu.device_code_problems(tree, {"sms": sms}, entry)


def test_gate_of_the_machine_code(tmp_path: Path, entry: Tuple, reader: Path) -> None:
    tree = make_tree(tmp_path / "tree", extra={CUDA_LIBRARY: elf()})
    assert judged(tree, entry, reader, as_declared().built) == []
    results = gpu.sm_results(tree, entry, DIGEST)
    for sm in SMS:
        evidence = collect(SM_GATES, results, sm)
        assert evidence["build_verified"]["value"] is True
        for name in ("runtime_verified", "correctness_verified", "performance_verified"):
            assert evidence[name]["value"] is False and "no NVIDIA GPU" in evidence[name]["reason"]
    built = as_declared().built
    for sms in built.values():
        sms.discard("87")
    found = judged(tree, entry, reader, built)
    assert "embed.cu: no code for SM 87" in found and any("the manifest says" in text for text in found)
    failed = [result.subject for result in gpu.sm_results(tree, entry, DIGEST) if result.state == "failed"]
    assert failed == ["87"]
    (tree / CUDA_LIBRARY).unlink()
    reader.with_name("cuobjdump.txt").write_text("")
    with pytest.raises(GateError, match="finds no kernels"):
        gpu.device_code_problems(tree, {"sms": []}, entry)


@pytest.mark.parametrize("missing", [None, *SMS])
def test_an_archive_that_lacks_an_sm_is_blocked(
    missing: str | None, manifest: Manifest, entry: Tuple, tree: Path, reader: Path, tmp_path: Path
) -> None:
    """With all of them it is a preview: no SM has run. What `verify` writes is valid either way."""
    (tree / CUDA_LIBRARY).parent.mkdir(parents=True)
    (tree / CUDA_LIBRARY).write_bytes(elf())
    built = as_declared().built
    for sms in built.values():
        sms.discard(missing or "")
    stated = [fact | {"evidence": collect(SM_GATES, [])} for fact in sm_facts(SMS, as_declared(), DECLARED)]
    problems = "; ".join(judged(tree, entry, reader, built))
    results = [passed(gate) for gates in GATES.values() for gate in gates if gate != "device-code"]
    state = "failed" if missing else "passed"
    results += [GateResult("device-code", state, "audit", problems, archive_sha256=DIGEST)]
    results += gpu.sm_results(tree, entry, DIGEST)
    archive = tmp_path / str(archive_name("1.2.3", CUDA, entry.archive_format))
    archive.write_bytes(b"archive")
    manifest |= {"artifact_id": CUDA, "driver": list(entry.external), "limits": list(entry.limits), "sms": stated}
    manifest["target"]["backend"] = "cuda"
    found = verify_module._write(manifest, entry, archive, DIGEST, results, tmp_path)
    evidence = {sm["name"]: sm["evidence"] for sm in found["sms"]}
    assert [sm for sm in SMS if not evidence[sm]["build_verified"]["value"]] == ([missing] if missing else [])
    assert not any(evidence[sm]["runtime_verified"]["value"] for sm in SMS)
    assert found["channel"]["name"] == ("blocked" if missing else "preview")
    assert (f"no code for SM {missing}" in " ".join(found["channel"]["reasons"])) == bool(missing)


def test_a_cpu_archive_holds_no_other_op_library(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree", extra={"lib/trivet/backends/cpu/libtrivet_cpu.so": elf()})
    entry = load_matrix().find("linux-x86_64-glibc-cpu")
    assert gpu.device_code_problems(tree, {}, entry) == [] == gpu.sm_results(tree, entry, DIGEST)
    (tree / "lib/libtrivet_cuda.so").write_bytes(elf())
    assert gpu.device_code_problems(tree, {}, entry) == ["the back end is cpu, yet there is libtrivet_cuda.so"]


@pytest.mark.parametrize("name", ["libcuda.so.1", "libcudart.so.13", "libnvidia-ml.so.1"])
def test_a_bundled_or_linked_driver(name: str, tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree", extra={CUDA_LIBRARY: elf(needed=(name,)), f"lib/{name}": elf()})
    manifest = json.loads((tree / "manifest.json").read_text())
    wanted = {f"{name} is never bundled and never linked: {path}" for path in (CUDA_LIBRARY, f"lib/{name}")}
    assert wanted <= set(elf_problems(tree, manifest))


def test_allowlist() -> None:
    cpu = allowed_paths("linux-x86_64-glibc-cpu", "quick", "1.2.3")
    assert allowed_paths(CUDA, "quick", "1.2.3") - cpu == {CUDA_LIBRARY} and cpu <= allowed_paths(
        CUDA, "quick", "1.2.3"
    )


def test_a_large_archive_needs_a_reason(entry: Tuple) -> None:
    cpu = load_matrix().find("linux-x86_64-glibc-cpu")
    assert size_problems(entry, 90_000_000) == [] == size_problems(cpu, 60_000_000)
    assert size_problems(cpu, 60_100_000) == ["60.1 MB, without a size_reason at most 60 MB"]


PROGRAM = """#!/bin/sh
case "$*" in
  *--require-gpu) {required} ;;
  *cuda:0) echo "error: device 'cuda:0' cannot be used: no usable NVIDIA driver: none is installed" >&2; exit 1 ;;
  *cuda) echo "RUNNING ON THE CPU, a GPU was asked for: no GPU can be used: no usable NVIDIA driver: x" >&2; echo 1 ;;
esac
"""
REQUIRED = (
    'echo "error: a GPU is required (require_gpu) and none can be used: no usable NVIDIA driver: none" >&2; exit 1'
)


def without_gpu(tmp_path: Path, **replies: str) -> list[str]:
    tree = make_tree(tmp_path / "tree")
    (tree / "trivet").write_text(PROGRAM.format(**{"required": REQUIRED} | replies))
    (tmp_path / "scratch").mkdir()
    runner = Runner(tree, json.loads((tree / "manifest.json").read_text()), DIGEST, tmp_path / "scratch")
    return gpu.gpu_absent_problems(runner.run, tmp_path / "m.gguf", "cuda")


def test_without_a_gpu(tmp_path: Path) -> None:
    assert without_gpu(tmp_path) == []


@pytest.mark.parametrize("required", ["echo 100", "exit 1", REQUIRED.replace("NVIDIA driver", "GPU")])
def test_a_required_gpu_must_be_refused_with_the_reason(required: str, tmp_path: Path) -> None:
    (found,) = without_gpu(tmp_path, required=required)
    assert found.startswith("`trivet complete --require-gpu` ended with status")


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders that the library was compiled in; nothing is."""
    folders: list[Path] = []

    def compiled(folder: Path, packages: Path) -> Path:
        folders.append(folder)
        folder.mkdir(parents=True)
        (folder / cuda.LIBRARY).write_bytes(b"library")
        return folder / cuda.LIBRARY

    packages = tmp_path / "packages"
    (packages / "nvidia/cu13/bin").mkdir(parents=True)
    nvcc = packages / "nvidia/cu13/bin/nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("TRIVET_RELEASE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cuda, "pinned_packages", lambda _: packages)
    monkeypatch.setattr(cuda, "inputs_digest", lambda: "f" * 64)
    monkeypatch.setattr(cuda, "_compile", compiled)
    return folders


def test_the_library_is_compiled_once(tmp_path: Path, made: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    first = cuda.cuda_library(tmp_path / "one", fresh=False)
    assert cuda.cuda_library(tmp_path / "two", fresh=False) == first and len(made) == 1
    assert first.toolchain["nvcc"] == "13.0, V13.0.88"
    assert cuda.cuda_library(tmp_path / "three", fresh=True).path.is_relative_to(tmp_path / "three") and len(made) == 2
    monkeypatch.setattr(cuda, "inputs_digest", lambda: "e" * 64)
    assert cuda.cuda_library(tmp_path / "four", fresh=False).path != first.path and len(made) == 3


def test_inputs_are_sources_flags_and_compilers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = set(cuda._source_names())
    assert {"backends/cuda/kernels.json", "backends/cuda/CMakeLists.txt", "backends/cuda/ops/norm.cu"} <= names
    assert not any(name.startswith("backends/cpu") or name.endswith(".py") for name in names)
    monkeypatch.setattr(
        cuda, "run", lambda command, **_: str(tmp_path) if "ort_headers" in str(command) else "c++ 12\n"
    )
    before = cuda.inputs_digest()
    assert cuda.inputs_digest() == before
    (tmp_path / "onnxruntime_c_api.h").touch()
    headers = cuda.inputs_digest()
    monkeypatch.setattr(
        cuda, "run", lambda command, **_: str(tmp_path) if "ort_headers" in str(command) else "c++ 13\n"
    )
    assert len({before, headers, cuda.inputs_digest()}) == 3


@pytest.mark.parametrize("cached", [False, True])
def test_a_rebuild_with_the_cached_library_is_none(
    cached: bool, tmp_path: Path, entry: Tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = archive_name("1.2.3", CUDA, entry.archive_format)
    archive = write_archive(make_tree(tmp_path / "tree"), name, tmp_path, epoch=EPOCH)
    asked: list[bool] = []

    def built(_: str, options: BuildOptions) -> Path:
        asked.append(options.fresh_cuda)
        return archive

    monkeypatch.setattr(rebuild_module, "build", built)
    options = BuildOptions("quick", tmp_path / "out", tmp_path / "work")
    result = rebuild(archive, options, tmp_path / "evidence", cached_cuda=cached)
    assert asked == [not cached]
    assert (result.state, result.reason) == (("absent", NOT_TWICE) if cached else ("passed", ""))
    assert json.loads((tmp_path / "evidence/rebuild.json").read_text())["state"] == result.state


def test_no_foreign_wheel_in_a_cuda_archive(tmp_path: Path, entry: Tuple) -> None:
    options = BuildOptions("quick", tmp_path, tmp_path, wheel=tmp_path / "w.whl")
    with pytest.raises(BuildError, match="--wheel is for CPU archives"):
        build_module._check_host(entry, options)


@pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed")
def test_cmake_takes_a_library_that_was_built_before(tmp_path: Path) -> None:
    """It installs it as it is; one that is missing, or one that would be left out, is an error."""
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.21)\nproject(x LANGUAGES NONE)\n"
        f"add_subdirectory({cubins.DECLARATION.parent} cuda)\n"
    )
    library = tmp_path / "libtrivet_cuda.so"

    def configured(*options: str) -> subprocess.CompletedProcess[str]:
        command: list[Any] = [
            "cmake",
            "-S",
            tmp_path,
            "-B",
            tmp_path / "build",
            f"-DTRIVET_CUDA_LIBRARY={library}",
            *options,
        ]
        return subprocess.run(command, capture_output=True, text=True)

    assert "must be a file" in configured("-DTRIVET_CUDA=ON").stderr
    library.write_bytes(b"x")
    assert "with TRIVET_CUDA=ON" in configured("-DTRIVET_CUDA=AUTO").stderr
    assert configured("-DTRIVET_CUDA=ON").returncode == 0
    subprocess.run(
        ["cmake", "--install", tmp_path / "build", "--prefix", tmp_path / "p"], check=True, capture_output=True
    )
    assert (tmp_path / "p/trivet/backends/cuda/libtrivet_cuda.so").read_bytes() == b"x"
