"""`python -m release COMMAND`: build, verify, rebuild, attest, index. The workflows run the same commands."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from pathlib import Path
from typing import TypeAlias

from .build import RECIPES, BuildOptions, build
from .cross import cross
from .environment import DEFAULT_PYTHON
from .errors import ReleaseError
from .index import check_index, make_index
from .manifest import check_manifest
from .matrix import load_matrix
from .notes import render
from .oci import write_image
from .performance import measure
from .pipeline import release_all
from .plan import plan
from .rebuild import rebuild
from .root import ensure_root
from .source import read_source
from .verify import VerifyOptions, attest, verify

_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def main(arguments: list[str] | None = None) -> int:
    """0 if everything that was asked for holds; 1 with one message if something does not."""
    args = _parser().parse_args(arguments)
    try:
        return int(args.run(args))
    except ReleaseError as error:
        print(f"release: error: {error}", file=sys.stderr)
        return 1


def _end(number: int, frame: object) -> None:
    """Leave as after ^C: temporary folders are removed, programs that run are ended."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def _root(args: argparse.Namespace) -> int:
    print(ensure_root())
    return 0


def _build(args: argparse.Namespace) -> int:
    with _work_folder(args) as work:
        print(build(args.artifact_id, _options(args, Path(work))))
    return 0


def _rebuild(args: argparse.Namespace) -> int:
    with _work_folder(args) as work:
        result = rebuild(args.archive, _options(args, Path(work)), args.evidence, cached_cuda=args.cached_cuda)
    print(f"{args.archive.name}: the second build is byte-identical{f'; {result.reason}' if result.reason else ''}")
    return 0


def _all(args: argparse.Namespace) -> int:
    with _work_folder(args) as work:
        options = _options(args, Path(work))
        manifest = release_all(args.artifact_id, options, args.evidence, args.model, cached_cuda=args.cached_cuda)
    print(f"{manifest['archive']['name']}: {manifest['channel']['name']}, {manifest['archive']['sha256']}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    options = VerifyOptions(args.evidence, args.model, args.key, tuple(args.forbid))
    manifest = verify(args.archive, options)
    for name, entry in manifest["evidence"].items():
        print(f"{name:30} {entry['state']}{'' if entry['value'] else ': ' + entry['reason']}")
    parts = [*manifest["cpu_tiers"], *manifest["sms"]]
    for part in parts:
        states = ", ".join(f"{name.partition('_')[0]} {entry['state']}" for name, entry in part["evidence"].items())
        print(f"{'tier' if part in manifest['cpu_tiers'] else 'SM  '} {part['name']:25} {states}")
    channel = manifest["channel"]
    print(f"channel: {channel['name']}")
    failed = [entry["reason"] for entry in manifest["evidence"].values() if entry["state"] == "failed"]
    failed += [entry["reason"] for part in parts for entry in part["evidence"].values() if entry["state"] == "failed"]
    for reason in failed:
        print(f"failed: {reason}", file=sys.stderr)
    order = ("blocked", "preview", "stable")
    return 1 if failed or order.index(channel["name"]) < order.index(args.at_least) else 0


def _attest(args: argparse.Namespace) -> int:
    attest(args.archive, args.evidence, args.key)
    return 0


def _index(args: argparse.Namespace) -> int:
    if args.check:
        check_index(args.folder, args.key)
    else:
        make_index(args.folder, args.key)
    return 0


def _performance(args: argparse.Namespace) -> int:
    result = measure(args.archive, args.evidence, args.compare)
    print(f"{result.gate}: {result.state}{f': {result.reason}' if result.reason else ''}")
    return 0 if result.state == "passed" else 1


def _cross(args: argparse.Namespace) -> int:
    print(cross(args.artifact_id, args.out, args.evidence).state)
    return 0


def _notes(args: argparse.Namespace) -> int:
    text = render(
        args.template.read_text(encoding="utf-8"), args.folder, read_source().version, args.key, args.evidence
    )
    args.out.write_text(text, encoding="utf-8")
    return 0


def _oci(args: argparse.Namespace) -> int:
    print(write_image(args.archive, args.out))
    return 0


def _check_manifest(args: argparse.Namespace) -> int:
    check_manifest(json.loads(args.manifest.read_text(encoding="utf-8")), load_matrix())
    return 0


def _plan(args: argparse.Namespace) -> int:
    print(json.dumps(plan(args.tag), indent=1))
    return 0


def _options(args: argparse.Namespace, work: Path) -> BuildOptions:
    return BuildOptions(
        args.recipe,
        args.out.absolute(),
        work,
        args.wheel and args.wheel.absolute(),
        args.python,
        args.key,
        getattr(args, "fresh_cuda", False),
    )


def _work_folder(args: argparse.Namespace) -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="trivet-release-", dir=args.work)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m release", description="Build, verify, sign and index release archives."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("plan", help="what a tag would release; refuses a tag that is not the version")
    command.add_argument("tag", nargs="?", help="like v1.2.3 (default: a dry run)")
    command.set_defaults(run=_plan)
    _add_building(commands)
    _add_judging(commands)
    _add_publishing(commands)
    return parser


