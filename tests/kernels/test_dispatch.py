"""Which tier runs: detection, forcing, refusal; and that no op, format or tier goes without tests."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from trivet.backends import library
from trivet.backends.contract.formats import FORMATS
from trivet.backends.contract.opset import OPS
from trivet.backends.errors import UnsupportedDeviceError

from . import reference

AVX2 = "sse2,avx2,fma,f16c"
AVX512 = AVX2 + ",avx512f,avx512bw,avx512vl,avx512dq"
TIERS = {
    "x86_64": ["scalar", "baseline", "avx2", "avx_vnni", "avx512_vnni"],
    "aarch64": ["scalar", "neon", "dotprod", "i8mm"],
}[platform.machine()]
on_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="of x86-64")
on_arm = pytest.mark.skipif(platform.machine() != "aarch64", reason="of aarch64")


def describe(features: str | None) -> dict[str, Any]:
    raw = library._cpu_library().trivet_cpu_describe(None if features is None else features.encode())
    described: dict[str, Any] = json.loads(raw)
    return described


def complaint(tier: str, features: str | None) -> str:
    return str(
        library._cpu_library()
        .trivet_cpu_check_tier(tier.encode(), None if features is None else features.encode())
        .decode()
    )


@on_x86
@pytest.mark.parametrize(
    ("features", "best"),
    [
        ("", "scalar"),
        ("sse2", "baseline"),
        ("sse2,avx2,f16c", "baseline"),
        ("sse2,avx2,fma", "baseline"),
        (AVX2, "avx2"),
        (AVX2 + ",avx_vnni", "avx_vnni"),
        ("sse2,avx2,fma,avx_vnni", "baseline"),
        (AVX512, "avx2"),
        (AVX512 + ",avx_vnni", "avx_vnni"),
        (AVX512 + ",avx512_vnni", "avx512_vnni"),
        (AVX512 + ",avx_vnni,avx512_vnni", "avx512_vnni"),
        (AVX2 + ",avx512f,avx512bw,avx512dq,avx512_vnni", "avx2"),
    ],
)
def test_the_best_tier_is_the_highest_whose_features_are_all_there(features: str, best: str) -> None:
    assert describe(features)["best_tier"] == best


@on_arm
@pytest.mark.parametrize(
    ("features", "best"),
    [
        ("", "scalar"),
        ("asimd", "neon"),
        ("asimd,i8mm", "neon"),
        ("asimddp", "scalar"),
        ("asimd,asimddp", "dotprod"),
        ("asimd,asimddp,i8mm", "i8mm"),
    ],
)
def test_the_best_tier_of_arm_is_the_highest_whose_features_are_all_there(features: str, best: str) -> None:
    assert describe(features)["best_tier"] == best


@on_x86
def test_a_forced_tier_that_the_cpu_lacks_is_refused_by_name() -> None:
    assert complaint("avx512_vnni", AVX2) == (
        "CPU tier 'avx512_vnni': this CPU (or its operating system) lacks avx512f, avx512bw, avx512vl, avx512dq, "
        "avx512_vnni; the best tier here is 'avx2'"
    )
    assert complaint("avx2", "sse2,avx2,fma") == (
        "CPU tier 'avx2': this CPU (or its operating system) lacks f16c; the best tier here is 'baseline'"
    )
    assert complaint("avx2", AVX2) == ""
    assert complaint("avx_vnni", AVX512 + ",avx512_vnni") == (
        "CPU tier 'avx_vnni': this CPU (or its operating system) lacks avx_vnni; the best tier here is 'avx512_vnni'"
    )
    assert complaint("avx_vnni", "sse2,avx2,fma,avx_vnni") == (
        "CPU tier 'avx_vnni': this CPU (or its operating system) lacks f16c; the best tier here is 'baseline'"
    )
    assert complaint("avx512_vnni", AVX512 + ",avx512_vnni") == ""
    assert complaint("sse9", None) == "unknown CPU tier 'sse9', known: scalar, baseline, avx2, avx_vnni, avx512_vnni"


@on_arm
def test_a_forced_tier_that_an_arm_cpu_lacks_is_refused_by_name() -> None:
    assert complaint("i8mm", "asimd") == (
        "CPU tier 'i8mm': this CPU (or its operating system) lacks asimddp, i8mm; the best tier here is 'neon'"
    )
    assert complaint("dotprod", "asimd,asimddp") == ""
    assert complaint("avx2", None) == "unknown CPU tier 'avx2', known: scalar, neon, dotprod, i8mm"


def test_an_unknown_feature_name_is_an_error() -> None:
    assert f"unknown CPU feature 'mmx2', known: {', '.join(all_features())}" in describe("mmx2")["error"]


def all_features() -> list[str]:
    """What the tiers lack on a CPU without anything."""
    return list(dict.fromkeys(name for missing in describe("")["tiers"].values() for name in missing))


@on_arm
def test_the_probe_agrees_with_the_auxiliary_vector() -> None:
    """Not with /proc/cpuinfo, which is the host's under an emulator."""
    import ctypes

    hwcap, hwcap2 = (ctypes.CDLL(None).getauxval(ctypes.c_ulong(kind)) for kind in (16, 26))
    bits = {"asimd": hwcap >> 1 & 1, "asimddp": hwcap >> 20 & 1, "i8mm": hwcap2 >> 13 & 1}
    assert describe(None)["features"] == [name for name, bit in bits.items() if bit]


