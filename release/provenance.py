"""Provenance: an in-toto statement with the SLSA v1 predicate over the final archive, in a DSSE envelope.

Signatures are Ed25519, made and checked by the `openssl` program; the key comes from the caller and is never kept.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .archive import sha256_file
from .errors import SignatureError
from .manifest import to_bytes
from .names import PROJECT, PROVENANCE_SUFFIX

PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "urn:trivet:release:pyinstaller-one-dir:v1"


def statement(manifest: Mapping[str, Any], archive: Path, *, epoch: int) -> dict[str, Any]:
    """What was built from what. The manifest travels inside as a by-product, with evidence once there is some."""
    digest = sha256_file(archive)
    build, source = manifest["build"], manifest["source"]
    body = to_bytes(manifest)
    return {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": archive.name, "digest": {"sha256": digest}}],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {
                    "artifact_id": manifest["artifact_id"],
                    "version": manifest["version"],
                    "recipe": build["recipe"],
                    "tag": source["tag"],
                },
                "internalParameters": {
                    "SOURCE_DATE_EPOCH": str(epoch),
                    "PYTHONHASHSEED": "0",
                    "toolchain": build["toolchain"],
                    "inputs_sha256": build["inputs_sha256"],
                },
                "resolvedDependencies": [
                    {"uri": f"git+urn:{PROJECT}", "digest": {"gitCommit": source["commit"]}},
                    *({"uri": f"pkg:pypi/{item['name'].lower()}@{item['version']}"} for item in build["dependencies"]),
                ],
            },
            "runDetails": {
                "builder": {"id": f"urn:{PROJECT}:release:local"},
                "metadata": {"startedOn": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(epoch))},
                "byproducts": [
                    {
                        "name": "release-manifest.json",
                        "digest": {"sha256": hashlib.sha256(body).hexdigest()},
                        "content": base64.b64encode(body).decode(),
                    }
                ],
            },
        },
    }


def manifest_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest inside a statement; SignatureError if it is not the one whose digest is stated."""
    (product,) = found["predicate"]["runDetails"]["byproducts"]
    body = base64.b64decode(product["content"])
    if hashlib.sha256(body).hexdigest() != product["digest"]["sha256"]:
        raise SignatureError("the manifest inside the provenance does not have the digest that is stated")
    manifest: dict[str, Any] = json.loads(body)
    return manifest


def write_envelope(content: Mapping[str, Any], archive: Path, key: Path | None) -> Path:
    """Write <archive>.provenance.json; without a key there is no signature, and no verifier takes it as signed."""
    payload = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    signatures = []
    if key is not None:
        signature = _openssl("pkeyutl", "-sign", "-inkey", str(key), "-rawin", data=pre_authentication(payload))
        signatures.append({"keyid": key_id(key, private=True), "sig": base64.b64encode(signature).decode()})
    envelope = {
        "payloadType": PAYLOAD_TYPE,
        "payload": base64.b64encode(payload).decode(),
        "signatures": signatures,
    }
    target = Path(f"{archive}{PROVENANCE_SUFFIX}")
    target.write_text(json.dumps(envelope, indent=1) + "\n", encoding="ascii")
    return target


def read_envelope(archive: Path, public_key: Path | None) -> dict[str, Any]:
    """The statement beside `archive` if it is about these bytes and, with a key, signed by it; else SignatureError."""
    path = Path(f"{archive}{PROVENANCE_SUFFIX}")
    try:
        envelope = json.loads(path.read_text(encoding="utf-8"))
        payload = base64.b64decode(envelope["payload"], validate=True)
        content: dict[str, Any] = json.loads(payload)
        subject = content["subject"]
        kinds = (envelope["payloadType"], content["_type"], content["predicateType"])
        signatures = [base64.b64decode(entry["sig"], validate=True) for entry in envelope["signatures"]]
    except (OSError, ValueError, KeyError, TypeError, binascii.Error) as error:
        raise SignatureError(f"{path.name} is no provenance envelope: {type(error).__name__}: {error}") from error
    if kinds != (PAYLOAD_TYPE, STATEMENT_TYPE, PREDICATE_TYPE):
        raise SignatureError(f"{path.name} is of the kinds {', '.join(kinds)}")
    if public_key is not None and not any(_is_signed(payload, entry, public_key) for entry in signatures):
        raise SignatureError(f"{path.name} is not signed by the key {public_key.name}")
    expected = [{"name": archive.name, "digest": {"sha256": sha256_file(archive)}}]
    if subject != expected:
        raise SignatureError(f"{path.name} is about {subject}, the archive is {expected}")
    return content


def pre_authentication(payload: bytes) -> bytes:
    """The bytes that DSSE signs."""
    kind = PAYLOAD_TYPE.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def key_id(key: Path, *, private: bool) -> str:
    """SHA-256 of the public key."""
    arguments = ["pkey", "-in", str(key), *(["-pubout"] if private else ["-pubin", "-pubout"]), "-outform", "DER"]
    return hashlib.sha256(_openssl(*arguments)).hexdigest()


def _is_signed(payload: bytes, signature: bytes, public_key: Path) -> bool:
    with tempfile.NamedTemporaryFile() as file:
        file.write(signature)
        file.flush()
        arguments = ["pkeyutl", "-verify", "-pubin", "-inkey", str(public_key), "-rawin", "-sigfile", file.name]
        try:
            _openssl(*arguments, data=pre_authentication(payload))
        except SignatureError:
            return False
    return True


def _openssl(*arguments: str, data: bytes | None = None) -> bytes:
    # -rawin needs a file: Ed25519 signs all of the message at once.
    with tempfile.NamedTemporaryFile() as file:
        words = ["openssl", *arguments]
        if data is not None:
            file.write(data)
            file.flush()
            words += ["-in", file.name]
        try:
            done = subprocess.run(words, capture_output=True, check=False, timeout=60)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SignatureError(f"openssl could not be run: {error}") from error
    if done.returncode != 0:
        raise SignatureError(f"openssl {arguments[0]} failed: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout
