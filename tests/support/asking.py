"""Requests as containers make them."""

from ocigpu.core.facts import HostFacts
from ocigpu.core.settings import Settings
from ocigpu.gpus.request import Request
from ocigpu.gpus.vendors import parse_request


def request_from_variables(variables: dict[str, str], settings: Settings, privileged: bool = False) -> Request:
    """Return what a container with this environment asks for; ``privileged``: it has CAP_SYS_ADMIN."""
    bounding = ["CAP_SYS_ADMIN"] if privileged else []
    env = [f"{name}={value}" for name, value in variables.items()]
    return parse_request({"process": {"env": env, "capabilities": {"bounding": bounding}}}, settings)


def request_on(facts: HostFacts, devices: str, capabilities: str, settings: Settings, /, **more: str) -> Request:
    """Return what a container asks for by the variable of each vendor whose driver is on the host of these facts."""
    env = [f"{vendor.upper()}_VISIBLE_DEVICES={devices}" for vendor in facts.vendors]
    env += [f"NVIDIA_DRIVER_CAPABILITIES={capabilities}", *(f"{name}={value}" for name, value in more.items())]
    process = {"env": env, "capabilities": {"bounding": ["CAP_SYS_ADMIN"]}}
    return parse_request({"process": process}, settings, here=facts.vendors.__contains__)
