"""From what the user typed to a checkpoint or package on disk."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path

from ..._log import get_logger
from . import gguf_files, locations, store
from .catalogue import CatalogueEntry, catalogue
from .errors import AmbiguousModelError, ModelNotFoundError, ModelStoreError
from .progress import Progress
from .reference import HubReference, PyPIReference, Reference, has_scheme, parse_reference

logger = get_logger(__name__)

_PACKAGE_MARK = "trivet.json"
_CHECKPOINT_MARK = "config.json"


def resolve(model: str, *, progress: Progress | None = None) -> Path:
    """The absolute path of the checkpoint (a .gguf file or a folder) or package folder that `model` names.

    `model` is a path; a name in the store or the catalogue; `pypi:NAME[==VERSION]`; or `hf:ORG/REPO[:QUANT]`. A bare
    name (no separator, no .gguf) means the store first, and where a model of the same name lies in the working folder
    the log says so: write `./name` for that. References and catalogue names that are not in the store are pulled,
    which is the only case that uses the network; an unversioned `pypi:` or `hf:` reference that is in the store is
    used as it is. Raises ModelStoreError.
    """
    if not model.strip():
        raise ModelNotFoundError("the model is an empty string; expected a path, a name, pypi:NAME or hf:ORG/REPO")
    if has_scheme(model):
        found = find_reference(parse_reference(model)) or pull(model, progress=progress)
        found.check()
        return found.path
    path = _expanded(model)
    bare = path.name == model and not model.endswith(".gguf") and model not in (".", "..")
    if bare and (stored := find_name(model)):
        _log_shadowed(model, stored.record.reference)
        stored.check()
        return stored.path
    if bare and (entry := catalogue().models.get(model)):
        _log_shadowed(model, entry.reference)
        return pull(model, progress=progress).path
    if path.exists():
        return _checkpoint_path(path.absolute())
    raise ModelNotFoundError(_not_found(model, path, bare))


def pull(model: str, *, progress: Progress | None = None, force: bool = False) -> store.StoredModel:
    """Fetch a catalogue name or a `pypi:`/`hf:` reference into the store and return it.

    A pinned reference that is stored is returned without asking anyone, unless `force`.
    """
    entry = catalogue().models.get(model)
    if entry is None and not has_scheme(model):
        raise ModelNotFoundError(
            f"{model!r} is nothing to pull.{_did_you_mean(model, catalogue().models)} "
            f"Expected a name of the catalogue ({', '.join(catalogue().models)}), "
            "pypi:NAME[==VERSION] or hf:ORG/REPO[:QUANT]"
        )
    reference = parse_reference(entry.reference if entry else model)
    name = catalogue().name_of(str(reference))
    pin: CatalogueEntry | None = catalogue().models[name] if name else None
    from . import hub, pypi  # they start subprocesses and import clients: only pulling needs them

    with locations.cache_errors(locations.models_dir()), store.staging(str(reference)) as folder:
        if isinstance(reference, HubReference):
            return hub.pull(reference, folder, name=reference.short_name, force=force, progress=progress)
        if reference.version is not None and not force and (stored := store.find(str(reference))):
            stored.check()
            return stored
        return pypi.pull(reference, folder, name=name or reference.short_name, pin=pin, progress=progress)


def find_name(name: str) -> store.StoredModel | None:
    """The stored model of a name, a catalogue name or a reference; AmbiguousModelError when several share the name."""
    if has_scheme(name):
        return find_reference(parse_reference(name))
    entry = catalogue().models.get(name)
    if entry is not None:
        return store.find(entry.reference)
    fitting = [model for model in store.list_models() if model.record.name == name]
    if len(fitting) > 1:
        references = ", ".join(model.record.reference for model in fitting)
        raise AmbiguousModelError(f"several models are called {name!r}; name one of: {references}")
    return fitting[0] if fitting else None


def find_reference(reference: Reference) -> store.StoredModel | None:
    """The stored model of a reference; for `pypi:NAME` the version that was pulled last."""
    if isinstance(reference, PyPIReference) and reference.version is None:
        prefix = f"{reference}=="
        versions = [model for model in store.list_models() if model.record.reference.startswith(prefix)]
        return max(versions, key=lambda model: model.record.pulled_at, default=None)
    return store.find(str(reference))


def _expanded(model: str) -> Path:
    try:
        return Path(model).expanduser()
    except RuntimeError as error:  # ~USER of nobody, or ~ without a home
        raise ModelNotFoundError(f"no model {model!r}: the home folder of {model.split('/')[0]} is unknown") from error


@cache  # one load resolves its model several times
def _log_shadowed(name: str, reference: str) -> None:
    """Say which of two is taken, where there is a model in the working folder whose path is `name`."""
    path = Path(name)
    try:
        _checkpoint_path(path)
    except AmbiguousModelError:
        pass
    except (ModelStoreError, OSError):
        return
    kind = "folder" if path.is_dir() else "file"
    logger.warning(
        "%r is taken as the name of %s, not as the %s here: write ./%s for that", name, reference, kind, name
    )


def _checkpoint_path(path: Path) -> Path:
    """A path as it is when it is a file, a package or a checkpoint; the one GGUF model of a folder otherwise."""
    if path.is_file():
        return path
    if not path.is_dir():
        raise ModelNotFoundError(f"{path} is neither a file nor a folder (a pipe, a device or a socket)")
    if (path / _PACKAGE_MARK).is_file() or (path / _CHECKPOINT_MARK).is_file():
        return path
    groups = gguf_files.group(entry.name for entry in path.iterdir() if entry.is_file())
    if not groups:
        raise ModelNotFoundError(
            f"{path} holds no model: expected {_PACKAGE_MARK} (a package), {_CHECKPOINT_MARK} (a checkpoint) "
            "or a .gguf file"
        )
    if len(groups) > 1:
        raise AmbiguousModelError(f"{path} holds several GGUF models; name one of: {', '.join(groups)}")
    return path / gguf_files.select(groups, None, str(path))[0]


def _not_found(model: str, path: Path, bare: bool) -> str:
    if not bare:
        hint = (
            f"; for a repository of a hub write hf:{model}" if model.count("/") == 1 and model[0] not in "./~" else ""
        )
        try:
            place = path.absolute()
        except OSError:  # the working folder was removed
            place = path
        return f"no model {model!r}: there is no file or folder {place}{hint}"
    names = sorted({*catalogue().models, *(stored.record.name for stored in store.list_models())})
    return (
        f"no model {model!r}: not a file or folder here, and not among the names in the cache and the catalogue "
        f"({', '.join(names)}).{_did_you_mean(model, names)} "
        "Other models: a path, pypi:NAME[==VERSION] or hf:ORG/REPO[:QUANT]"
    )


def _did_you_mean(given: str, names: Iterable[str]) -> str:
    """A sentence, with a space before it, that names the closest of `names`, whatever the case; or nothing."""
    import difflib  # a start that finds its model is faster without

    by_folded = {name.casefold(): name for name in names}
    close = difflib.get_close_matches(given.casefold(), by_folded, n=1)
    return f" Did you mean {by_folded[close[0]]!r}?" if close else ""
