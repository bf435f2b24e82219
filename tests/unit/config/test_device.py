"""Which device a name means, on machines with and without GPUs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from trivet.backends.contract.manifest import KVCacheSpec
from trivet.backends.cuda import device as cuda
from trivet.backends.devices import DeviceChoice, choose_device
from trivet.backends.errors import UnsupportedDeviceError
from trivet.runtime.config import ConfigError, EngineConfig

OLD = {
    "ordinal": 0,
    "name": "Old",
    "sm": 70,
    "refused": "device cuda:0 (Old) is SM 7.0, this trivet has kernels for SM 80",
}
GOOD = {"ordinal": 1, "name": "Good", "sm": 80, "refused": ""}
NO_DRIVER = "no usable NVIDIA driver: none is installed"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """machine(devices, error): what the driver says."""

    def have(devices: list[dict[str, Any]], error: str = "") -> None:
        monkeypatch.setattr(cuda, "describe_cuda", lambda: {"devices": devices, "error": error})

    return have


@pytest.mark.parametrize("require_gpu", [False, True])
def test_the_first_gpu_that_can_be_used_is_taken(machine: Any, require_gpu: bool) -> None:
    machine([OLD, GOOD])
    assert choose_device("cuda", require_gpu=require_gpu) == DeviceChoice("cuda:1")
    assert choose_device("cuda:1", require_gpu=require_gpu) == DeviceChoice("cuda:1")
    assert choose_device("auto", require_gpu=require_gpu) == DeviceChoice("cuda:1" if require_gpu else "cpu")
    assert choose_device("cpu") == DeviceChoice("cpu")


@pytest.mark.parametrize(
    ("devices", "error", "reason"),
    [([], NO_DRIVER, NO_DRIVER), ([OLD], "", "is SM 7.0"), ([], "", "CUDA offers no device")],
    ids=["no_driver", "too_old", "none"],
)
def test_without_a_gpu_the_cpu_is_taken_with_a_reason_or_nothing(
    machine: Any, devices: list[dict[str, Any]], error: str, reason: str
) -> None:
    machine(devices, error)
    choice = choose_device("cuda")
    assert choice.name == "cpu" and choice.fallback.startswith("no GPU can be used: ") and reason in choice.fallback
    assert choose_device("auto") == DeviceChoice("cpu")
    for device in ("cuda", "auto"):
        with pytest.raises(UnsupportedDeviceError, match=rf"a GPU is required .*{reason}"):
            choose_device(device, require_gpu=True)


@pytest.mark.parametrize("require_gpu", [False, True])
def test_a_gpu_by_number_is_that_one_or_none(machine: Any, require_gpu: bool) -> None:
    machine([OLD, GOOD])
    with pytest.raises(UnsupportedDeviceError, match=r"'cuda:2' cannot be used: .* CUDA offers 2 device\(s\)"):
        choose_device("cuda:2", require_gpu=require_gpu)
    with pytest.raises(UnsupportedDeviceError, match=r"'cuda:0' cannot be used: .* is SM 7.0"):
        choose_device("cuda:0", require_gpu=require_gpu)
    machine([], NO_DRIVER)
    with pytest.raises(UnsupportedDeviceError, match=rf"'cuda:1' cannot be used: {NO_DRIVER}"):
        choose_device("cuda:1", require_gpu=require_gpu)


def test_the_cpu_cannot_be_a_required_gpu() -> None:
    with pytest.raises(ConfigError, match="device is 'cpu'; expected a GPU, as require_gpu is set"):
        EngineConfig.from_kwargs("model", device="cpu", require_gpu=True)


def config(**options: Any) -> EngineConfig:
    return EngineConfig.from_kwargs("model", **{"kv_cache_dtype": "fp8"} | options)


def manifest(head_dim: int = 64) -> Any:
    architecture = SimpleNamespace(name="tiny", dtype="float16", max_position_embeddings=2048)
    specs = [KVCacheSpec(layer=0, num_kv_heads=2, head_dim=head_dim, kv_offset=0)]
    return SimpleNamespace(architecture=architecture, kv_cache=specs, sources=[])


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
def test_an_fp8_cache_has_twice_the_blocks_on_a_gpu(name: str, machine: Any) -> None:
    machine([GOOD])
    options: dict[str, Any] = {"device": "cuda:1", "kv_cache_memory_bytes": 1 << 28}
    resolved = config(kv_cache_dtype=name, **options).resolve(manifest(), free_bytes=1 << 30)
    assert resolved.cache_config.cache_dtype == resolved.resolved_plan.cache_dtype == "fp8_e4m3"
    wide = config(kv_cache_dtype="float16", **options).resolve(manifest(), free_bytes=1 << 30)
    assert resolved.resolved_plan.num_gpu_blocks == 2 * wide.resolved_plan.num_gpu_blocks


@pytest.mark.parametrize("device", ["cpu", "auto", "cuda"])
def test_an_fp8_cache_is_refused_on_the_cpu(device: str, machine: Any) -> None:
    machine([], NO_DRIVER)
    with pytest.raises(UnsupportedDeviceError, match=r"kv_cache_dtype 'fp8_e4m3' is for CUDA .* on the CPU"):
        config(device=device).resolve(manifest(), free_bytes=1 << 30)


def test_heads_that_an_fp8_cache_cannot_have_are_named(machine: Any) -> None:
    machine([GOOD])
    with pytest.raises(UnsupportedDeviceError, match=r"heads of a multiple of 16 elements, this model has \[24\]"):
        config(device="cuda:1").resolve(manifest(head_dim=24), free_bytes=1 << 30)


INT16 = "int16_per_token_head"


def test_an_int16_cache_is_the_default_where_it_can_be(monkeypatch: pytest.MonkeyPatch, machine: Any) -> None:
    """... and what stands in its way is named to who asks for it."""
    machine([GOOD])
    monkeypatch.setattr("trivet.backends.library.select_tier", lambda forced: forced or "avx512_vnni")

    def resolved(shapes: list[int], **options: Any) -> str:
        model = manifest()
        model.kv_cache = [
            KVCacheSpec(layer=i, num_kv_heads=2, head_dim=dim, kv_offset=0) for i, dim in enumerate(shapes)
        ]
        chosen = config(**{"kv_cache_dtype": "auto"} | options).resolve(model, free_bytes=1 << 30)
        return chosen.resolved_plan.cache_dtype

    assert resolved([64, 64]) == INT16
    for shapes, options, problem in (
        ([24], {}, r"heads of a multiple of 16 elements, this model has \[24\]"),
        ([64, 128], {}, r"heads of one size in all layers, this model has \[64, 128\]"),
        ([64], {"block_size": 8}, "a block_size that is a multiple of 16, got 8"),
        ([64], {"cpu_tier": "avx2"}, "needs one of the CPU tiers avx512_vnni, this is avx2"),
        ([64], {"device": "cuda:1"}, "is for CPUs, the model would run on cuda:1"),
    ):
        assert resolved(shapes, **options) == "float16"
        with pytest.raises(UnsupportedDeviceError, match=rf"'{INT16}' .*{problem}"):
            resolved(shapes, kv_cache_dtype=INT16, **options)
