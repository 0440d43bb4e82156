"""Facts about the service over HTTP, without a credential: its document, liveness and readiness."""

from starlette.responses import JSONResponse, Response

from ocigpu.tenants.service.problems import Refusal
from ocigpu.tenants.service.request import RETRY, ApiRequest


async def show_openapi(request: ApiRequest) -> Response:
    """Return the document of the interface."""
    return Response(request.service.document, media_type="application/json")


async def show_health(_request: ApiRequest) -> Response:
    """Tell that the service runs."""
    return JSONResponse({"status": "ok"})


async def show_readiness(request: ApiRequest) -> Response:
    """Tell whether it follows its cluster."""
    if request.service.reconciler.problem:
        raise Refusal("cluster_unavailable", retry_after=RETRY)
    return JSONResponse({"status": "ok"})