def _file(text: str) -> Path:
    """A file that must be there before anything begins: some commands would need it hours later."""
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text}")
    return path


def _add_building(commands: _Commands) -> None:
    building = argparse.ArgumentParser(add_help=False)
    building.add_argument(
        "--recipe",
        choices=RECIPES,
        default="quick",
        help="release builds in a root of its own, for old systems and CPUs",
    )
    building.add_argument("--out", type=Path, default=Path("dist"), help="folder of the result (default: dist)")
    building.add_argument("--work", type=Path, help="where the temporary folder is made")
    building.add_argument("--wheel", type=_file, help="quick: trivet's wheel (default: built from a copy of the tree)")
    building.add_argument(
        "--python", type=Path, default=DEFAULT_PYTHON, help="quick: interpreter to bundle (default: %(default)s)"
    )
    building.add_argument("--key", type=_file, help="PEM file of the Ed25519 key that signs the provenance")
    command = commands.add_parser("root", help="make the root of the release recipe, or find it in the cache")
    command.set_defaults(run=_root)
    command = commands.add_parser("build", parents=[building], help="build one archive")
    command.add_argument("artifact_id")
    command.add_argument(
        "--fresh-cuda", action="store_true", help="compile the CUDA library now, whatever the cache holds"
    )
    command.set_defaults(run=_build)
    twice = argparse.ArgumentParser(add_help=False)
    twice.add_argument(
        "--cached-cuda",
        action="store_true",
        help="take the CUDA library of the second build from the cache; the rebuild then counts as not done",
    )
    command = commands.add_parser(
        "all", parents=[building, twice], help="build twice, verify, sign and index one archive"
    )
    command.add_argument("artifact_id")
    command.add_argument(
        "--evidence", type=Path, required=True, help="folder for reports and the public key, release.pub"
    )
    command.add_argument("--model", type=_file, help="as for verify")
    command.set_defaults(run=_all)
    command = commands.add_parser("cross", help="build and audit the op library of a system that has no archive")
    command.add_argument("artifact_id")
    command.add_argument("--out", type=Path, required=True)
    command.add_argument("--evidence", type=Path, required=True)
    command.set_defaults(run=_cross)
    command = commands.add_parser("rebuild", parents=[building, twice], help="build again elsewhere and compare")
    command.add_argument("archive", type=Path)
    command.add_argument("--evidence", type=Path, required=True, help="folder for the result")
    command.set_defaults(run=_rebuild)


def _add_judging(commands: _Commands) -> None:
    command = commands.add_parser("verify", help="judge an archive by its own bytes")
    command.add_argument("archive", type=Path)
    command.add_argument(
        "--evidence", type=Path, required=True, help="folder for reports and the manifest with evidence"
    )
    command.add_argument(
        "--model", type=_file, help="SmolLM2 GGUF file of release/references; without it nothing is run"
    )
    command.add_argument("--key", type=_file, help="PEM file of the public key that must have signed the provenance")
    command.add_argument(
        "--forbid", action="append", default=[], help="path prefix that no file may hold; may be repeated"
    )
    command.add_argument(
        "--at-least", choices=("blocked", "preview", "stable"), default="preview", help="fail below this channel"
    )
    command.set_defaults(run=_verify)
    command = commands.add_parser(
        "performance", help="measure the archive's op library beside peers (bench/compare.py)"
    )
    command.add_argument("archive", type=Path)
    command.add_argument("--evidence", type=Path, required=True)
    command.add_argument("compare", nargs="+", help="arguments of bench/compare.py, after --")
    command.set_defaults(run=_performance)
    command = commands.add_parser("check-manifest", help="check a manifest file")
    command.add_argument("manifest", type=_file)
    command.set_defaults(run=_check_manifest)


def _add_publishing(commands: _Commands) -> None:
    command = commands.add_parser("attest", help="sign provenance that carries the evidence")
    command.add_argument("archive", type=Path)
    command.add_argument("--evidence", type=Path, required=True)
    command.add_argument("--key", type=_file, required=True, help="PEM file of the private key")
    command.set_defaults(run=_attest)
    command = commands.add_parser("index", help="write index.json and index.html of a folder of attested archives")
    command.add_argument("folder", type=Path)
    command.add_argument("--key", type=_file, required=True, help="PEM file of the public key")
    command.add_argument("--check", action="store_true", help="compare instead of writing")
    command.set_defaults(run=_index)
    command = commands.add_parser("notes", help="write release notes with figures of attested archives alone")
    command.add_argument("template", type=_file, help="like release/notes.md")
    command.add_argument("--folder", type=Path, required=True, help="folder of the attested archives")
    command.add_argument("--key", type=_file, required=True, help="PEM file of the public key")
    command.add_argument("--evidence", type=Path, help="folder with competitor.json, for throughputs")
    command.add_argument("--out", type=Path, required=True)
    command.set_defaults(run=_notes)
    command = commands.add_parser("oci", help="write an OCI image layout of a CPU archive")
    command.add_argument("archive", type=Path)
    command.add_argument("--out", type=Path, required=True, help="new folder for the layout")
    command.set_defaults(run=_oci)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)
    sys.exit(main())
