"""The endpoints that tell: /, /api/version, /api/tags, /api/show, /api/ps.

They read headers that are in memory, so they answer at once while models load and generate.
"""

from __future__ import annotations

from datetime import datetime

import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from headrace.engine.errors import InvalidRequest, ModelNotFound
from headrace.engine.library import Model, Name
from headrace.server.errors import JSON_TYPE
from headrace.server.models import Models, Residence
from headrace.server.schemas import ShowBody, decode

Fields = dict[str, object]

# The protocol's version, not headrace's: clients compare it with the release that they need.
PROTOCOL_VERSION = "0.33.0"


async def root(_: Request) -> Response:
    """Answer GET / with the sentence that tools probe for."""
    return PlainTextResponse("Ollama is running")


async def version(_: Request) -> Response:
    """Answer GET /api/version."""
    return _json({"version": PROTOCOL_VERSION})


async def tags(models: Models, _: Request) -> Response:
    """Answer GET /api/tags: all models that are served, the newest first."""
    return _json({"models": [_tag(model) for model in models.library.models]})


async def ps(models: Models, _: Request) -> Response:
    """Answer GET /api/ps: the models in memory, the last to expire first."""
    return _json({"models": [_resident(residence) for residence in models.residences()]})


async def show(models: Models, request: Request) -> Response:
    """Answer POST /api/show: all that the file says about a model.

    Raises:
        InvalidRequest: no model is named, or not with a model name.
        ModelNotFound: there is no such model.
    """
    body = decode(await request.body(), ShowBody)
    name = body.model or body.name
    if not name:
        raise InvalidRequest("model is required")
    if models.library.find(name) is None:
        raise ModelNotFound(f"model '{Name.parse(name)}' not found")
    model = models.find(name)
    info = model.model_info(body.verbose)
    # Copilot shows this field and expects the name that it asked for.
    if request.headers.get("user-agent", "").startswith("GitHubCopilotChat/"):
        info["general.basename"] = name
    fields: Fields = {
        "modelfile": _modelfile(model, body.system),
        "template": model.template,
        "system": body.system,
        "details": _details(model),
        "model_info": info,
        "tensors": [
            {"name": tensor.name, "type": tensor.type_name, "shape": tensor.shape}
            for tensor in model.tensors
        ],
        "capabilities": model.capabilities,
        "modified_at": _local(model.modified_at),
    }
    return _json({key: value for key, value in fields.items() if value != ""})


def _tag(model: Model) -> Fields:
    context = {
        "context_length": model.header.context_length,
        "embedding_length": model.header.embedding_length,
    }
    return {
        **_identity(model),
        "modified_at": _local(model.modified_at),
        "size": model.size_bytes,
        "details": _details(model) | {key: n for key, n in context.items() if n},
        "capabilities": model.capabilities,
    }


def _resident(residence: Residence) -> Fields:
    fields: Fields = {
        **_identity(residence.model),
        "size": residence.n_bytes,
        "details": _details(residence.model),
        "expires_at": _local(residence.expires_at),
        "size_vram": 0 if residence.loaded is None else residence.loaded.tiers.vram_bytes,
        "context_length": residence.n_ctx,
    }
    if residence.loaded is not None and residence.status is not None:
        # What Ollama does not tell is under one name of ours.
        forecast = msgspec.to_builtins(residence.loaded.forecast)
        tiers = msgspec.to_builtins(residence.loaded.tiers)
        status = msgspec.structs.asdict(residence.status)
        fields["headrace"] = {**tiers, **status, "forecast": forecast}
    return fields


def _identity(model: Model) -> Fields:
    name = str(model.name)
    return {"name": name, "model": name, "digest": model.digest}


def _details(model: Model) -> Fields:
    details = model.details
    return {
        "parent_model": "",
        "format": "gguf",
        "family": details.family,
        "families": details.families,
        "parameter_size": details.parameter_size,
        "quantization_level": details.quantization_level,
    }


def _modelfile(model: Model, system: str) -> str:
    lines = [
        f"# The model as headrace serves it. To build on it, write instead of the path:\n"
        f"# FROM {model.name}\n",
        f"FROM {model.path}",
    ]
    if model.template:
        lines.append(f'TEMPLATE """{model.template}"""')
    if system:
        lines.append(f'SYSTEM """{system}"""')
    return "\n".join(lines) + "\n"


def _local(moment: datetime) -> str:
    """Return moment as RFC 3339 with this machine's offset."""
    return moment.astimezone().isoformat()


def _json(fields: Fields) -> Response:
    return Response(orjson.dumps(fields), media_type=JSON_TYPE)
