"""ModelSession: loading, the KV cache's memory, input checks, errors, determinism across threads and chunks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from trivet.backends import library
from trivet.backends.contract.manifest import read_manifest
from trivet.backends.cpu import session as cpu_session
from trivet.backends.cpu.session import CpuSession
from trivet.backends.errors import (
    BackendError,
    InvalidInputError,
    KernelError,
    LibraryNotFoundError,
    SessionCreateError,
    UnsupportedDeviceError,
)
from trivet.backends.session import ModelSession
from trivet.exporters import export

from .steps import BLOCK_SIZE, step_inputs

PROMPT = [int(t) for t in np.random.default_rng(0).integers(3, 300, 41)]


@pytest.fixture(scope="module")
def package(tiny: Callable[[str, str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tiny("llama", "gguf-q8_0"), tmp_path_factory.mktemp("package") / "llama", verify=False)


@pytest.fixture
def open_session(package: Path) -> Iterator[Callable[..., ModelSession]]:
    sessions: list[ModelSession] = []

    def make(**options: Any) -> ModelSession:
        session = ModelSession(package, read_manifest(package), **options)
        session.allocate_kv_cache(num_blocks=64, block_size=BLOCK_SIZE, dtype="float32")
        sessions.append(session)
        return session

    yield make
    for session in sessions:
        session.close()


def logits_of(session: ModelSession, chunks: list[int]) -> NDArray[Any]:
    """Logits of all positions of PROMPT, computed in chunks of the given sizes."""
    done, parts = 0, []
    for size in chunks:
        inputs = step_inputs(PROMPT[done : done + size], done, sampled=range(size))
        parts.append(session.run(inputs, ["logits"])["logits"])
        done += size
    assert done == len(PROMPT)
    return np.concatenate(parts)


def test_chunks_and_threads_do_not_change_a_bit(open_session: Callable[..., ModelSession]) -> None:
    whole = logits_of(open_session(num_threads=1), [len(PROMPT)])
    assert np.isfinite(whole).all()
    assert np.ptp(whole) > 0.1
    for threads, chunks in [(2, [41]), (3, [1] * 41), (2, [16, 16, 9]), (1, [40, 1])]:
        np.testing.assert_array_equal(logits_of(open_session(num_threads=threads), chunks), whole)


def test_every_tier_agrees(open_session: Callable[..., ModelSession]) -> None:
    probed = library.probe_cpu()
    results = {
        tier: logits_of(open_session(cpu_tier=tier), [41]) for tier, missing in probed["tiers"].items() if not missing
    }
    scale = np.abs(results["scalar"]).max()
    for tier, logits in results.items():
        assert np.abs(logits - results["scalar"]).max() < 1e-2 * scale, tier


def test_outputs_are_those_asked_for_and_the_extra_ones(package: Path) -> None:
    session = ModelSession(package, read_manifest(package), extra_outputs=["layers.0.residual"])
    session.allocate_kv_cache(num_blocks=8, block_size=BLOCK_SIZE, dtype="float16")
    got = session.run(step_inputs(PROMPT[:5], 0), ["sampled_token_ids", "logits"])
    assert list(got) == ["sampled_token_ids", "logits", "layers.0.residual"]
    assert got["layers.0.residual"].shape == (5, 64)
    assert got["sampled_token_ids"].tolist() == [int(got["logits"][0].argmax())]
    assert list(session.run(step_inputs(PROMPT[:3], 0), [])) == ["layers.0.residual"]
    with pytest.raises(InvalidInputError, match=r"extra output 'layers\.9\.residual': the graph .* has no such tensor"):
        ModelSession(package, read_manifest(package), extra_outputs=["layers.9.residual"])


@pytest.mark.parametrize("rows", [[], [40], [7, 0, 7, 40]])
def test_the_last_layer_ends_with_the_sampled_rows(package: Path, rows: list[int]) -> None:
    """Its residual stream is the sum of two blocks, so its MLP, too, has no other rows."""
    names = ["layers.1.residual", "layers.2.residual"]
    session = ModelSession(package, read_manifest(package), extra_outputs=names)
    session.allocate_kv_cache(num_blocks=8, block_size=BLOCK_SIZE, dtype="float32")
    results = session.run(step_inputs(PROMPT, 0, sampled=range(len(PROMPT))), ["logits"])
    whole = {name: array.copy() for name, array in results.items()}
    inputs = step_inputs(PROMPT, 0, sampled=rows)
    some = session.run(inputs, ["logits"])
    np.testing.assert_array_equal(some["layers.1.residual"], whole["layers.1.residual"])
    for name in ("layers.2.residual", "logits"):
        assert len(whole[name]) == len(PROMPT)
        np.testing.assert_array_equal(some[name], whole[name][rows])
    inputs["logits_indices"] = inputs["logits_indices"] + 1
    if 40 in rows:
        message = (
            rf"AddRMSNorm:layers\.2\.mlp_norm': rows\[{rows.index(40)}\]: expected a row of x from 0 to 40, got 41"
        )
        with pytest.raises(KernelError, match=message):
            session.run(inputs, ["logits"])


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_kv_cache_is_lazy_in_place_and_shared_with_the_graph(package: Path) -> None:
    manifest = read_manifest(package)
    session = ModelSession(package, manifest)
    before = resident_bytes()
    blocks = (1 << 30) // (BLOCK_SIZE * manifest.kv_elements_per_token * 4)
    assert session.allocate_kv_cache(num_blocks=blocks, block_size=BLOCK_SIZE, dtype="float32") > 1_000_000_000
    session.run(step_inputs(PROMPT, 0), ["sampled_token_ids"])
    assert resident_bytes() - before < 200_000_000
    device = session._device
    assert isinstance(device, CpuSession) and device._kv_values is not None
    memory = device._kv_values[0].numpy().reshape(-1)
    for spec in manifest.kv_cache:
        size = 2 * spec.num_kv_heads * spec.head_dim * BLOCK_SIZE * 4
        layer = memory[spec.kv_offset * blocks * BLOCK_SIZE * 4 :][: blocks * size].reshape(blocks, size)
        assert not layer[0].any()  # the null block
        assert layer[1].any() and layer[3].any() and not layer[4].any()
    with pytest.raises(BackendError, match="has a KV cache already"):
        session.allocate_kv_cache(num_blocks=1, block_size=1, dtype="float32")


def test_an_interrupted_session_runs_no_more(open_session: Callable[..., ModelSession]) -> None:
    session = open_session()
    started, failures = threading.Event(), []

    def work() -> None:
        try:
            while True:
                logits_of(session, [41])
                started.set()
        except KernelError as error:
            failures.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    assert started.wait(60)
    session.interrupt()
    thread.join(60)
    assert not thread.is_alive() and "terminate" in failures[0]
    with pytest.raises(KernelError, match="terminate"):
        logits_of(session, [41])


def memory_flags(address: int) -> list[str]:
    """VmFlags of the mapping that holds `address`."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split(maxsplit=1)[0]
        if "-" in head:
            first, end = (int(part, 16) for part in head.split("-"))
            inside = first <= address < end
        elif inside and head == "VmFlags:":
            return line.split()[1:]
    raise AssertionError(f"no mapping holds {address:#x}")