@on_x86
def test_the_probe_agrees_with_the_operating_system() -> None:
    flags = Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split()
    assert set(describe(None)["features"]) == set(all_features()) & set(flags)


def test_num_threads_counts_physical_cores_of_the_affinity_mask() -> None:
    assert 1 <= describe(None)["num_threads"] <= len(os.sched_getaffinity(0))
    program = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); "
        "from trivet.backends.library import probe_cpu; print(probe_cpu()['num_threads'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=child_env())
    assert done.stdout.strip() == "1"


@pytest.fixture
def cpu_group() -> Iterator[Path]:
    """A control group of its own, of whichever version holds the cpu controller here."""
    version_1 = Path("/sys/fs/cgroup/cpu")
    group = (version_1 if version_1.is_dir() else Path("/sys/fs/cgroup")) / f"trivet-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no control groups can be made here: {error}")
    try:
        if not any((group / name).exists() for name in ("cpu.cfs_quota_us", "cpu.max")):
            pytest.skip("the control group has no cpu controller")
        yield group
    finally:
        group.rmdir()


@pytest.mark.parametrize("cores", [0.5, 1.5, 1000])
def test_num_threads_stays_within_the_cpu_quota_of_the_control_group(cpu_group: Path, cores: float) -> None:
    unlimited = int(describe(None)["num_threads"])
    if unlimited == 1:
        pytest.skip("one core is all there is")
    if (cpu_group / "cpu.max").exists():
        (cpu_group / "cpu.max").write_text(f"{int(cores * 100_000)} 100000")
    else:
        (cpu_group / "cpu.cfs_quota_us").write_text(str(int(cores * 100_000)))
    program = (
        f"import os; open({str(cpu_group / 'cgroup.procs')!r}, 'w').write(str(os.getpid())); "
        "from trivet.backends.library import probe_cpu; print(probe_cpu()['num_threads'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=child_env())
    assert int(done.stdout) == max(1, min(int(cores), unlimited))


def child_env(**extra: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)} | extra


def test_the_environment_variable_is_the_default_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.TIER_VARIABLE, TIERS[1])
    assert library.select_tier(None) == TIERS[1]
    assert library.select_tier("scalar") == "scalar"
    assert library.describe_cpu()["selected_tier"] == TIERS[1]
    monkeypatch.setenv(library.TIER_VARIABLE, "altivec")
    with pytest.raises(UnsupportedDeviceError, match=r"^\$TRIVET_CPU_TIER: unknown CPU tier 'altivec'"):
        library.select_tier(None)
    with pytest.raises(UnsupportedDeviceError, match=r"^unknown CPU tier 'vmx'"):
        library.select_tier("vmx")
    facts = library.describe_cpu()
    assert facts["selected_tier"] is None and "altivec" in facts["selected_tier_error"]


def test_the_library_needs_nothing_of_onnxruntime_and_exports_its_entry_points_only() -> None:
    symbols = subprocess.run(
        ["nm", "-D", str(library.cpu_library_path())], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    exported = {line.split()[-1] for line in symbols if " U " not in line and " w " not in line}
    assert exported == {
        "RegisterCustomOps",
        "trivet_cpu_describe",
        "trivet_cpu_check_tier",
        "trivet_cpu_dequantize",
        "trivet_cpu_map_cached_pages",
        "trivet_cpu_merge_byte_pairs",
    }
    assert not [line for line in symbols if " U " in line and "ort" in line.rpartition(" U ")[2].lower()[:5]]


@on_x86
def test_code_outside_the_tiers_uses_no_wide_registers(tmp_path: Path) -> None:
    """What runs before a tier is chosen, and the baseline tier, must be plain x86-64."""
    disassembly = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", str(library.cpu_library_path())],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    # RegisterCustomOps and the two trivet_cpu_ functions are the only symbols left; they come first in their files.
    for name in ("RegisterCustomOps", "trivet_cpu_describe", "trivet_cpu_check_tier"):
        body = disassembly.partition(f"<{name}>:")[2].partition("\n\n")[0]
        assert body and "%ymm" not in body and "%zmm" not in body and "vmov" not in body


def test_every_op_and_format_has_cases() -> None:
    folder = Path(__file__).parent
    sources = "\n".join(path.read_text() for path in folder.glob("test_*.py"))
    for op in OPS:
        assert f'"{op}"' in sources, f"no test in {folder} runs the op {op}"
    assert set(FORMATS) == set(reference.FLOAT_FORMATS) | set(reference.HALF_OFFSETS)
    assert list(describe(None)["tiers"]) == TIERS
