"""Names that several parts share: the API group, the namespaces of tenancies, the kubelet's socket."""

POD_RESOURCES_SOCKET = "/var/lib/kubelet/pod-resources/kubelet.sock"
"""Where kubelets answer which pod has which device."""


GROUP, VERSION = "ocigpu.io", "v1alpha1"


PREFIX = "tenant-"
"""Of the names of namespaces."""


def namespace_name(tenancy: str) -> str:
    """Return the name of a tenancy's namespace."""
    return f"{PREFIX}{tenancy}"


def tenancy_of(namespace: str) -> str:
    """Return the tenancy whose namespace has this name, "" for none."""
    return namespace.removeprefix(PREFIX) if namespace.startswith(PREFIX) else ""


TENANCY_LABEL, UID_LABEL = "ocigpu.io/tenancy", "ocigpu.io/tenancy-uid"
