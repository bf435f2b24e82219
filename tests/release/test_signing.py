"""From a packed bundle to an index: provenance, signatures, evidence, the strangers' checker; and what must fail."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from made_up_bundle import ARTIFACT, EPOCH, ROOT, make_manifest_without_itself, make_tree, verified, write_manifest

from release import pipeline, provenance
from release import verify as verify_module
from release.__main__ import main
from release.archive import sha256_file, tree_files, write_archive
from release.build import BuildOptions
from release.errors import ArchiveError, GateError, ManifestError, MatrixError, SignatureError
from release.evidence import GateResult
from release.index import check_index, make_index
from release.matrix import load_matrix
from release.names import CHECKING_FILES, INDEX_FILES, archive_name
from release.page import STEPS
from release.verify import VerifyOptions, attest, verify

Keys = dict[str, Path]


def test_signed_and_read(archive: Path, keys: Keys) -> None:
    found = provenance.read_envelope(archive, keys["ours.pub"])
    assert found["subject"] == [{"name": archive.name, "digest": {"sha256": sha256_file(archive)}}]
    assert provenance.manifest_of(found)["channel"]["name"] == "stable"


def test_another_key(archive: Path, keys: Keys) -> None:
    with pytest.raises(SignatureError, match=r"not signed by the key theirs\.pub"):
        provenance.read_envelope(archive, keys["theirs.pub"])


def test_no_signature(archive: Path, keys: Keys) -> None:
    found = provenance.read_envelope(archive, None)
    provenance.write_envelope(found, archive, None)
    with pytest.raises(SignatureError, match="not signed by"):
        provenance.read_envelope(archive, keys["ours.pub"])


def test_a_changed_payload(archive: Path, keys: Keys) -> None:
    path = Path(f"{archive}.provenance.json")
    envelope = json.loads(path.read_text())
    payload = base64.b64decode(envelope["payload"]).replace(b'"recipe":"release"', b'"recipe":"quick  "')
    envelope["payload"] = base64.b64encode(payload).decode()
    path.write_text(json.dumps(envelope))
    with pytest.raises(SignatureError, match="not signed by"):
        provenance.read_envelope(archive, keys["ours.pub"])


def test_provenance_of_other_bytes(archive: Path, keys: Keys) -> None:
    """Such as the staging folder's, or an archive that changed after it was signed."""
    archive.write_bytes(archive.read_bytes() + b"\0")
    with pytest.raises(SignatureError, match="is about"):
        provenance.read_envelope(archive, keys["ours.pub"])


@pytest.mark.parametrize(
    "text", ["", "{}", '{"payload": 1}', '{"payloadType": "x", "payload": "e30=", "signatures": []}']
)
def test_no_envelope(text: str, archive: Path) -> None:
    Path(f"{archive}.provenance.json").write_text(text)
    with pytest.raises(SignatureError, match="no provenance envelope"):
        provenance.read_envelope(archive, None)


def test_index(archive: Path, keys: Keys) -> None:
    (entry,) = make_index(archive.parent, keys["ours.pub"])
    assert (entry["archive"], entry["channel"], entry["size"]) == (archive.name, "stable", archive.stat().st_size)
    page = (archive.parent / "index.html").read_text()
    assert archive.name in page and sha256_file(archive) in page
    check_index(archive.parent, keys["ours.pub"])
    (archive.parent / "index.html").write_text(page.replace("stable", "best"))
    with pytest.raises(ArchiveError, match="by hand or is old"):
        check_index(archive.parent, keys["ours.pub"])
    for name in (*CHECKING_FILES, *INDEX_FILES):
        make_index(archive.parent, keys["ours.pub"])
        (archive.parent / name).unlink()
        with pytest.raises(ArchiveError, match=rf"^{re.escape(name)} is missing"):
            check_index(archive.parent, keys["ours.pub"])


