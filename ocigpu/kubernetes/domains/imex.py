"""nvidia-imex of one node: its options, its files, and whether it is ready.

Needs no library for the API server, because the pod's probe runs every few seconds.  Sources: "IMEX Service for NVLink
Networks" of NVIDIA (keys of the configuration, nvidia-imex-ctl); cmd/compute-domain-daemon of
kubernetes-sigs/dra-driver-nvidia-gpu (names of the nodes).
"""

import ipaddress
from collections.abc import Mapping
from typing import Any, NamedTuple

from ocigpu.core.errors import HostError, OsErrorAs, printable
from ocigpu.system.programs import run_program

NAME = "compute-domain-daemon-"
CODE = "OCIGPU-DRA-8"
CONFIG, NODES = "imexd.cfg", "nodes.cfg"
DIRECTORY = "/imexd"
"""Where a daemon's container has its files."""
MAX_NODES = 18
"""Of a clique: the compute trays of an NVL72 rack."""
SERVER_PORT, COMMAND_PORT = 50000, 50005


class ImexOptions(NamedTuple):
    """Of one daemon; ``domain``: uid.  ``clique``: "" where the node has no multi-node NVLink.  ``hosts``: the file."""

    domain: str
    clique: str
    node: str
    address: str
    namespace: str
    most: int = MAX_NODES
    directory: str = DIRECTORY
    hosts: str = "/etc/hosts"
    program: str = "nvidia-imex"
    control: str = "nvidia-imex-ctl"


def read_imex_options(environment: Mapping[str, str]) -> ImexOptions:
    """Return the options of the environment of a daemon's container; raises HostError (OCIGPU-DRA-8)."""
    names = {
        "domain": "COMPUTE_DOMAIN_UUID",
        "clique": "CLIQUE_ID",
        "node": "NODE_NAME",
        "address": "POD_IP",
        "namespace": "POD_NAMESPACE",
    }
    found = {field: environment.get(name) for field, name in names.items()}
    missing = [names[field] for field, value in found.items() if value is None or (not value and field != "clique")]
    if missing:
        hint = "COMPUTE_DOMAIN_UUID and CLIQUE_ID come from the claim: is CDI enabled in the container runtime?"
        raise HostError(CODE, f"not set in this container: {', '.join(missing)}", hint)
    domain, clique, node, address, namespace = map(str, found.values())
    return ImexOptions(domain, clique, node, address, namespace)


def node_name(number: int) -> str:
    """Return the name by which daemons know the node with an index."""
    return f"{NAME}{number:04}"


def render_config(options: ImexOptions) -> str:
    """Return the configuration of nvidia-imex: in the foreground, ready without its peers, asked at its own address."""
    values = {
        "LOG_LEVEL": 4,
        "LOG_FILE_NAME": "",
        "STATS_FILE_NAME": f"{options.directory}/stats.log",
        "DAEMONIZE": 0,
        "SERVER_PORT": SERVER_PORT,
        "IMEX_NODE_CONFIG_FILE": f"{options.directory}/{NODES}",
        "IMEX_WAIT_FOR_QUORUM": "RECOVERY",
        "IMEX_CMD_ENABLED": 1,
        "IMEX_CMD_BIND_INTERFACE_IP": options.address,
        "IMEX_CMD_PORT": COMMAND_PORT,
    }
    return "".join(f"{key}={value}\n" for key, value in values.items())


def find_peers(cliques: "list[dict[str, Any]]", options: ImexOptions) -> dict[str, str]:
    """Return the addresses of the nodes of this node's clique by their names, {} while it is in none."""
    for clique in cliques:
        daemons = clique.get("daemons") or ()
        if any(each.get("nodeName") == options.node for each in daemons):
            entries = [(int(each.get("index", -1)), str(each.get("ipAddress", ""))) for each in daemons]
            return {node_name(at): text for at, text in sorted(entries) if 0 <= at < options.most and _is_address(text)}
    return {}


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def render_hosts(before: str, peers: Mapping[str, str]) -> str:
    """Return the text of /etc/hosts with the peers, in place of those that it has."""
    kept = [line for line in before.splitlines() if NAME not in line]
    return "".join(f"{line}\n" for line in [*kept, *(f"{address}\t{name}" for name, address in peers.items())])


def check_ready(options: ImexOptions) -> None:
    """Raise HostError (OCIGPU-DRA-8) unless the node's own IMEX daemon is ready, whatever its peers are."""
    if not options.clique:
        return
    command = [options.control, "-c", f"{options.directory}/{CONFIG}", "-q"]
    with OsErrorAs(HostError, CODE, f"run {options.control}"):
        done = run_program(command, 8.0)
    answer = done.output.strip()
    if done.status or answer != "READY":
        raise HostError(CODE, f"{options.control}: {printable(done.last_line, 300)}")
