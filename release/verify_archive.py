#!/usr/bin/env python3
"""Check a trivet release archive, offline. One file: it needs Python 3.8 or newer, and `openssl` 3 or newer for
the signature.

    python3 verify_archive.py ARCHIVE --key release.pub      everything
    python3 verify_archive.py ARCHIVE --unsigned             everything but who signed it

ARCHIVE.sha256 and ARCHIVE.provenance.json lie beside the archive. Use the key of an earlier download if you have one: a
key that came with a changed archive proves nothing. Checked: the checksum; the signature and that it is about these
bytes; every file in the archive against the manifest that was signed; both SBOMs against every file. The exit status is
0 only if all holds.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

PAYLOAD_TYPE = b"application/vnd.in-toto+json"
UNDESCRIBED = {"manifest.json", "sbom.cdx.json", "sbom.spdx.json"}  # would have to hold their own digest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path)
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--key", type=Path, help="public key (PEM)")
    choice.add_argument("--unsigned", action="store_true", help="do not ask who signed it")
    args = parser.parse_args()
    try:
        lines = check(args.archive, args.key)
    except KeyError as error:
        sys.exit(f"NOT VALID: {args.archive.name}: a field that must be in the provenance or a list is not: {error}")
    except (OSError, ValueError, TypeError, tarfile.TarError) as error:
        sys.exit(f"NOT VALID: {args.archive.name}: {error}")
    print("\n".join(lines))


def check(archive: Path, key: Path | None) -> list[str]:
    """What holds, as lines; ValueError for the first thing that does not."""
    digest = sha256(archive.read_bytes())
    if Path(f"{archive}.sha256").read_text().split() != [digest, archive.name]:
        raise ValueError(f"its SHA-256 is {digest}, the .sha256 file says something else")
    statement = read_statement(archive, key)
    if statement["subject"] != [{"name": archive.name, "digest": {"sha256": digest}}]:
        raise ValueError("the provenance is about another archive")
    (product,) = statement["predicate"]["runDetails"]["byproducts"]
    body = base64.b64decode(product["content"])
    if sha256(body) != product["digest"]["sha256"]:
        raise ValueError("the manifest inside the provenance was changed")
    signed = json.loads(body)
    num_files = check_files(archive, signed)
    out = ["checksum: ok", "signature: ok" if key else "signature: NOT CHECKED"]
    out.append(f"files: {num_files}, all as signed; both SBOMs describe them")
    out.append(f"channel: {signed['channel']['name']}")
    out += [f"  not better: {reason}" for reason in signed["channel"]["reasons"]]
    return out


def read_statement(archive: Path, key: Path | None) -> Any:
    envelope = json.loads(Path(f"{archive}.provenance.json").read_text())
    payload = base64.b64decode(envelope["payload"], validate=True)
    if envelope["payloadType"].encode() != PAYLOAD_TYPE:
        raise ValueError("the provenance is of another type")
    if key is not None:
        message = b"DSSEv1 %d %s %d %s" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE, len(payload), payload)
        if not any(is_signed(message, base64.b64decode(entry["sig"]), key) for entry in envelope["signatures"]):
            raise ValueError(f"the provenance is not signed by the key {key}")
    return json.loads(payload)


def is_signed(message: bytes, signature: bytes, key: Path) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        names = [Path(folder, "message"), Path(folder, "signature")]
        names[0].write_bytes(message)
        names[1].write_bytes(signature)
        command = ["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", str(key), "-rawin"]
        command += ["-in", str(names[0]), "-sigfile", str(names[1])]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode != 0 and b"Verification Failure" not in done.stdout:  # no key, or not an openssl 3
        reason = done.stdout.decode(errors="replace").strip().splitlines()
        raise ValueError(f"openssl could not check the signature with the key {key}: {reason[0] if reason else '?'}")
    return done.returncode == 0


def check_files(archive: Path, signed: dict[str, Any]) -> int:
    """Compare the archive, entry by entry, with the list of the signed manifest; nothing is unpacked."""
    top = f"{signed['project']}-{signed['version']}-{signed['artifact_id']}/"
    if archive.name != top[:-1] + ".tar.gz":
        raise ValueError(f"it was renamed: what is signed is {top[:-1]}.tar.gz")
    listed = {entry["path"]: entry for entry in signed["files"]}
    papers: dict[str, bytes] = {}
    digests: dict[str, str] = {}
    seen: set[str] = set()
    with tarfile.open(str(archive), "r:gz") as tar:
        for entry in tar:
            if entry.isdir():
                continue
            path = entry.name[len(top) :]
            if not entry.name.startswith(top) or ".." in path.split("/") or path in seen:
                raise ValueError(f"it holds {entry.name}, outside of {top} or twice")
            seen.add(path)
            if path == "manifest.json":
                papers[path] = content(tar, entry)
                continue
            if path not in listed:
                raise ValueError(f"it holds {path}, which was not signed")
            if "link" in listed[path]:
                same = entry.issym() and entry.linkname == listed[path]["link"]
            else:
                data = content(tar, entry)
                digests[path] = sha256(data)
                same = entry.isreg() and [digests[path], f"{entry.mode:04o}"] == [
                    listed[path][k] for k in ("sha256", "mode")
                ]
                if path in UNDESCRIBED:
                    papers[path] = data
            if not same:
                raise ValueError(f"{path} is not as signed")
    if set(listed) - seen or set(papers) != UNDESCRIBED:
        raise ValueError(f"files are missing: {', '.join(sorted((set(listed) | UNDESCRIBED) - seen))}")
    check_papers(papers, digests, signed)
    return len(seen)


def content(tar: tarfile.TarFile, entry: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(entry) if entry.isreg() else None
    return file.read() if file is not None else b""


def check_papers(papers: dict[str, bytes], digests: dict[str, str], signed: dict[str, Any]) -> None:
    inside = json.loads(papers["manifest.json"])
    for field in ("project", "version", "artifact_id", "abi_version", "source", "build", "target", "package", "files"):
        if inside[field] != signed[field]:
            raise ValueError(f"manifest.json and the signed manifest differ in {field}")
    expected = {path: digest for path, digest in digests.items() if path not in UNDESCRIBED}
    cyclonedx = json.loads(papers["sbom.cdx.json"])
    nested = [item for component in cyclonedx["components"] for item in component.get("components", [])]
    described = {item["name"]: item["hashes"][0]["content"] for item in nested if item["type"] == "file"}
    if described != expected:
        raise ValueError("sbom.cdx.json does not describe exactly the files")
    spdx = json.loads(papers["sbom.spdx.json"])
    described = {
        item["fileName"][2:]: entry["checksumValue"]
        for item in spdx["files"]
        for entry in item["checksums"]
        if entry["algorithm"] == "SHA256"
    }
    if described != expected:
        raise ValueError("sbom.spdx.json does not describe exactly the files")


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


if __name__ == "__main__":
    main()
