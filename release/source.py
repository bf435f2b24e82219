"""Facts about the source tree that an archive is built from."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from .errors import BuildError
from .process import run

ROOT = Path(__file__).resolve().parent.parent
_VERSION_FILE = ROOT / "packaging" / "python" / "trivet" / "__init__.py"
_ABI_FILE = ROOT / "backends" / "contract" / "manifest.py"
# In a copy of the tree, which git knows nothing about: what git said about the checkout.
_FACTS_FILE = ".source.json"


@dataclass(frozen=True, slots=True)
class Source:
    version: str  # of the package
    abi_version: int  # of the package format that it reads
    commit: str  # 40 hex digits
    tag: str | None  # the tag v<version> if it points at the commit
    clean_tree: bool  # nothing changed and nothing untracked
    epoch: int  # time of the commit: the date of everything in the archive


def read_source() -> Source:
    """Ask git, or in a copy the facts that `copy_source` left; BuildError outside of both."""
    if (ROOT / _FACTS_FILE).is_file():
        return Source(**json.loads((ROOT / _FACTS_FILE).read_text(encoding="utf-8")))
    version = str(_constant(_VERSION_FILE, "__version__"))
    tags = _git("tag", "--points-at", "HEAD").split()
    return Source(
        version=version,
        abi_version=int(str(_constant(_ABI_FILE, "SCHEMA_VERSION"))),
        commit=_git("rev-parse", "HEAD").strip(),
        tag=f"v{version}" if f"v{version}" in tags else None,
        clean_tree=not _git("status", "--porcelain", "--untracked-files=all").strip(),
        epoch=int(_git("log", "-1", "--format=%ct")),
    )


def refuse_in_tree(folder: Path) -> None:
    """BuildError for a folder of results in the checkout that git does not ignore; no later build would be clean."""
    if not folder.absolute().is_relative_to(ROOT):
        return
    try:
        _git("check-ignore", "--quiet", f"{folder.absolute()}/any")
    except BuildError as error:
        raise BuildError(f"{folder} is in the source tree; results go to dist, evidence or outside of it") from error


def copy_source(target: Path) -> None:
    """Copy what git tracks or would track, as it lies in the working tree; links of the checkout stay out."""
    for name in _file_names():
        path = ROOT / name
        if path.is_file() and not path.is_symlink():
            copy = target / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
            copy.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)
    (target / _FACTS_FILE).write_text(json.dumps(asdict(read_source())), encoding="utf-8")


def _file_names() -> Iterator[str]:
    if not (ROOT / _FACTS_FILE).is_file():
        names = _git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
        yield from (name for name in names if name)
        return
    for path in sorted(ROOT.rglob("*")):
        name = path.relative_to(ROOT)
        if name.as_posix() != _FACTS_FILE and "__pycache__" not in name.parts:
            yield name.as_posix()


def _git(*arguments: str) -> str:
    return run(["git", "-C", ROOT, *arguments])


def _constant(path: Path, name: str) -> object:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if [ast.unparse(target) for target in targets] == [name]:
            return ast.literal_eval(node.value)
    raise BuildError(f"{path}: no constant {name}")