@pytest.mark.parametrize(("threshold", "flag"), [(2 * 2 * 16 * 4 + 1, "nh"), (2 * 2 * 16 * 4, "hg")])
def test_only_a_wide_kv_cache_takes_huge_pages(
    threshold: int, flag: str, open_session: Callable[..., ModelSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trivet.backends.cpu.session._HUGE_PAGE_TOKEN_BYTES", threshold)
    device = open_session()._device
    assert isinstance(device, CpuSession) and device._kv_values is not None
    address = device._kv_values[0].data_ptr()
    assert address % os.sysconf("SC_PAGE_SIZE") == 0
    flags = memory_flags(address)
    assert flag in flags and "sh" not in flags  # nor shared with what this process forks


@pytest.mark.parametrize("dtype", ["float32", "float16", "int16_per_token_head"])
def test_copied_blocks_continue_a_prompt_bit_for_bit(package: Path, dtype: str) -> None:
    """A second request takes two whole blocks and the beginning of a third from copies, and computes the rest."""
    session = ModelSession(package, read_manifest(package))
    if dtype == "int16_per_token_head" and not session.tier.startswith("avx512"):
        pytest.skip("this tier has no such cache")
    session.allocate_kv_cache(num_blocks=64, block_size=BLOCK_SIZE, dtype=dtype)
    expected = session.run(step_inputs(PROMPT, 0, sampled=range(len(PROMPT))), ["logits"])["logits"]
    session.run(step_inputs(PROMPT[::-1], 0, first_block=7), ["logits"])  # what the targets hold before
    session.copy_blocks([(1, 7), (2, 30), (30, 8), (3, 9)])
    rest = session.run(step_inputs(PROMPT[37:], 37, first_block=7, sampled=range(4)), ["logits"])["logits"]
    np.testing.assert_array_equal(rest, expected[37:])
    for copies in ([(0, 1)], [(1, 64)], [(-1, 2)]):
        with pytest.raises(InvalidInputError, match=r"copy_blocks: block (0|64|-1); expected 1 to 63"):
            session.copy_blocks(copies)
    session.close()
    with pytest.raises(BackendError, match="copy_blocks: call allocate_kv_cache first"):
        session.copy_blocks([(1, 2)])


def test_known_arrays_do_not_hide_an_input_that_is_not_known(open_session: Callable[..., ModelSession]) -> None:
    session, inputs = open_session(), step_inputs(PROMPT, 0)
    session.run(inputs, ["logits"])
    with pytest.raises(InvalidInputError, match=r"\['temperature'\] are not graph inputs"):
        session.run(inputs | {"temperature": np.zeros(1, np.float32)}, ["logits"])
    del inputs["positions"]
    with pytest.raises(InvalidInputError, match="input 'positions' is missing"):
        session.run(inputs, ["logits"])
    for unused in (session, open_session()):
        with pytest.raises(InvalidInputError, match="is missing"):
            unused.run({}, ["logits"])


def test_two_sessions_run_at_once(open_session: Callable[..., ModelSession]) -> None:
    expected = logits_of(open_session(num_threads=1), [41])
    sessions = [open_session(num_threads=2) for _ in range(3)]
    failures: list[BaseException] = []

    def work(session: ModelSession) -> None:
        try:
            for chunks in ([41], [20, 21], [1] * 41) * 3:
                np.testing.assert_array_equal(logits_of(session, chunks), expected)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(s,)) for s in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_more_threads_than_cores_do_not_collapse(open_session: Callable[..., ModelSession]) -> None:
    """Threads that wait give their core away: those that only spin would burn all cores."""
    cores = len(os.sched_getaffinity(0))
    cpu = []
    for num_threads in (cores, 4 * cores):
        session = open_session(num_threads=num_threads)
        session.run(step_inputs(PROMPT[:8], 0), ["sampled_token_ids"])
        start = time.process_time()
        for _ in range(30):
            session.run(step_inputs(PROMPT[:8], 0), ["sampled_token_ids"])
        cpu.append(time.process_time() - start)
        session.close()
    assert cpu[1] < 8 * cpu[0], cpu


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": None}, "input 'positions' is missing"),
        (
            {"positions": np.zeros(5, np.int64)},
            r"'positions': expected C-contiguous int32 of shape \('T',\), got int64",
        ),
        ({"positions": np.zeros((5, 1), np.int32)}, r"got int32 of shape \(5, 1\)"),
        ({"positions": np.zeros(10, np.int32)[::2]}, "expected C-contiguous"),
        ({"positions": np.zeros(4, np.int32)}, r"'positions': shape \(4,\) does not fit \('T',\), T is 5"),
        ({"sampling_floats": np.zeros((1, 5), np.float32)}, r"does not fit \('S', 6\)"),
        ({"seq_lens": np.zeros(2, np.int32)}, "extent R.1 = 2 while R = 2|R is 1"),
        ({"kv_cach": np.zeros(1)}, r"inputs \['kv_cach'\] are not graph inputs"),
    ],
)
def test_inputs_are_checked(open_session: Callable[..., ModelSession], change: dict[str, Any], message: str) -> None:
    inputs = step_inputs(PROMPT[:5], 0) | change
    with pytest.raises(InvalidInputError, match=message):
        open_session().run({k: v for k, v in inputs.items() if v is not None}, ["logits"])