def test_the_page_alone_suffices(archive: Path, keys: Keys) -> None:
    """Each file that it speaks of is linked and there; its lines, typed below it, check and unpack the archive."""
    folder = archive.parent
    make_index(folder, keys["ours.pub"])
    text = (folder / "index.html").read_text()
    linked = set(re.findall(r'href="([^"]+)"', text))
    assert linked == {path.name for path in folder.iterdir()} - set(INDEX_FILES)
    steps = dict(re.findall(r'<pre id="([\w-]+)">(.*?)</pre>', text, re.DOTALL))
    assert steps["names"].splitlines()[0] == f"ARCHIVE={archive.name}"
    for name in CHECKING_FILES:
        assert f"{sha256_file(folder / name)}  {name}" in steps["check"]
        assert f'"{name}">{name}</a>, SHA-256 <code>{sha256_file(folder / name)}</code>' in text
    for name in ("check", "check-signature"):
        done = subprocess.run(
            ["sh", "-euc", steps[name]], cwd=folder, env=os.environ | {"ARCHIVE": archive.name}, capture_output=True
        )
        assert done.returncode == 0, done.stderr
    (folder / "verify_archive.py").write_text("print('all is well')\n")
    done = subprocess.run(["sh", "-euc", steps["check"]], cwd=folder, env=os.environ | {"ARCHIVE": archive.name})
    assert done.returncode != 0
    with pytest.raises(ArchiveError, match=r"verify_archive\.py is not the one of this release"):
        check_index(folder, keys["ours.pub"])


def test_the_trial_types_what_the_page_says() -> None:
    used = set(re.findall(r"\bstep ([\w-]+)\)", (ROOT / "release" / "trial.sh").read_text()))
    assert used == set(STEPS)


def test_the_page_names_a_server_as_the_readme_does() -> None:
    url = STEPS["ask"].split("--url ")[1].split()[0]
    assert f'base_url="{url}/v1"' in (ROOT / "README.md").read_text()


def test_only_the_public_half_of_a_key_is_published(archive: Path, keys: Keys, tmp_path: Path) -> None:
    both = tmp_path / "both.pem"
    both.write_text(keys["ours"].read_text() + keys["ours.pub"].read_text())
    make_index(archive.parent, both)
    assert (archive.parent / "release.pub").read_text() == keys["ours.pub"].read_text()


def test_index_refuses_what_does_not_belong(archive: Path, keys: Keys) -> None:
    folder = archive.parent
    other = folder / "notes.txt"
    other.write_text("x")
    with pytest.raises(ArchiveError, match=r"files of no release: notes.txt"):
        make_index(folder, keys["ours.pub"])
    other.unlink()
    Path(f"{archive}.sha256").unlink()
    with pytest.raises(ArchiveError, match="cannot be read"):
        make_index(folder, keys["ours.pub"])


def test_index_refuses_a_stale_artifact(archive: Path, keys: Keys, tmp_path: Path) -> None:
    """Another version's archive, slipped into the folder under its own or under the new name."""
    (tmp_path / "old").mkdir()
    old_tree = make_tree(
        tmp_path / "old" / "tree", extra={"lib/old.so": (tmp_path / "tree/lib/libdep.so.1").read_bytes()}
    )
    manifest = make_manifest_without_itself(old_tree) | {"version": "1.2.2"}
    manifest["source"]["tag"] = "v1.2.2"
    old = write_archive(old_tree, archive_name("1.2.2", ARTIFACT, "tar.gz"), tmp_path / "old", epoch=EPOCH)
    stale = verified(manifest, sha256_file(old), old.name, old.stat().st_size)
    provenance.write_envelope(provenance.statement(stale, old, epoch=EPOCH), old, keys["ours"])
    for suffix in ("", ".sha256", ".provenance.json"):
        shutil.copy(f"{old}{suffix}", archive.parent / f"{old.name}{suffix}")
    with pytest.raises(ArchiveError, match="mixes releases"):
        make_index(archive.parent, keys["ours.pub"])
    for suffix in ("", ".sha256", ".provenance.json"):
        (archive.parent / f"{old.name}{suffix}").rename(f"{archive}{suffix}")
    with pytest.raises(ArchiveError, match="says"):
        make_index(archive.parent, keys["ours.pub"])


