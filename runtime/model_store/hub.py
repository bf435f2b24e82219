"""Models of a Hugging Face hub, through huggingface_hub: commit first, config first, then the weights, resumable."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import digests, gguf_files, store
from .errors import AmbiguousModelError, DigestMismatchError, DownloadError, ModelNotFoundError
from .progress import Progress, folder_size, watch
from .reference import HubReference

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# What a checkpoint folder may need besides its weights; the configuration comes first.
_SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_SAFETENSORS = "safetensors"  # as QUANT: the safetensors checkpoint of a repository that holds GGUF files too


@dataclass(frozen=True, slots=True)
class _RemoteFile:
    name: str
    size_bytes: int | None
    sha256: str | None  # hex, as the hub states it; None for small files and for placeholders


@dataclass(frozen=True, slots=True)
class _Repository:
    """A repository at one commit."""

    repo_id: str
    commit: str
    files: dict[str, _RemoteFile]
    license: str | None


def pull(
    reference: HubReference, folder: Path, *, name: str, force: bool, progress: Progress | None
) -> store.StoredModel:
    """Fetch a model into the staging folder and install it; what an interrupted pull left there is resumed.

    The hub is asked for the commit first, and everything is fetched at that commit. A model that is stored at this
    commit is returned as it is unless `force`.
    """
    with _hub_errors(reference):
        repository = _look_up(reference)
        stored = store.find(str(reference))
        if stored is not None and stored.record.revision == repository.commit and not force:
            stored.check()
            return stored
        _drop_other_commit(folder, repository.commit)
        names, entry = _choose(reference, repository, folder)
        files = _fetch(repository, names, folder, progress)
    (folder / _COMMIT_NOTE).unlink()
    record = store.Record(
        name=name,
        reference=str(reference),
        revision=repository.commit,
        entry=entry,
        files=files,
        license=repository.license,
        pulled_at=store.utc_now(),
    )
    return store.install(folder, record)


_COMMIT_NOTE = ".commit"


def _drop_other_commit(folder: Path, commit: str) -> None:
    """Empty the staging folder unless it holds an interrupted pull of this very commit."""
    note = folder / _COMMIT_NOTE
    if not note.is_file() or note.read_text() != commit:
        shutil.rmtree(folder)
        folder.mkdir()
        note.write_text(commit)


def _hub() -> Any:
    """The huggingface_hub module, told to stay quiet: no telemetry, no bars of its own."""
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    try:
        import huggingface_hub
        import huggingface_hub.errors
        import huggingface_hub.file_download
        import huggingface_hub.utils
    except ImportError as error:
        raise DownloadError(
            f"hf: models need the huggingface_hub package, which cannot be imported ({error}); "
            "install it with `pip install huggingface_hub`, or give a path to a .gguf file"
        ) from error
    return huggingface_hub


def _look_up(reference: HubReference) -> _Repository:
    """Ask the hub which commit the reference means now, and which files it has."""
    info = _hub().HfApi(library_name="trivet").model_info(reference.repo_id, files_metadata=True)
    files = {}
    for sibling in info.siblings or []:
        sha256 = sibling.lfs.sha256 if sibling.lfs is not None else None
        if sha256 is not None and len(set(sha256)) == 1:
            sha256 = None  # hubs show a placeholder of one repeated character to readers without access
        files[sibling.rfilename] = _RemoteFile(sibling.rfilename, sibling.size, sha256)
    card = info.card_data
    license_name = card.get("license") if card is not None else None
    return _Repository(reference.repo_id, info.sha, files, license_name if isinstance(license_name, str) else None)


def _choose(reference: HubReference, repository: _Repository, folder: Path) -> tuple[list[str], str]:
    """The files to fetch, in order, and the one to load ("" = the folder)."""
    groups = gguf_files.group(repository.files)
    has_safetensors = _INDEX in repository.files or _SINGLE in repository.files
    origin = f"hf:{reference.repo_id}"
    if reference.quant is None and groups and has_safetensors:
        choices = ", ".join([_SAFETENSORS, *groups])
        raise AmbiguousModelError(f"{origin} holds several models; name one as {origin}:QUANT, of: {choices}")
    if reference.quant == _SAFETENSORS or (not groups and has_safetensors and reference.quant is None):
        if not has_safetensors:
            raise ModelNotFoundError(f"{origin} holds no {_SINGLE} and no {_INDEX}; it holds {', '.join(groups)}")
        return _safetensors_files(repository, folder), ""
    if not groups:
        if has_safetensors:
            raise ModelNotFoundError(f"{origin} holds no GGUF file that matches {reference.quant!r}, only safetensors")
        raise ModelNotFoundError(f"{origin} holds neither .gguf nor .safetensors weights")
    names = gguf_files.select(groups, reference.quant, origin)
    return names, names[0]


def _safetensors_files(repository: _Repository, folder: Path) -> list[str]:
    small = [name for name in _SMALL_FILES if name in repository.files]
    small += [name for name in repository.files if name.startswith("chat_templates/") and name.endswith(".jinja")]
    if "config.json" not in small:
        raise ModelNotFoundError(f"hf:{repository.repo_id} holds weights but no config.json, which tells what they are")
    if _INDEX not in repository.files:
        return [*small, _SINGLE]
    index = _download(repository, _INDEX, folder)
    try:
        shards = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise DownloadError(f"{_INDEX} of hf:{repository.repo_id} has no readable weight_map: {error}") from error
    if missing := [shard for shard in shards if shard not in repository.files]:
        raise DownloadError(
            f"hf:{repository.repo_id} lacks shards that its index names: {', '.join(map(str, missing))}"
        )
    return [*small, _INDEX, *shards]


def _fetch(
    repository: _Repository, names: Sequence[str], folder: Path, progress: Progress | None
) -> list[store.StoredFile]:
    sizes = [repository.files[name].size_bytes for name in names]
    total = sum(size for size in sizes if size is not None) if None not in sizes else None
    if total is not None:
        store.check_space(folder, max(0, total - folder_size(folder)))
    stored = []
    with watch(folder, f"downloading {repository.repo_id}", total, progress):
        for name in names:
            path = _download(repository, name, folder)
            stored.append(_checked(repository, repository.files[name], path))
    return stored


def _download(repository: _Repository, name: str, folder: Path) -> Path:
    """Fetch one file at the pinned commit. A partial one that an interrupted pull left is continued.

    huggingface_hub's own hf_hub_download starts anew each time (since it cannot trust locks on every file system);
    here the staging folder is locked, so its http_get may continue.
    """
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise DownloadError(f"hf:{repository.repo_id} names a file outside its folder: {name!r}")
    hub, target = _hub(), folder / name
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.part")
    with partial.open("ab") as file:
        hub.file_download.http_get(
            hub.hf_hub_url(repository.repo_id, name, revision=repository.commit),
            file,
            resume_size=file.tell(),
            headers=hub.utils.build_hf_headers(library_name="trivet"),
            expected_size=repository.files[name].size_bytes,
        )
    partial.rename(target)
    return target


def _checked(repository: _Repository, remote: _RemoteFile, path: Path) -> store.StoredFile:
    size = path.stat().st_size
    if remote.size_bytes is not None and size != remote.size_bytes:
        path.unlink()
        raise DownloadError(
            f"{remote.name} of hf:{repository.repo_id} came with {size} bytes, expected {remote.size_bytes}; "
            "it was removed, pull again"
        )
    if remote.sha256 is not None and (digest := digests.sha256_of(path)) != remote.sha256:
        path.unlink()
        raise DigestMismatchError(
            f"{remote.name} of hf:{repository.repo_id} has sha256 {digest}, the hub states {remote.sha256}; "
            "it was removed, pull again"
        )
    return store.StoredFile(name=remote.name, size_bytes=size, sha256=remote.sha256)


@contextmanager
def _hub_errors(reference: HubReference) -> Iterator[None]:
    """Map what huggingface_hub raises to our tree, one line each."""
    errors = _hub().errors
    try:
        yield
    except errors.GatedRepoError as error:
        raise DownloadError(
            f"hf:{reference.repo_id} is gated: accept its terms on the hub, "
            "then log in with `hf auth login` or set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"the hub has no repository {reference.repo_id}, or it is private: check the spelling, or set HF_TOKEN"
        ) from error
    except errors.EntryNotFoundError as error:
        raise DownloadError(f"a file of hf:{reference.repo_id} cannot be fetched: {_first_line(error)}") from error
    except errors.OfflineModeIsEnabled as error:
        raise DownloadError(
            f"hf:{reference.repo_id} is not in the cache and HF_HUB_OFFLINE forbids to fetch it"
        ) from error
    except (errors.HfHubHTTPError, errors.HFValidationError) as error:
        raise DownloadError(f"the hub refused hf:{reference.repo_id}: {_first_line(error)}") from error
    except OSError as error:
        if error.errno is not None:
            raise  # about the disk: mapped by the caller, who knows the folder
        raise DownloadError(f"the hub cannot be reached for hf:{reference.repo_id}: {_first_line(error)}") from error
    except Exception as error:
        # The HTTP client under huggingface_hub differs between its versions; its errors share no importable base.
        if type(error).__module__.split(".")[0] not in ("httpx", "httpx2", "httpcore", "httpcore2", "requests"):
            raise
        raise DownloadError(f"the hub cannot be reached for hf:{reference.repo_id}: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
