"""Settings of the server; names and defaults are vLLM's unless the comment says otherwise."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MAX_COMPLETION_PROMPTS = 1024  # prompts in one /v1/completions request
DEFAULT_MAX_BODY_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """How to listen, whom to let in, and what answers carry."""

    host: str = "127.0.0.1"  # vLLM: all interfaces. Ours is reachable from this machine only unless told otherwise
    port: int = 8000  # 0 = any free one
    uds: str | None = None  # path of a Unix socket; replaces host and port
    ssl_keyfile: str | None = None
    ssl_certfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = 0  # ssl.CERT_NONE
    allowed_origins: tuple[str, ...] = ()  # vLLM: "*". Ours lets no web page in unless told otherwise
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    root_path: str = ""
    h11_max_incomplete_event_size: int = 4 * 2**20  # bytes
    h11_max_header_count: int = 256
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES  # ours: a larger request body gets 413 before it is read
    uvicorn_log_level: str = "info"
    disable_uvicorn_access_log: bool = False
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # any of them opens /v1; none = open to all
    served_model_names: tuple[str, ...]  # the first is the one answers carry
    model_path: str  # what was loaded; `root` of a model card
    chat_template: str | None = None  # the template's text; None = the model's own
    trust_request_chat_template: bool = False
    default_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    enable_force_include_usage: bool = False
    enable_prompt_tokens_details: bool = False
    enable_server_load_tracking: bool = False
    enable_request_id_headers: bool = False
    return_tokens_as_token_ids: bool = False

    @property
    def model_name(self) -> str:
        return self.served_model_names[0]
