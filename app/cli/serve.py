"""`trivet serve`: the OpenAI-compatible server."""

from __future__ import annotations

import os
import signal
from argparse import BooleanOptionalAction, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import console, options
from .errors import CliError, UsageError
from .exit_codes import ExitCode
from .loading import open_engine
from .parser import ArgumentParser

if TYPE_CHECKING:
    from ..server.config import ServerConfig

DESCRIPTION = """Serve a model over the OpenAI API, on this machine only unless --host says otherwise.
SIGTERM or ^C completes the answers in progress and ends the server (exit status 0); a second one cuts them off
(130)."""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="the same as --model")
    options.add_model_flag(parser)
    parser.add_argument(
        "--served-model-name", nargs="+", metavar="NAME", help="names that requests may use (default: MODEL as typed)"
    )
    _add_address_flags(parser)
    _add_access_flags(parser)
    _add_answer_flags(parser)
    options.add_engine_flags(parser)
    parser.flags_elsewhere["--url"] = "--host and --port say where `trivet serve` listens"


def _add_address_flags(parser: ArgumentParser) -> None:
    from ...runtime.config_flags import human_readable_int

    group = parser.add_argument_group("address")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    group.add_argument("--port", type=int, default=8000, help="0 = any free one (default: %(default)s)")
    group.add_argument("--uds", metavar="PATH", help="listen on a Unix socket instead of host and port")
    group.add_argument("--ssl-keyfile", metavar="FILE", help="private key: serve https")
    group.add_argument("--ssl-certfile", metavar="FILE", help="certificate: serve https")
    group.add_argument("--ssl-ca-certs", metavar="FILE", help="authorities of client certificates")
    group.add_argument(
        "--ssl-cert-reqs",
        type=int,
        default=0,
        choices=(0, 1, 2),
        help="2 = clients need certificates (default: %(default)s)",
    )
    group.add_argument(
        "--root-path", default="", metavar="PATH", help="path prefix that a proxy strips (default: none)"
    )
    group.add_argument(
        "--h11-max-incomplete-event-size", type=human_readable_int, default=4 * 2**20, metavar="BYTES",
        help="most bytes of request line and headers (default: 4M)",
    )  # fmt: skip
    group.add_argument(
        "--h11-max-header-count", type=int, default=256, metavar="INT", help="most headers (default: %(default)s)"
    )
    group.add_argument(
        "--max-body-bytes", type=human_readable_int, default=32 * 2**20, metavar="BYTES",
        help="largest request body, 413 beyond (default: 32M)",
    )  # fmt: skip


