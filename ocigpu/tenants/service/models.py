"""What comes in and goes out of the service, as pydantic models; the OpenAPI document is made of them."""

import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    create_model,
    model_validator,
)

from ocigpu.tenants.service.problems import Refusal

TENANCY = r"^[a-z0-9]([-a-z0-9]{0,54}[a-z0-9])?$"
"""Names of tenancies: their namespace, tenant-NAME, is a DNS label (RFC 1123)."""
Lifecycle = Literal[
    "accepted", "queued", "scheduling", "booting", "pulling", "running", "stopping", "finished", "failed",
]  # fmt: skip
LIFECYCLES: tuple[Lifecycle, ...] = get_args(Lifecycle)
"""In the order in which a container goes through them; the last two are final."""
FINAL = ("finished", "failed")
LINKED = (1, 2, 4, 8)
"""GPUs of an NVLink partition, of any board: docs/tenants/FABRIC.md."""
UNLINKED = tuple(range(1, 9))
"""The same and, of single partitions without NVLink between them, the numbers that no partition has."""
SCOPES = {
    "containers:read": "see containers, their events, quotas",
    "containers:write": "create and delete containers",
    "logs:read": "read containers' output",
    "fleet:read": "see nodes, GPUs, partitions and leases",
    "admin": "everything, for every tenancy; create and revoke keys",
}
TENANT_SCOPES = ("containers:read", "containers:write", "logs:read")


def _is_argument(text: str) -> str:
    if "\0" in text:
        raise ValueError("a NUL byte ends an argument (execve(2))")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("half of a surrogate pair is not a character (RFC 8259 section 8.2)") from None
    return text


def _is_clean_path(path: str) -> str:
    if not path.startswith("/") or any(part in ("", ".", "..") for part in path[1:].split("/") if path != "/"):
        raise ValueError("an absolute path without //, . and .. is required")
    if not path.isprintable():
        raise ValueError("unprintable characters are refused")
    return path


def _is_inside(path: str) -> str:
    _is_clean_path(path)  # pydantic before 2.12 leaves Path's own check out where a field annotates it further
    if path == "/" or f"{path}/".startswith(("/proc/", "/sys/", "/dev/")):
        raise ValueError("the root, /proc, /sys and /dev are the container's own")
    return path


Text = Annotated[StrictStr, AfterValidator(_is_argument), Field(max_length=131072)]
"""One string of a process: MAX_ARG_STRLEN (execve(2))."""
Name = Annotated[StrictStr, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,255}$")]
"""Of a variable: POSIX.1-2017 section 8.1."""
Path = Annotated[StrictStr, AfterValidator(_is_clean_path), Field(max_length=4096, pattern="^/")]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class NfsMount(_Model):
    """An export of an NFS server, mounted by the node: nosuid, nodev."""

    type: Literal["nfs"] = "nfs"
    server: StrictStr = Field(pattern=r"^[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?$", description="name or address")
    path: Path = Field(description="what the server exports")
    target: Annotated[Path, AfterValidator(_is_inside)] = Field(description="where it is in the container")
    read_only: StrictBool = False


class PullCredentials(_Model):
    """Who pulls the image, for the registry of this image and no other; never shown again."""

    username: Text = Field(min_length=1, max_length=256, pattern="^[^:]+$")
    password: Text = Field(min_length=1, max_length=16384)


def _describe(schema: dict[str, Any], model: "type[ContainerRequest]") -> None:
    schema["properties"]["gpus"]["enum"] = list(model.counts)
    schema["properties"]["image"] = {**schema["properties"]["container-url"], "description": "container-url, shorter"}
    schema["oneOf"] = [{"required": ["container-url"]}, {"required": ["image"]}]
    schema["required"] = [name for name in schema.get("required", []) if name != "container-url"]
    if not schema["required"]:
        del schema["required"]


