"""Opening sessions for the commands, with what the user should see meanwhile."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from . import console
from .options import chosen_model, engine_options

if TYPE_CHECKING:
    from ...runtime.async_llm import AsyncLLM
    from ..session import Session

URL_DEFAULT = "http://localhost:8000"


def open_engine(args: Namespace, *, serving: bool = False) -> AsyncLLM:
    """The engine of the chosen model; progress of a download or an export goes to stderr."""
    from ..session import load_engine

    bar = console.ProgressBar()
    export = ExportNotes(bar)
    try:
        return load_engine(
            chosen_model(args), engine_options(args), serving=serving, download_progress=bar, export_progress=export
        )
    finally:
        bar.close()


@contextmanager
def open_local(args: Namespace) -> Iterator[Session]:
    from ..session import LocalSession, display_name

    session = LocalSession(
        open_engine(args), model_name=display_name(chosen_model(args)), chat_template_kwargs=args.chat_template_kwargs
    )
    try:
        yield session
    finally:
        session.close()


@contextmanager
def open_remote(args: Namespace) -> Iterator[Session]:
    import os

    from ..remote import RemoteSession

    key = args.api_key or os.environ.get("OPENAI_API_KEY") or "EMPTY"
    session = RemoteSession(args.url, api_key=key, model_name=args.model_name)
    console.note(f"Using model: {session.model_name}")
    yield session


class ExportNotes:
    """Progress of an export: on a terminal one line that is rewritten, elsewhere nothing but that it happens."""

    def __init__(self, bar: console.ProgressBar) -> None:
        """`bar`: that of the download before it, so that the one's line is completed before the other's begins."""
        self._bar = bar

    def __call__(self, stage: str, fraction: float) -> None:
        self._bar.show_fraction("preparing the model, once", stage, fraction)
