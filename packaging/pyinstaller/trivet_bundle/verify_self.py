"""`trivet verify-self`: compare every file of the unpacked bundle with the list in its manifest."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

USAGE = """usage: trivet verify-self [--json]

Compare every file of this bundle with the list in manifest.json beside it: digest, size, mode, nothing missing and
nothing extra. It finds damage. It does not find an attacker, who changes the list too: check the archive for that."""


def verify_self(arguments: list[str]) -> int:
    """Print the result; 0 if nothing differs, 1 if something does, 2 for arguments that do not exist."""
    if arguments in (["--help"], ["-h"]):
        print(USAGE)
        return 0
    if arguments not in ([], ["--json"]):
        print(f"trivet: error: verify-self takes only --json, not {' '.join(arguments)}", file=sys.stderr)
        return 2
    root = Path(os.path.realpath(sys.executable)).parent
    try:
        manifest = json.loads((root / "manifest.json").read_text(encoding="utf-8"))
        found = problems(root, manifest["files"])
        name = f"{manifest['project']} {manifest['version']} {manifest['artifact_id']}"
    except (OSError, ValueError, KeyError) as error:
        print(
            f"trivet: error: {root / 'manifest.json'} cannot be read: {type(error).__name__}: {error}", file=sys.stderr
        )
        return 1
    if arguments == ["--json"]:
        print(json.dumps({"bundle": name, "num_files": len(manifest["files"]), "problems": found}))
    else:
        print("\n".join(found) if found else f"{name}: {len(manifest['files'])} files are as built")
    return 1 if found else 0


def problems(root: Path, files: list[dict[str, Any]]) -> list[str]:
    """How the tree under `root` differs from `files` (path, mode, size, sha256, or path and link)."""
    listed = {entry["path"]: entry for entry in files}
    out = []
    present = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_symlink() or not path.is_dir()}
    out += [f"not listed: {name}" for name in sorted(present - set(listed) - {"manifest.json"})]
    out += [f"missing: {name}" for name in sorted(set(listed) - present)]
    for name in sorted(present & set(listed)):
        if complaint := _difference(root / name, listed[name]):
            out.append(f"{complaint}: {name}")
    return out


def _difference(path: Path, entry: dict[str, Any]) -> str | None:
    status = path.lstat()
    if "link" in entry:
        return None if stat.S_ISLNK(status.st_mode) and os.readlink(path) == entry["link"] else "another link"
    if not stat.S_ISREG(status.st_mode):
        return "not a regular file"
    if status.st_size != entry["size"]:
        return f"{status.st_size} bytes instead of {entry['size']}"
    if bool(status.st_mode & 0o100) != (entry["mode"] == "0755"):
        return f"mode {status.st_mode & 0o777:04o} instead of {entry['mode']}"
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return None if digest == entry["sha256"] else "another digest"
