"""Requests as containers make them."""

from ocigpu.core.settings import Settings
from ocigpu.gpus.request import Request
from ocigpu.gpus.vendors import parse_request


def request_from_variables(variables: dict[str, str], settings: Settings, privileged: bool = False) -> Request:
    """Return what a container with this environment asks for; ``privileged``: it has CAP_SYS_ADMIN."""
    bounding = ["CAP_SYS_ADMIN"] if privileged else []
    env = [f"{name}={value}" for name, value in variables.items()]
    return parse_request({"process": {"env": env, "capabilities": {"bounding": bounding}}}, settings)
