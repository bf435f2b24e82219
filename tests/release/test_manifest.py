"""The manifest's checker and the channel: every field is required, every boolean needs its own evidence."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from made_up_bundle import ARTIFACT, DIGEST, Manifest, make_manifest_without_itself, make_tree, passed, verified

from release.channel import PREVIEW_NEEDS, STABLE_NEEDS, compute_channel
from release.errors import ManifestError
from release.evidence import GATES, HARDWARE_EVIDENCE, TIER_GATES, GateResult, collect, judge
from release.manifest import check_manifest, load_schema, manifest_problems
from release.matrix import Matrix
from release.schema import schema_problems


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    folder = tmp_path_factory.mktemp("tree")
    return verified(make_manifest_without_itself(make_tree(folder)))


@pytest.fixture
def manifest(valid: Manifest) -> Manifest:
    return copy.deepcopy(valid)


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every field of the manifest, the first item standing for its list."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield (*path, name)
            yield from _paths(item, (*path, name))
    elif isinstance(value, list) and value:
        yield from _paths(value[0], (*path, 0))


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        value = value[step]
    return value


def test_the_made_up_manifest_is_valid_and_stable(manifest: Manifest, matrix: Matrix) -> None:
    check_manifest(manifest, matrix)
    assert manifest["channel"] == {"name": "stable", "reasons": []}


def test_each_field_is_required_and_typed(manifest: Manifest, matrix: Matrix) -> None:
    """Dropping a field, or giving it a value of another type, is an error that names it."""
    checked = 0
    for path in _paths(manifest):
        if path[:1] == ("files",) and path[-1] == "link":
            continue
        values: tuple[Any, ...] = ("DROP", 1.5, [[]], {"other": 1})
        for value in values:
            broken = copy.deepcopy(manifest)
            parent = _at(broken, path[:-1])
            if value == "DROP":
                del parent[path[-1]]
            else:
                parent[path[-1]] = value
            found = manifest_problems(broken, matrix)
            assert any(str(path[-1]) in text or str(path[0]) in text for text in found), (path, value, found)
            checked += 1
    assert checked > 400


def test_each_boolean_flipped_is_named(manifest: Manifest, matrix: Matrix) -> None:
    """What is true said to be false and the other way round, with nothing else changed: none gets through.

    Free are facts of other places: whether the machine that verified has a tier, whether a gate that needs no hardware
    was passed on an emulated CPU, and, as long as it is not verified, whether the library has code for an SM.
    """

    def is_free(path: tuple[Any, ...]) -> bool:
        return path[-1] in ("detected", "selected", "sass") or (
            path[-1] == "emulated" and not {*HARDWARE_EVIDENCE} & {*path}
        )

    for whole in (manifest, _cuda(copy.deepcopy(manifest), matrix)):
        flags = [path for path in _paths(whole) if isinstance(_at(whole, path), bool) and not is_free(path)]
        assert len(flags) > 20
        for path in flags:
            broken = copy.deepcopy(whole)
            _at(broken, path[:-1])[path[-1]] = not _at(broken, path)
            found = manifest_problems(broken, matrix)
            names = [str(step) for step in path if isinstance(step, str)]
            assert any(name in text for text in found for name in names), (path, found)


def test_a_boolean_is_no_integer(manifest: Manifest, matrix: Matrix) -> None:
    for value in (1, "true", None):
        manifest["evidence"]["runtime_verified"]["value"] = value
        assert any("runtime_verified.value" in text for text in manifest_problems(manifest, matrix))
    manifest["abi_version"] = True
    assert any("abi_version" in text for text in manifest_problems(manifest, matrix))


@pytest.mark.parametrize("name", list(GATES))
def test_true_without_its_evidence(name: str, manifest: Manifest, matrix: Matrix) -> None:
    manifest["evidence"][name]["references"] = []
    with pytest.raises(ManifestError, match=f"{name}: verified without the evidence of gate"):
        check_manifest(manifest, matrix)


@pytest.mark.parametrize("kind", ["cpu_tiers", "sms"])
@pytest.mark.parametrize("name", list(TIER_GATES))
def test_a_part_that_is_true_without_its_evidence(kind: str, name: str, manifest: Manifest, matrix: Matrix) -> None:
    """Each tier and each SM on its own; that another one has the evidence does not help."""
    fat = _cuda(manifest, matrix)
    for part in fat[kind]:
        broken = copy.deepcopy(fat)
        (entry,) = [other["evidence"][name] for other in broken[kind] if other["name"] == part["name"]]
        entry.update(value=True, state="verified", reason=None, references=[])
        expected = f"{kind} {part['name']}: {name}: verified without the evidence of gate"
        assert any(text.startswith(expected) for text in manifest_problems(broken, matrix))


@pytest.mark.parametrize("name", list(GATES))
def test_evidence_of_another_kind_does_not_count(name: str, manifest: Manifest, matrix: Matrix) -> None:
    other = next(entry for other, entry in manifest["evidence"].items() if other != name)
    manifest["evidence"][name] = copy.deepcopy(other)
    with pytest.raises(ManifestError, match=f"{name}: evidence of another kind"):
        check_manifest(manifest, matrix)


def _fail_gate(reference: dict[str, Any]) -> None:
    reference["passed"] = False


def _change_archive(reference: dict[str, Any]) -> None:
    reference["archive_sha256"] = "e" * 64


@pytest.mark.parametrize(
    ("change", "complaint"), [(_fail_gate, "did not pass"), (_change_archive, "about another archive")]
)
def test_evidence_must_be_good(
    change: Callable[[dict[str, Any]], None], complaint: str, manifest: Manifest, matrix: Matrix
) -> None:
    for name in GATES:
        broken = copy.deepcopy(manifest)
        change(broken["evidence"][name]["references"][0])
        assert any(name in text and complaint in text for text in manifest_problems(broken, matrix)), name
    for tier in range(4):
        broken = copy.deepcopy(manifest)
        change(broken["cpu_tiers"][tier]["evidence"]["runtime_verified"]["references"][0])
        assert any(complaint in text and "cpu_tiers" in text for text in manifest_problems(broken, matrix))


def test_an_emulated_run_is_no_runtime_evidence(manifest: Manifest, matrix: Matrix) -> None:
    manifest["evidence"]["runtime_verified"]["references"][0]["emulated"] = True
    assert any("emulated" in text for text in manifest_problems(manifest, matrix))
    results = [passed("completion"), GateResult("confinement", "passed", "run", emulated=True, archive_sha256=DIGEST)]
    entry = judge("runtime_verified", GATES["runtime_verified"], results)
    assert (entry["value"], entry["state"]) == (False, "not_verified")


def test_four_states() -> None:
    gates = ("elf", "paths")
    ok = passed("paths")
    cases = {
        "verified": [passed("elf"), ok],
        "not_verified": [ok],
        "absent": [GateResult("elf", "absent", "none", "hardware absent"), ok],
        "failed": [GateResult("elf", "failed", "run", "bad RUNPATH"), ok],
    }
    for state, results in cases.items():
        entry = judge("dependency_audit_verified", gates, results)
        assert entry["state"] == state
        assert entry["value"] is (state == "verified")
        assert (entry["reason"] is None) is (state == "verified")


def test_a_failure_is_never_softened() -> None:
    """Neither an absent gate, nor an unknown word, turns a failure into something else."""
    results = [GateResult("elf", "failed", "run", "broken"), GateResult("paths", "absent", "none", "no tool")]
    assert judge("x", ("elf", "paths"), results)["state"] == "failed"
    strange = GateResult("elf", "not applicable", "run", "it crashed")
    assert judge("x", ("elf",), [strange])["state"] == "failed"


def test_one_boolean_never_implies_another() -> None:
    for name, gates in GATES.items():
        evidence = collect(GATES, [passed(gate) for gate in gates])
        assert [other for other, entry in evidence.items() if entry["value"]] == [name]


@pytest.mark.parametrize("name", STABLE_NEEDS)
@pytest.mark.parametrize("how", ["false", "missing", "string", "one", "no entry"])
def test_stable_fails_closed(name: str, how: str, manifest: Manifest, matrix: Matrix) -> None:
    entry = manifest["evidence"][name]
    if how == "no entry":
        del manifest["evidence"][name]
    elif how == "missing":
        del entry["value"]
    else:
        entry["value"] = {"false": False, "string": "true", "one": 1}[how]
    channel = compute_channel(manifest, matrix.find(ARTIFACT))
    assert channel["name"] == ("blocked" if name in PREVIEW_NEEDS else "preview")
    assert any(name in reason for reason in channel["reasons"])


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: manifest["source"].update(clean_tree=False),
        lambda manifest: manifest["source"].update(tag=None),
        lambda manifest: manifest["build"].update(recipe="quick"),
        lambda manifest: manifest["cpu_tiers"].pop(),
        lambda manifest: manifest.pop("cpu_tiers"),
        lambda manifest: manifest["cpu_tiers"][2]["evidence"]["correctness_verified"].update(value=False),
    ],
)
def test_preview_only(change: Callable[[Manifest], Any], manifest: Manifest, matrix: Matrix) -> None:
    change(manifest)
    assert compute_channel(manifest, matrix.find(ARTIFACT))["name"] == "preview"


def test_nothing_opens_a_blocked_tuple(manifest: Manifest, matrix: Matrix) -> None:
    for entry in matrix.tuples:
        if entry.state != "buildable":
            assert compute_channel(manifest, entry)["name"] == "blocked"
    assert compute_channel({}, matrix.find(ARTIFACT))["name"] == "blocked"


def test_the_channel_cannot_be_claimed(manifest: Manifest, matrix: Matrix) -> None:
    manifest["source"]["clean_tree"] = False
    assert any("channel is stable; the evidence gives preview" in text for text in manifest_problems(manifest, matrix))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda manifest: manifest["target"].update(arch="aarch64"), "target.arch"),
        (lambda manifest: manifest["target"].update(libc="musl"), "target.libc"),
        (lambda manifest: manifest.update(artifact_id="linux-x86_64-glibc-gpu"), "holds no artifact"),
        (lambda manifest: manifest.update(version="9.9.9"), "version"),
        (
            lambda manifest: manifest["archive"].update(name="trivet-1.2.3-linux-x86_64-glibc-cuda.tar.gz"),
            "archive.name",
        ),
        (lambda manifest: manifest["cpu_tiers"].pop(2), "cpu_tiers lacks avx2"),
        (lambda manifest: manifest["cpu_tiers"].append(manifest["cpu_tiers"][0]), "twice"),
        (lambda manifest: manifest.update(limits=[]), "limits lacks"),
        (lambda manifest: manifest.update(driver=["NVIDIA driver"]), "driver"),
        (lambda manifest: manifest["package"].update(size=1), "package.size"),
        (lambda manifest: manifest["files"].reverse(), "not sorted"),
        (lambda manifest: manifest.update(extra=1), "not a field"),
    ],
)
def test_contradictions_are_named(
    change: Callable[[Manifest], Any], complaint: str, manifest: Manifest, matrix: Matrix
) -> None:
    change(manifest)
    assert any(complaint in text for text in manifest_problems(manifest, matrix))


def _cuda(manifest: Manifest, matrix: Matrix) -> Manifest:
    """The manifest as one of the CUDA tuple, no SM verified."""
    evidence = {name: judge(name, (gate,), []) for name, gate in [
        ("build_verified", "sm-code"), ("runtime_verified", "sm-run"),
        ("correctness_verified", "sm-tokens"), ("performance_verified", "sm-competitor"),
    ]}  # fmt: skip
    manifest |= {"artifact_id": "linux-x86_64-glibc-cuda", "driver": ["NVIDIA driver"]}
    manifest["archive"]["name"] = "trivet-1.2.3-linux-x86_64-glibc-cuda.tar.gz"
    manifest["target"]["backend"] = "cuda"
    manifest["limits"] = list(matrix.find("linux-x86_64-glibc-cuda").limits)
    manifest["sms"] = [
        {
            "name": name,
            "sass": True,
            "aot": name in matrix.aot_sms,
            "fallback": "aot" if name in matrix.aot_sms else "portable",
            "fast_paths": [],
            "evidence": copy.deepcopy(evidence),
        }
        for name in matrix.sms
    ]
    manifest["channel"] = compute_channel(manifest, matrix.find("linux-x86_64-glibc-cuda"))
    return manifest


def test_sms_of_a_fat_artifact(manifest: Manifest, matrix: Matrix) -> None:
    fat = _cuda(manifest, matrix)
    assert manifest_problems(fat, matrix) == []
    for index, name in enumerate(matrix.sms):
        without = copy.deepcopy(fat)
        del without["sms"][index]
        assert f"sms lacks {name}" in manifest_problems(without, matrix)
        wrong = copy.deepcopy(fat)
        wrong["sms"][index]["aot"] = not wrong["sms"][index]["aot"]
        assert any(f"sms {name}: aot" in text for text in manifest_problems(wrong, matrix))
    wrong = copy.deepcopy(fat)
    wrong["sms"][4]["evidence"]["runtime_verified"] = copy.deepcopy(manifest["evidence"]["runtime_verified"])
    assert any("evidence of another kind" in text for text in manifest_problems(wrong, matrix))


def test_the_schema_agrees_with_jsonschema(manifest: Manifest) -> None:
    """The strict checker and a full implementation of JSON Schema take and refuse the same manifests."""
    jsonschema = pytest.importorskip("jsonschema")
    schema = load_schema()
    judge = jsonschema.Draft202012Validator(schema)
    for path in _paths(manifest):
        for value in ("DROP", 1.5, None):
            broken = copy.deepcopy(manifest)
            parent = _at(broken, path[:-1])
            if value == "DROP":
                del parent[path[-1]]
            else:
                parent[path[-1]] = value
            assert bool(schema_problems(broken, schema)) == (not judge.is_valid(broken)), (path, value)


def test_the_schema_names_the_matrix(matrix: Matrix) -> None:
    schema = load_schema()
    assert tuple(schema["$defs"]["sm"]["properties"]["name"]["enum"]) == matrix.sms
    assert sorted(schema["properties"]["evidence"]["required"]) == sorted(GATES)
    assert Path(schema["$id"]).name == "trivet.release-manifest.v1"