def _add_access_flags(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("access")
    group.add_argument(
        "--api-key", action="append", metavar="KEY", help="require one of these keys on /v1 (or TRIVET_API_KEY)"
    )
    group.add_argument(
        "--allowed-origins", type=_json_list, default=[], metavar="JSON", help="web origins (CORS; default: none)"
    )
    group.add_argument(
        "--allowed-methods", type=_json_list, default=["*"], metavar="JSON", help="methods (CORS; default: all)"
    )
    group.add_argument(
        "--allowed-headers", type=_json_list, default=["*"], metavar="JSON", help="headers (CORS; default: all)"
    )
    group.add_argument("--allow-credentials", action="store_true", help="credentials (CORS)")


def _add_answer_flags(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("requests and answers")
    group.add_argument("--chat-template", metavar="FILE|TEXT", help="chat template instead of the model's own")
    group.add_argument("--trust-request-chat-template", action="store_true", help="let requests bring a template")
    group.add_argument(
        "--default-chat-template-kwargs", type=options.template_variables, default={}, metavar="JSON",
        help="variables for the chat template; a request's chat_template_kwargs win",
    )  # fmt: skip
    group.add_argument("--enable-force-include-usage", action="store_true", help="usage in every stream")
    group.add_argument("--enable-prompt-tokens-details", action="store_true", help="cached_tokens in the usage")
    group.add_argument("--enable-server-load-tracking", action="store_true", help="GET /load counts requests")
    group.add_argument("--enable-request-id-headers", action="store_true", help="X-Request-Id in answers")
    group.add_argument("--return-tokens-as-token-ids", action="store_true", help='logprob tokens as "token_id:N"')
    group.add_argument(
        "--uvicorn-log-level", default="info", choices=("critical", "error", "warning", "info", "debug"),
        help="how much to log (default: %(default)s)",
    )  # fmt: skip
    group.add_argument(
        "--disable-uvicorn-access-log", action=BooleanOptionalAction, default=False, help="no line per request"
    )


def run(args: Namespace) -> int:
    if args.model_tag is not None and args.model is not None:
        raise UsageError("MODEL and --model are the same; give one of them")
    args.model = args.model_tag if args.model is None else args.model
    config = server_config(args)
    try:
        from ..server import launcher
    except ImportError as error:
        raise CliError(f"the server needs fastapi and uvicorn, which cannot be imported: {error}") from error
    launcher.configure_logging(config)
    listener = launcher.bind(config)
    try:
        engine = open_engine(args, serving=True)
    except BaseException:
        listener.close()
        raise
    address = launcher.describe_address(config, listener)

    def announce() -> None:
        console.note(f"Serving {config.model_name} on {address} (^C completes the answers in progress and ends it)")

    try:
        completed = launcher.serve(engine, config, listener, on_ready=announce, on_drain=_announce_drain)
    finally:
        engine.shutdown()
    return ExitCode.OK if completed else ExitCode.INTERRUPTED


def _announce_drain(num_answers: int, number: signal.Signals) -> None:
    answers, them = ("1 answer", "it") if num_answers == 1 else (f"{num_answers} answers", "them")
    again = "^C" if number == signal.SIGINT else number.name
    console.note(f"Completing {answers}; a second {again} cuts {them} off")


def server_config(args: Namespace) -> ServerConfig:
    """The settings that the flags ask for; UsageError for what cannot be."""
    from ..server.config import ServerConfig

    if (args.ssl_keyfile is None) != (args.ssl_certfile is None):
        raise UsageError("--ssl-keyfile and --ssl-certfile go together; one of them is missing")
    for flag in ("--ssl-keyfile", "--ssl-certfile", "--ssl-ca-certs"):
        path = getattr(args, flag[2:].replace("-", "_"))
        if path is not None and not Path(path).is_file():
            raise UsageError(f"{flag}: there is no file {path}")
    if args.ssl_certfile is None and (args.ssl_ca_certs is not None or args.ssl_cert_reqs):
        raise UsageError("--ssl-ca-certs and --ssl-cert-reqs need --ssl-keyfile and --ssl-certfile: this would be http")
    if "" in (args.served_model_name or ()):
        raise UsageError("--served-model-name is empty; give the name that requests use, or leave the flag out")
    if not args.host:
        raise UsageError("--host is empty; expected an address, as 127.0.0.1, or 0.0.0.0 for all of this machine's")
    if "" in (args.api_key or ()):
        raise UsageError("--api-key is empty: anybody could send that; give a key, or leave the flag out")
    if args.allow_credentials and not args.allowed_origins:
        raise UsageError("--allow-credentials needs --allowed-origins: without it no web page may ask at all")
    if not 0 <= args.port <= 65535:
        raise UsageError(f"--port is {args.port}; expected 0 to 65535")
    environment_key = os.environ.get("TRIVET_API_KEY")
    model = options.chosen_model(args)
    shared = {name: getattr(args, name) for name in _SAME_NAMES}
    return ServerConfig(
        **shared,
        allowed_origins=tuple(args.allowed_origins),
        allowed_methods=tuple(args.allowed_methods),
        allowed_headers=tuple(args.allowed_headers),
        api_keys=tuple(args.api_key or ([environment_key] if environment_key else [])),
        served_model_names=tuple(args.served_model_name or [model]),
        model_path=model,
        chat_template=_template_text(args.chat_template),
    )


_SAME_NAMES = (
    "host",
    "port",
    "uds",
    "ssl_keyfile",
    "ssl_certfile",
    "ssl_ca_certs",
    "ssl_cert_reqs",
    "root_path",
    "h11_max_incomplete_event_size",
    "h11_max_header_count",
    "max_body_bytes",
    "allow_credentials",
    "trust_request_chat_template",
    "default_chat_template_kwargs",
    "enable_force_include_usage",
    "enable_prompt_tokens_details",
    "enable_server_load_tracking",
    "enable_request_id_headers",
    "return_tokens_as_token_ids",
    "uvicorn_log_level",
    "disable_uvicorn_access_log",
)


def _template_text(value: str | None) -> str | None:
    """The template of a file, or the text itself when it looks like one; UsageError otherwise."""
    if value is None or "{{" in value or "{%" in value or "\n" in value:
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--chat-template {value} is neither a readable file nor a template: {error}") from error


def _json_list(text: str) -> list[str]:
    import argparse
    import json

    try:
        value: Any = json.loads(text)
    except ValueError:
        value = text.split(",")
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list; expected a JSON array, like '[\"*\"]'")
    return value