def test_a_renamed_archive(archive: Path, keys: Keys) -> None:
    """Under the name of another version, or of another tuple, with a checksum that fits the new name."""
    for name in (
        str(archive_name("1.2.4", ARTIFACT, "tar.gz")),
        str(archive_name("1.2.3", ARTIFACT[:-3] + "cuda", "tar.gz")),
    ):
        for path in archive.parent.iterdir():
            path.rename(path.with_name(path.name.replace(archive.name, name)))
        archive = archive.with_name(name)
        Path(f"{archive}.sha256").write_text(f"{sha256_file(archive)}  {name}\n")
        with pytest.raises(SignatureError, match=r"provenance\.json is about"):
            make_index(archive.parent, keys["ours.pub"])
        done = stranger(archive, "--key", keys["ours.pub"])
        assert done.returncode == 1 and "the provenance is about another archive" in done.stderr


def test_index_refuses_unverified_and_blocked(archive: Path, keys: Keys) -> None:
    found = provenance.manifest_of(provenance.read_envelope(archive, None))
    for change, complaint in (({"archive": None}, "not valid"), ({"evidence": None}, "not valid")):
        content = provenance.statement(found | change, archive, epoch=EPOCH)
        provenance.write_envelope(content, archive, keys["ours"])
        with pytest.raises(ManifestError, match=complaint):
            make_index(archive.parent, keys["ours.pub"])
    tree = archive.parent.parent / "tree"
    provenance.write_envelope(
        provenance.statement(make_manifest_without_itself(tree), archive, epoch=EPOCH), archive, keys["ours"]
    )
    with pytest.raises(ManifestError, match="was not verified"):
        make_index(archive.parent, keys["ours.pub"])


@pytest.mark.parametrize(
    "artifact_id", [item.artifact_id for item in load_matrix().tuples if item.state != "buildable"]
)
def test_a_closed_tuple_is_not_indexed(artifact_id: str, archive: Path, keys: Keys) -> None:
    item = load_matrix().find(artifact_id)
    name = archive.parent / str(archive_name("1.2.3", artifact_id, item.archive_format))
    for suffix in (".provenance.json", ""):
        Path(f"{archive}{suffix}").rename(f"{name}{suffix}")
    Path(f"{archive}.sha256").unlink()
    Path(f"{name}.sha256").write_text(f"{sha256_file(name)}  {name.name}\n")
    with pytest.raises(MatrixError, match=f"{artifact_id} cannot be indexed"):
        make_index(archive.parent, keys["ours.pub"])


def stranger(archive: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-I",
        "-S",
        str(ROOT / "release" / "verify_archive.py"),
        str(archive),
        *map(str, arguments),
    ]
    return subprocess.run(command, capture_output=True, text=True, cwd="/", timeout=120)


def test_a_stranger_checks_it(archive: Path, keys: Keys) -> None:
    done = stranger(archive, "--key", keys["ours.pub"])
    assert done.returncode == 0, done.stderr
    assert "signature: ok" in done.stdout and "channel: stable" in done.stdout
    done = stranger(archive, "--unsigned")
    assert done.returncode == 0 and "signature: NOT CHECKED" in done.stdout
    assert stranger(archive).returncode == 2


def _another_key(archive: Path, keys: Keys) -> None:
    keys["ours.pub"] = keys["theirs.pub"]


def _changed(archive: Path, keys: Keys) -> None:
    archive.write_bytes(archive.read_bytes() + b"\0")


def _changed_with_checksum(archive: Path, keys: Keys) -> None:
    _changed(archive, keys)
    Path(f"{archive}.sha256").write_text(f"{sha256_file(archive)}  {archive.name}\n")