class ContainerRequest(_Model):
    """A container to run."""

    counts: ClassVar[tuple[int, ...]] = LINKED
    """Of GPUs that a container can have."""
    model_config = ConfigDict(json_schema_extra=_describe)

    image: StrictStr = Field(alias="container-url", min_length=1, max_length=1024, description="reference of an image")
    tenancy: Annotated[StrictStr, Field(pattern=TENANCY)] | None = Field(
        None, description="default: that of the credential, which it must be unless the key is an admin's"
    )
    gpus: StrictInt = Field(1, description="GPUs: see nvlink_partition")
    cpus: Annotated[StrictInt, Field(ge=1, le=1024)] | None = Field(
        None, description="processors; default: what the service or the tenancy sets for each GPU"
    )
    memory: Annotated[StrictStr, Field(pattern=r"^[1-9][0-9]{0,5}(Mi|Gi|Ti)$")] | None = Field(
        None, description="memory, for instance 64Gi; default as of cpus"
    )
    command: list[Text] = Field([], max_length=1024, description="instead of the image's entry point")
    args: list[Text] = Field([], max_length=1024, description="instead of the image's command")
    env: dict[Name, Text] = Field({}, max_length=512)
    secrets: dict[Name, Text] = Field({}, max_length=128, description="variables that are never shown again")
    pull_credentials: PullCredentials | None = Field(None, description="for an image that is not public")
    mounts: list[NfsMount] = Field([], max_length=16)
    timeout_seconds: Annotated[StrictInt, Field(ge=1)] | None = Field(
        None, description="running time after which it is ended; default and limit are the service's"
    )
    restart: Literal["never", "on-failure"] = "never"

    @classmethod
    def of_service(cls, counts: Sequence[int]) -> "type[ContainerRequest]":
        """Return the type of the requests to a service whose containers can have these numbers of GPUs."""
        return create_model(
            cls.__name__, __base__=cls, __doc__=cls.__doc__, counts=(ClassVar[tuple[int, ...]], tuple(counts))
        )

    def check_gpus(self) -> None:
        """Raise Refusal (gpus_no_partition) for a number that no container here can have: the body has its shape."""
        if self.gpus not in self.counts:
            raise Refusal("gpus_no_partition", f"gpus {self.gpus}: not one of {', '.join(map(str, self.counts))}")

    @model_validator(mode="before")
    @classmethod
    def take_either_name(cls, value: Any) -> Any:
        """Read image for container-url; both at once are refused as an unknown key is."""
        if isinstance(value, dict) and "image" in value and "container-url" not in value:
            value = {**value, "container-url": value["image"]}
            del value["image"]
        return value

    @model_validator(mode="after")
    def check_together(self) -> "ContainerRequest":
        """Refuse what has two meanings."""
        if both := sorted(self.env.keys() & self.secrets.keys()):
            raise ValueError(f"in env and in secrets: {', '.join(both)}")
        targets = [mount.target for mount in self.mounts]
        if len(set(targets)) < len(targets):
            raise ValueError("two mounts have one target")
        return self


class Phases(_Model):
    """Seconds of each phase of the start, none for what has not been or is not known; see docs/tenants/CAAS.md."""

    queued: float | None = None
    vm_boot: float | None = None
    pull: float | None = None
    start: float | None = None


class ContainerView(_Model):
    """A container as it is."""

    id: str
    tenancy: str
    image: str
    image_digest: str | None = None
    gpus: int = Field(ge=UNLINKED[0], le=UNLINKED[-1])
    nvlink_partition: bool = Field(
        description="its GPUs are those of an NVLink partition; false: there is no NVLink between them, and copies from"
        " one to another go over PCIe"
    )
    cpus: int | None = Field(None, description="as requested; none: by the number of GPUs")
    memory: str | None = Field(None, description="as requested; none: by the number of GPUs")
    command: list[str]
    args: list[str]
    env: dict[str, str]
    secrets: list[str] = Field(description="names only")
    has_pull_credentials: bool = Field(False, description="whether the image is pulled with some")
    mounts: list[NfsMount]
    timeout_seconds: int
    restart: Literal["never", "on-failure"]
    lifecycle: Lifecycle
    reason: str = Field("", description="a code that does not change, see docs/tenants/CAAS.md; empty: nothing unusual")
    detail: str = ""
    exit_code: int | None = None
    node: str | None = None
    created: str
    started: str | None = None
    finished: str | None = None
    phases: Phases
    version: int = Field(description="one more at each change; also in ETag")


