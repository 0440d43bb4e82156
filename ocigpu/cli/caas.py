"""Containers as a service: the service itself, and its keys."""

from typing import Annotated

from ocigpu.cli import show
from ocigpu.cli.arguments import Range
from ocigpu.core.errors import HostError, UsageError

INSTALL = "Install it into a virtual environment: pip install 'ocigpu[tenants]'"


def serve_command(
    listen: str = "127.0.0.1:8443",
    state: str = "/var/lib/ocigpu/caas",
    kubeconfig: str = "",
    tls_certificate: str = "",
    tls_key: str = "",
    insecure: bool = False,
    registry: list[str] | None = None,
    nfs: list[str] | None = None,
    runtime_class: str = "kata-qemu-nvidia-gpu",
    resource: str = "nvidia.com/gpu",
    cpus_per_gpu: Annotated[int, Range(0, 1024)] = 0,
    memory_per_gpu: str = "",
    timeout: Annotated[int, Range(1)] = 86400,
    max_timeout: Annotated[int, Range(1)] = 604800,
    keep_ended: Annotated[float, Range(0)] = 86400.0,
    oidc_issuer: str = "",
    oidc_audience: str = "",
    oidc_claim: str = "tenancy",
    oidc_algorithm: list[str] | None = None,
    audit: str = "",
    json: bool = False,
) -> None:
    import re

    if bool(tls_certificate) != bool(tls_key):
        raise UsageError("--tls-certificate and --tls-key are given together, or neither")
    if memory_per_gpu and not re.fullmatch(r"[1-9][0-9]*([KMGT]i?)?", memory_per_gpu):
        raise UsageError(f"--memory-per-gpu {memory_per_gpu!r} is not a quantity such as 64Gi")
    try:
        from ocigpu.kubernetes.tenants.service.auth import OidcOptions
        from ocigpu.kubernetes.tenants.service.image import REGISTRIES
        from ocigpu.kubernetes.tenants.service.pods import PodOptions
        from ocigpu.kubernetes.tenants.service.server import CaasServer, ServiceOptions
        from ocigpu.kubernetes.tenants.service.web import TenantRules
    except ImportError as error:
        raise HostError("OCIGPU-CAAS-1", f"the service needs what is not installed: {error}", INSTALL) from error
    from ocigpu.system.service import ServiceLog

    algorithms = tuple(oidc_algorithm or ("RS256", "ES256", "EdDSA"))
    options = ServiceOptions(
        listen,
        state,
        kubeconfig,
        (tls_certificate, tls_key) if tls_key else (),
        insecure,
        audit,
        keep_ended,
        TenantRules(tuple(registry or REGISTRIES), tuple(nfs or ()), timeout, max_timeout),
        PodOptions(runtime_class, resource, cpus_per_gpu, memory_per_gpu),
        OidcOptions(oidc_issuer, oidc_audience, oidc_claim, algorithms) if oidc_issuer else None,
    )
    CaasServer(options, ServiceLog(json)).run()


def admin_key_command(state: str = "/var/lib/ocigpu/caas", label: str = "", json: bool = False) -> None:
    try:
        from ocigpu.kubernetes.tenants.service.store import CaasStore
    except ImportError as error:
        raise HostError("OCIGPU-CAAS-1", f"the store needs what is not installed: {error}", INSTALL) from error
    store = CaasStore(state)
    try:
        key, kept = store.add_key(None, ["admin"], label, None)
    finally:
        store.close()
    if json:
        show.data({"id": kept.id, "key": key})
    else:
        print(key)