def test_a_kernel_error_is_one_line_and_the_session_goes_on(open_session: Callable[..., ModelSession]) -> None:
    session = open_session()
    expected = logits_of(session, [41])
    with pytest.raises(KernelError, match=r"^step failed: EmbedTokens .*input_ids\[1\]: expected an id from 0 to 383"):
        session.run(step_inputs([5, 384], 0), ["logits"])
    with pytest.raises(InvalidInputError, match="output 'logit': the graph has "):
        session.run(step_inputs([5], 0), ["logit"])
    np.testing.assert_array_equal(logits_of(session, [41]), expected)


def test_arguments_and_files_are_checked(package: Path, tmp_path: Path) -> None:
    manifest = read_manifest(package)
    with pytest.raises((UnsupportedDeviceError, LibraryNotFoundError), match=r"'cuda:99'|built without CUDA"):
        ModelSession(package, manifest, device="cuda:99")
    for option in ({"num_threads": 2}, {"cpu_tier": "scalar"}):
        with pytest.raises(InvalidInputError, match=f"{next(iter(option))} .*applies to device 'cpu' only"):
            ModelSession(package, manifest, device="cuda", **option)
    with pytest.raises(UnsupportedDeviceError, match="device 'cpu:1': expected 'cpu', 'cuda' or 'cuda:N'"):
        ModelSession(package, manifest, device="cpu:1")
    with pytest.raises(InvalidInputError, match="activation_dtype 'int4'"):
        ModelSession(package, manifest, activation_dtype="int4")
    with pytest.raises(InvalidInputError, match="num_threads 0"):
        ModelSession(package, manifest, num_threads=0)
    with pytest.raises(SessionCreateError, match=r"cannot read .*model\.onnx: No such file"):
        ModelSession(tmp_path, manifest)
    (tmp_path / "model.onnx").write_bytes(b"not a graph")
    with pytest.raises(SessionCreateError, match="cannot load the model"):
        ModelSession(tmp_path, manifest)
    session = ModelSession(package, manifest)
    with pytest.raises(BackendError, match="call allocate_kv_cache first"):
        session.run(step_inputs([5], 0), ["logits"])
    with pytest.raises(InvalidInputError, match="KV cache dtype 'int8'"):
        session.allocate_kv_cache(num_blocks=2, block_size=16, dtype="int8")
    session.close()
    session.close()
    with pytest.raises(BackendError, match="or was closed"):
        session.allocate_kv_cache(num_blocks=2, block_size=16, dtype="float32")