def _repacked(archive: Path, keys: Keys) -> None:
    """Another tree, with provenance of its own digest but the manifest of the first one."""
    manifest = provenance.manifest_of(provenance.read_envelope(archive, None))
    tree = archive.parent.parent / "tree"
    (tree / "LICENSE").write_text("other\n")
    write_manifest(tree)
    write_archive(tree, archive_name("1.2.3", ARTIFACT, "tar.gz"), archive.parent, epoch=EPOCH)
    provenance.write_envelope(provenance.statement(manifest, archive, epoch=EPOCH), archive, keys["ours"])


def _renamed(archive: Path, keys: Keys) -> None:
    manifest = provenance.manifest_of(provenance.read_envelope(archive, None)) | {"version": "1.2.4"}
    provenance.write_envelope(provenance.statement(manifest, archive, epoch=EPOCH), archive, keys["ours"])


@pytest.mark.parametrize(
    ("attack", "complaint"),
    [
        (_another_key, "not signed by the key"),
        (_changed, "its SHA-256 is"),
        (_changed_with_checksum, "about another archive"),
        (_repacked, "is not as signed"),
        (_renamed, "it was renamed"),
    ],
)
def test_a_stranger_sees_an_attack(
    attack: Callable[[Path, Keys], None], complaint: str, archive: Path, keys: Keys
) -> None:
    mine = dict(keys)
    attack(archive, mine)
    done = stranger(archive, "--key", mine["ours.pub"])
    assert done.returncode == 1 and "NOT VALID" in done.stderr and complaint in done.stderr


def test_a_stranger_is_told_what_could_not_be_checked(archive: Path, tmp_path: Path, keys: Keys) -> None:
    no_key = tmp_path / "words.pub"
    no_key.write_text("words\n")
    for key in (tmp_path / "none.pub", no_key, keys["ours"]):
        done = stranger(archive, "--key", key)
        assert done.returncode == 1 and "not signed" not in done.stderr
        assert f"openssl could not check the signature with the key {key}: Could not " in done.stderr
    Path(f"{archive}.provenance.json").write_text("{}")
    done = stranger(archive, "--unsigned")
    assert done.returncode == 1 and "a field that must be in the provenance or a list is not: 'payload'" in done.stderr