class ContainerList(_Model):
    """A page of containers, the newest first."""

    items: list[ContainerView]
    next_cursor: str | None = None


class EventView(_Model):
    """Something that happened to a container; ``id`` grows.

    ``gpus``: of the container; ``started``, ``finished``: when it began and ended to run, as far as this is known.
    """

    id: int
    at: str
    kind: Literal["created", "changed", "deleted"]
    container: str
    tenancy: str
    lifecycle: str
    reason: str
    detail: str
    gpus: int
    started: str | None
    finished: str | None


class EventList(_Model):
    """A page of events, the oldest first."""

    items: list[EventView]
    next_cursor: str | None = None


class GpuView(_Model):
    """A GPU by its lease.  ``partition``: module ids of the GPUs that its container has, NVLinks between them."""

    lease: str
    gpu: str
    module: int | None
    phase: str
    tenancy: str | None
    container: str | None
    partition: list[int]
    generation: int | None
    reason: str


class NodeOverview(_Model):
    """A node with GPUs.  ``capacity``: how many it has announced."""

    name: str
    ready: bool
    schedulable: bool
    capacity: int
    gpus: list[GpuView]


class OverviewView(_Model):
    """All at once: ``nodes`` only for who may see them; ``problem``: why it may be out of date."""

    nodes: list[NodeOverview] | None
    containers: list[ContainerView]
    problem: str


class QuotaView(_Model):
    """One resource of a tenancy, as the cluster counts it."""

    resource: str
    hard: str
    used: str


class QuotaList(_Model):
    """The quotas of a tenancy."""

    tenancy: str
    items: list[QuotaView]


class Identity(_Model):
    """Whose the credential is."""

    actor: str
    tenancy: str | None
    scopes: list[str]
    expires: str | None


class KeyRequest(_Model):
    """An API key to make."""

    tenancy: Annotated[StrictStr, Field(pattern=TENANCY)] | None = Field(None, description="none: an admin key")
    scopes: list[Literal[tuple(SCOPES)]] = Field(list(TENANT_SCOPES), min_length=1)  # type: ignore[valid-type] # values of a table
    expires_seconds: Annotated[StrictInt, Field(ge=60, le=10 * 366 * 86400)] | None = None
    label: Annotated[Text, Field(max_length=200)] = ""

    @model_validator(mode="after")
    def check_together(self) -> "KeyRequest":
        """An admin key is of no tenancy, and any other is of one."""
        if ("admin" in self.scopes) == (self.tenancy is not None):
            raise ValueError("a key with the scope admin has no tenancy, any other has one")
        return self


class KeyView(_Model):
    """An API key as far as it can be shown."""

    id: str
    tenancy: str | None
    scopes: list[str]
    label: str
    created: str
    expires: str | None
    revoked: bool


class NewKey(KeyView):
    """A key that was just made: ``key`` is shown this once, the service keeps a hash of it.

    ``note``: what may be a mistake, "" for nothing.
    """

    key: str
    note: str


class KeyList(_Model):
    """A page of the keys that were made, by their ids."""

    items: list[KeyView]
    next_cursor: str | None = None


class ProblemView(BaseModel):
    """An answer that refuses: RFC 9457."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    code: str
    fix: str
    errors: list[dict[str, str]] | None = None


def is_tenancy(name: str) -> bool:
    """Tell whether a tenancy can be called so."""
    return bool(re.fullmatch(TENANCY[1:-1], name))