def test_other_work_is_started_once_before_the_session_is_open(package: Path) -> None:
    calls: list[str] = []
    manifest = read_manifest(package)
    elsewhere = msgspec.structs.replace(manifest, sources=[])
    with pytest.raises(SessionCreateError, match="not in the checkpoint files"):
        ModelSession(package, elsewhere, meanwhile=lambda: calls.append("early"))
    assert calls == []
    ModelSession(package, manifest, meanwhile=lambda: calls.append("once")).close()
    assert calls == ["once"]


def test_outputs_of_the_run_before_are_forgotten(open_session: Callable[..., ModelSession]) -> None:
    session = open_session()
    logits = logits_of(session, [41])
    got = session.run(step_inputs(PROMPT, 0), ["sampled_token_ids"])
    assert list(got) == ["sampled_token_ids"]
    assert got["sampled_token_ids"].tolist() == [int(np.argmax(logits[-1]))]


@pytest.mark.parametrize(
    ("function", "value", "message"),
    [("select_tier", "nonsense", "nonsense"), ("probe_cpu", {"num_threads": -5}, "-5")],
)
def test_the_op_library_gets_the_tier_and_the_threads(
    function: str, value: Any, message: str, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most tiers give the same bits, so only a value that the library refuses shows that it is asked."""
    monkeypatch.setattr(cpu_session, function, lambda *arguments: value)
    with pytest.raises(SessionCreateError, match=message):
        ModelSession(package, read_manifest(package))


def test_a_missing_library_says_how_to_build_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library, "_CPU_LIBRARY", tmp_path / "libtrivet_cpu.so")
    with pytest.raises(LibraryNotFoundError, match=r"not built\. In a checkout run `pip install -e"):
        library.cpu_library_path()