@pytest.fixture
def fresh(archive: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The archive as `release build` leaves it: provenance without evidence; and an allowlist that fits."""
    tree = tmp_path / "tree"
    paths = {entry["path"] for entry in tree_files(tree)} | {"manifest.json"}
    monkeypatch.setattr(verify_module, "allowed_paths", lambda *_: paths)
    content = provenance.statement(make_manifest_without_itself(tree), archive, epoch=EPOCH)
    provenance.write_envelope(content, archive, keys["ours"])

    class NoRuns:
        def __init__(self, *_: Any) -> None: ...

        def results(self, model: Path | None) -> list[GateResult]:
            return []

    monkeypatch.setattr(verify_module, "Runner", NoRuns)
    return archive


def test_files_that_are_named_must_be_there(
    fresh: Path, keys: Keys, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["all", "linux-x86_64-glibc-cpu", "--evidence", str(tmp_path / "evidence"), "--model", "/none.gguf"]
    with pytest.raises(SystemExit):
        main(arguments)
    assert "argument --model: there is no file /none.gguf" in capsys.readouterr().err
    assert main(["attest", str(fresh), "--evidence", str(tmp_path), "--key", str(keys["ours"])]) == 1
    assert "holds no release-manifest.json; `python -m release verify` writes it there" in capsys.readouterr().err


def test_verify_writes_evidence_that_attest_signs(fresh: Path, keys: Keys, tmp_path: Path) -> None:
    evidence = tmp_path / "evidence"
    manifest = verify(fresh, VerifyOptions(evidence, public_key=keys["ours.pub"]))
    states = {name: entry["state"] for name, entry in manifest["evidence"].items()}
    assert states["dependency_audit_verified"] == states["build_verified"] == states["tag_rerun_verified"] == "verified"
    assert states["archive_smoke_verified"] == states["runtime_verified"] == "not_verified"
    assert states["performance_verified"] == "absent"
    assert manifest["channel"]["name"] == "blocked"
    attest(fresh, evidence, keys["ours"])
    found = provenance.manifest_of(provenance.read_envelope(fresh, keys["ours.pub"]))
    assert found == json.loads((evidence / "release-manifest.json").read_text())
    with pytest.raises(ManifestError, match="is blocked"):
        make_index(fresh.parent, keys["ours.pub"])


def test_attest_refuses_evidence_about_other_bytes(fresh: Path, keys: Keys, tmp_path: Path) -> None:
    evidence = tmp_path / "evidence"
    verify(fresh, VerifyOptions(evidence))
    fresh.write_bytes(fresh.read_bytes() + b"\0")
    Path(f"{fresh}.sha256").write_text(f"{sha256_file(fresh)}  {fresh.name}\n")
    with pytest.raises(SignatureError, match="is not about"):
        attest(fresh, evidence, keys["ours"])


def test_a_failed_gate_stays_failed(fresh: Path, keys: Keys, tmp_path: Path) -> None:
    """A signature by another key fails the gate "build"; nothing is started, and nothing that did not run is true."""
    manifest = verify(fresh, VerifyOptions(tmp_path / "evidence", public_key=keys["theirs.pub"]))
    assert manifest["evidence"]["build_verified"]["state"] == "failed"
    assert "not signed by the key" in manifest["evidence"]["build_verified"]["reason"]
    assert manifest["evidence"]["runtime_verified"]["value"] is False


def test_results_of_another_archive_do_not_count(fresh: Path, tmp_path: Path) -> None:
    evidence = tmp_path / "evidence"
    evidence.mkdir()
    for digest, state in (("e" * 64, "absent"), (sha256_file(fresh), "verified")):
        result = GateResult("rebuild", "passed", "rebuild", archive_sha256=digest)
        (evidence / "rebuild.json").write_bytes(result.report())
        manifest = verify(fresh, VerifyOptions(evidence))
        assert manifest["evidence"]["rebuild_reproducible"]["state"] == state


def test_contradicting_evidence_is_not_written(fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_module, "compute_channel", lambda *_: {"name": "stable", "reasons": []})
    with pytest.raises(GateError, match="channel is stable"):
        verify(fresh, VerifyOptions(tmp_path / "evidence"))
    assert not (tmp_path / "evidence" / "release-manifest.json").exists()


def test_everything_in_one_command(fresh: Path, keys: Keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps in their order, with a key made for the occasion; what is blocked is signed, but gets no index."""
    folders = []

    def built(artifact_id: str, options: BuildOptions) -> Path:
        folders.append(options.work.name)
        assert options.key is not None and options.key.stat().st_mode & 0o77 == 0
        provenance.write_envelope(provenance.read_envelope(fresh, None), fresh, options.key)
        return fresh

    monkeypatch.setattr(pipeline, "build", built)
    monkeypatch.setattr(pipeline, "rebuild", lambda _, options, *__, **___: folders.append(options.work.name))
    options = BuildOptions("release", fresh.parent, tmp_path / "work")
    with pytest.raises(ManifestError, match="is blocked"):
        pipeline.release_all(ARTIFACT, options, tmp_path / "evidence", None)
    assert folders == ["first", "second"]
    assert provenance.read_envelope(fresh, tmp_path / "evidence" / "release.pub")
    published = [path for folder in (fresh.parent, tmp_path / "evidence") for path in folder.iterdir()]
    assert not [path for path in published if b"PRIVATE KEY" in path.read_bytes()]
    failed = {"evidence": {"runtime_verified": {"state": "failed", "reason": "it fell over"}}}
    monkeypatch.setattr(pipeline, "verify", lambda *_: failed)
    with pytest.raises(GateError, match="runtime_verified: it fell over"):
        pipeline.release_all(ARTIFACT, options, tmp_path / "evidence", None)
