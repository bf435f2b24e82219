"""The routes."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse

from ... import __version__
from ...runtime.errors import EngineDeadError, TrivetError
from .body import parse, read_json
from .config import ServerConfig
from .errors import APIError, handle_error
from .middleware import APIKeyMiddleware, HeaderCountMiddleware, LoadCounter, LoadTracker, RequestIdMiddleware
from .openai import chat, completions, responses
from .openai.engine import Engine
from .openai.requests import ChatCompletionRequest, CompletionRequest
from .openai.service import Service
from .openai.unsupported import CHAT, COMPLETION, refuse_unsupported
from .stream import EventStream, answer_json

CHAT_PATH = "/v1/chat/completions"
COMPLETION_PATH = "/v1/completions"


def build_app(engine: Engine, config: ServerConfig) -> FastAPI:
    """The ASGI application of one engine. It neither starts nor stops the engine."""
    # No generated documentation pages: they load scripts from elsewhere, and the bodies are read by hand.
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    service = Service(engine, config)
    _add_generation_routes(app, service)
    _add_discovery_routes(app, service)
    load = LoadCounter()
    _add_health_routes(app, service, load)
    for error_type in (APIError, TrivetError, HTTPException, RequestValidationError, Exception):
        app.add_exception_handler(error_type, handle_error)
    if config.enable_server_load_tracking:
        app.add_middleware(LoadTracker, paths=(CHAT_PATH, COMPLETION_PATH), counter=load)
    if config.api_keys:
        app.add_middleware(APIKeyMiddleware, keys=config.api_keys)
    if config.enable_request_id_headers:
        app.add_middleware(RequestIdMiddleware)
    app.add_middleware(HeaderCountMiddleware, max_count=config.h11_max_header_count)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_credentials=config.allow_credentials,
            allow_methods=config.allowed_methods,
            allow_headers=config.allowed_headers,
        )
    return app


def _add_generation_routes(app: FastAPI, service: Service) -> None:
    max_bytes = service.config.max_body_bytes

    @app.post(CHAT_PATH)
    async def create_chat_completion(request: Request) -> Response:
        content = refuse_unsupported(await read_json(request, max_bytes), CHAT)
        body = parse(ChatCompletionRequest, content)
        service.engine.check_health()
        job = await chat.prepare(service, body)
        if body.stream:
            return EventStream(chat.stream(service, job))

        async def answer() -> Response:
            return _json(responses.encode(await chat.complete(service, job)))

        return await answer_json(request, answer())

    @app.post(COMPLETION_PATH)
    async def create_completion(request: Request) -> Response:
        content = refuse_unsupported(await read_json(request, max_bytes), COMPLETION)
        body = parse(CompletionRequest, content)
        service.engine.check_health()
        job = await completions.prepare(service, body)
        if body.stream:
            return EventStream(completions.stream(service, job))

        async def answer() -> Response:
            return _json(responses.encode(await completions.complete(service, job)))

        return await answer_json(request, answer())


def _add_discovery_routes(app: FastAPI, service: Service) -> None:
    started = responses.now()

    names = service.config.served_model_names

    def card(name: str) -> responses.ModelCard:
        return responses.ModelCard(
            id=name,
            created=started,
            root=service.config.model_path,
            max_model_len=service.max_model_len,
            permission=[responses.ModelPermission(id=f"modelperm-{started:x}-{names.index(name)}", created=started)],
        )

    @app.get("/v1/models")
    async def list_models() -> Response:
        return _json(responses.encode(responses.ModelList(data=[card(name) for name in names])))

    @app.get("/v1/models/{name:path}")
    async def show_model(name: str) -> Response:
        if not name:
            return await list_models()
        service.check_model(name)
        return _json(responses.encode(card(name)))

    @app.get("/version")
    async def show_version() -> dict[str, str]:
        return {"version": __version__}


def _add_health_routes(app: FastAPI, service: Service, load: LoadCounter) -> None:
    @app.get("/health")
    @app.get("/ping")
    @app.post("/ping")
    async def health(detail: bool = False) -> Response:
        """200 and an empty body; 503 once the engine is dead. ?detail=1: a JSON body, device and load included."""
        engine, status = service.engine, 200
        try:
            engine.check_health()
        except EngineDeadError:
            status = 503
        if not detail:
            return Response(status_code=status)
        facts = {"status": "ok" if status == 200 else "dead", "device": engine.device.name}
        if engine.device.fallback:
            facts["device_fallback"] = engine.device.fallback
        return JSONResponse({**facts, "stats": engine.get_stats()}, status_code=status)

    @app.get("/load")
    async def server_load() -> dict[str, int]:
        """Requests in progress; counts only with --enable-server-load-tracking."""
        return {"server_load": load.value}


def _json(content: str) -> Response:
    return Response(content, media_type="application/json")
