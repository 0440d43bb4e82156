"""The one table that says what each error code means.

``ocigpu explain CODE`` and docs/ERRORS.md are generated from it, and a test holds that every code raised anywhere is in
it.  It is loaded when somebody is told of an error.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NamedTuple
else:
    from ocigpu.core.record import NamedTuple


class Code(NamedTuple):
    """What one error code means: ``cause`` and ``fix`` are one or two plain sentences each."""

    cause: str
    fix: str


CODES: dict[str, Code] = {
    # ARG: command line of one of our programs
    "OCIGPU-ARG-1": Code("The command line could not be understood.", "See the command's --help."),
    # SET: settings file
    "OCIGPU-SET-1": Code(
        "The settings file is missing, unreadable or not TOML.", "Correct the file, or remove it to use the defaults."
    ),
    "OCIGPU-SET-2": Code(
        "The settings file has an unknown key or a value of the wrong type.", "Run: ocigpu config check FILE"
    ),
    "OCIGPU-SET-3": Code(
        "The settings file can be changed by somebody other than the user who runs the runtime.",
        "Make file and directory owned by root (or that user), and not writable by group or others.",
    ),
    "OCIGPU-SET-4": Code(
        "A settings file could not be written; one that was there before is unchanged.",
        "Often a missing right, or a file that is there already.",
    ),
    # SPEC: bundle and config.json, OCI state
    "OCIGPU-SPEC-1": Code(
        "The bundle's config.json is missing or cannot be read.", "Check --bundle, or run from the bundle's directory."
    ),
    "OCIGPU-SPEC-2": Code(
        "The bundle's config.json is not valid JSON, or programs would read it differently.",
        "Write the bundle again with the engine.",
    ),
    "OCIGPU-SPEC-3": Code(
        "The bundle's config.json cannot describe a container with GPUs.",
        "A GPU container needs root.path and, for devices, a linux section with a mount namespace.",
    ),
    "OCIGPU-SPEC-4": Code(
        "The edited config.json could not be written.",
        "The file is unchanged. Mostly the bundle's disk is full (df -h BUNDLE) or read-only: see the message.",
    ),
    "OCIGPU-SPEC-5": Code(
        "The hook's standard input is not an OCI state.",
        "The hook is started by an OCI runtime, with the container's state on standard input.",
    ),
    # RT: low-level runtime
    "OCIGPU-RT-1": Code(
        "No low-level OCI runtime was found.", "Install runc or crun, or set runtime.runtimes in the settings."
    ),
    "OCIGPU-RT-2": Code(
        "The low-level OCI runtime could not be started.",
        "Run it by hand as root (runc --version): mostly a permission, its architecture, or a mount with noexec.",
    ),
    "OCIGPU-RT-3": Code(
        "The prestart hook that belongs to the shim is missing.",
        "Install ocigpu again, or set hook.path in the settings.",
    ),
    # REQ: what the container asks for
    "OCIGPU-REQ-1": Code(
        "The container's device request cannot be understood.",
        "NVIDIA_VISIBLE_DEVICES takes all, none, void, or a comma list of indices, UUIDs, PCI bus ids or MIG devices.",
    ),
    "OCIGPU-REQ-2": Code(
        "The container asks for a driver capability that does not exist or is not permitted.",
        "NVIDIA_DRIVER_CAPABILITIES takes compute, utility, video, graphics, display, ngx, compat32 or all.",
    ),
    "OCIGPU-REQ-3": Code(
        "A NVIDIA_REQUIRE_* condition does not hold on this host.",
        "Update the driver, use an older image, or set NVIDIA_DISABLE_REQUIRE=1 to start anyway.",
    ),
    "OCIGPU-REQ-4": Code(
        "A NVIDIA_REQUIRE_* condition cannot be understood.",
        'Write conditions like "cuda>=12.4 brand=tesla,driver>=535"; names are cuda, driver, arch, brand.',
    ),
    "OCIGPU-REQ-5": Code(
        "NVIDIA_MIG_CONFIG_DEVICES or NVIDIA_MIG_MONITOR_DEVICES was set in a container without CAP_SYS_ADMIN.",
        "Start the container privileged, or remove the variable.",
    ),
    "OCIGPU-REQ-6": Code(
        "NVIDIA_IMEX_CHANNELS is not a list of channel numbers.", "Use a comma list of numbers from 0 to 1048575."
    ),
    # HOST: driver and facts
    "OCIGPU-HOST-1": Code(
        "No NVIDIA driver was found on this host.",
        "Install the driver and load it (nvidia-smi must work), or set driver.root for a driver container.",
    ),
    "OCIGPU-HOST-2": Code(
        "The loaded kernel module and the driver libraries are of different versions.",
        "Reboot, or unload and load the nvidia kernel modules after the update.",
    ),
    "OCIGPU-HOST-3": Code(
        "A host file that describes the driver cannot be read.",
        "Look at that file: it must be readable, and one for --facts is written by ocigpu facts --json.",
    ),
    "OCIGPU-HOST-4": Code(
        "A kernel module of the driver could not be loaded.",
        "See dmesg, and run modprobe for it by hand; often it was not built for the running kernel.",
    ),
    # DEV: devices
    "OCIGPU-DEV-1": Code("The container asks for a GPU that this host does not have.", "Run: ocigpu list"),
    "OCIGPU-DEV-2": Code(
        "The requested GPU is there but cannot be given: the driver reports an error for it.",
        "See dmesg for Xid messages; reset or replace the GPU.",
    ),
    "OCIGPU-DEV-3": Code(
        "A device node could neither be created nor bind-mounted.",
        "Make the host's nodes: ocigpu system create-device-nodes; if a mount fails, look in dmesg for SELinux.",
    ),
    "OCIGPU-DEV-4": Code(
        "The device numbers of a driver component are unknown.",
        "Load the kernel module that the message names, then start the container again.",
    ),
    "OCIGPU-DEV-5": Code(
        "A device node of the host, or its link in /dev/char, could not be made or put right.",
        "It needs root outside of user namespaces (CAP_MKNOD), and a /dev that can be written to.",
    ),
    # LIB: libraries
    "OCIGPU-LIB-1": Code(
        "A driver library that the request cannot do without was not found.",
        "Check that the driver's user-space libraries are installed and of the kernel module's version.",
    ),
    # NS: namespaces and processes
    "OCIGPU-NS-1": Code(
        "The container's process is gone, or is not the container.", "The container failed before the hook ran."
    ),
    "OCIGPU-NS-2": Code(
        "The container's namespaces could not be entered.",
        "Run it as root of the machine, with the host's procfs on /proc.",
    ),
    # MNT: applying
    "OCIGPU-MNT-1": Code(
        "A file or directory could not be mounted into the container.",
        "Look what the image or a volume has at that path, and in dmesg for SELinux or AppArmor.",
    ),
    "OCIGPU-MNT-2": Code(
        "A path inside the container cannot be used as a target.",
        "The image has something unexpected at that path; see the message.",
    ),
    "OCIGPU-MNT-3": Code(
        "A link could not be made in the container.", "Remove what the image has at that path, or make it a link."
    ),
    # CG: device cgroup
    "OCIGPU-CG-1": Code(
        "The container's device cgroup could not be found or changed.",
        "Set no-cgroups = true only if something else controls device access.",
    ),
    # LD: ldconfig
    "OCIGPU-LD-1": Code(
        "The host's ldconfig could not be run for the container.", "Check the ldconfig setting; see the message."
    ),
    # CDI: specifications and devices named by them
    "OCIGPU-CDI-1": Code(
        "A CDI device name or CDI annotation cannot be understood.",
        "A device is named vendor/class=device, for example nvidia.com/gpu=0; several are separated by commas.",
    ),
    "OCIGPU-CDI-2": Code(
        "A CDI specification file cannot be read, or is not one YAML or JSON document within the limits.",
        "Correct the file, write it again (ocigpu cdi generate --output FILE) or remove it; other files stay usable.",
    ),
    "OCIGPU-CDI-3": Code(
        "A CDI specification breaks a rule of the CDI specification.", "Run: ocigpu cdi validate FILE"
    ),
    "OCIGPU-CDI-4": Code(
        "The container asks for a CDI device that no specification defines.",
        "See what there is: ocigpu cdi list; write what is missing: ocigpu cdi generate --output /etc/cdi/nvidia.yaml",
    ),
    "OCIGPU-CDI-5": Code(
        "Two CDI specifications of the same directory define the requested device.",
        "Remove one of the files that the message names, or move it to another directory; see ocigpu cdi validate.",
    ),
    "OCIGPU-CDI-6": Code(
        "A CDI specification asks for something that this host does not have or that cannot be applied.",
        "Often the specification is older than the host's state: ocigpu cdi refresh --output FILE, for one of ours.",
    ),
    "OCIGPU-CDI-7": Code(
        "No CDI specification could be generated; nothing was written, and a file from before is unchanged.",
        "See what the host has: ocigpu facts; modes and options: ocigpu cdi generate --help",
    ),
    "OCIGPU-CDI-8": Code(
        "A CDI specification could not be written; a file that was there before is unchanged.",
        "Often a missing right, a read-only file system or a full disk.",
    ),
    # CTR: containers that exist, found and looked at
    "OCIGPU-CTR-1": Code(
        "No container of this host has that id or name.",
        "See what there is: ocigpu ps --all; for a runtime that keeps its state elsewhere, name it with --state-dir.",
    ),
    "OCIGPU-CTR-2": Code("Several containers have that name, or ids that begin like that.", "Give the whole id."),
    "OCIGPU-CTR-3": Code(
        "The container does not run, so it cannot be looked into.", "Start it; ocigpu ps --all shows its status."
    ),
    "OCIGPU-CTR-4": Code(
        "It could not be found out what the running container can reach.",
        "A paused container must be resumed, a driver that hangs needs its GPU reset.",
    ),
    "OCIGPU-CTR-5": Code(
        "A GPU could not be given to a running container, or taken from it; everything begun was undone.",
        "What the container has now: ocigpu verify CONTAINER.",
    ),
    "OCIGPU-CTR-6": Code(
        "Changing or entering a running container needs root of the machine.", "Run it as root: sudo ocigpu ..."
    ),
    "OCIGPU-CTR-7": Code(
        "Processes of the container have the GPU open.",
        "End them first, or use --force: open descriptors keep working, whatever the device cgroup says then.",
    ),
    # ENG: configuration of container engines
    "OCIGPU-ENG-1": Code(
        "A configuration file of a container engine cannot be read or understood; nothing was changed.",
        "Correct the file at the line that the message names, then try again.",
    ),
    "OCIGPU-ENG-2": Code(
        "A configuration file of a container engine holds something that forbids the change; nothing was changed.",
        "Change that setting by hand, or choose another file or name.",
    ),
    "OCIGPU-ENG-3": Code(
        "The container engine's own check refuses the new configuration, or reads it otherwise than meant; nothing was "
        "changed.",
        "See the engine's message; often the file was wrong before: run the same check on the file as it is.",
    ),
    "OCIGPU-ENG-4": Code(
        "A configuration file of a container engine could not be written; the file is as it was.",
        "Mostly a missing right, a read-only file system, or a directory that others can write.",
    ),
    "OCIGPU-ENG-5": Code(
        "The installed container engine does not have what was asked for, or ocigpu's program for it is missing.",
        "Install ocigpu or a newer engine, or leave the option out.",
    ),
    "OCIGPU-ENG-6": Code(
        "ocigpu was to be removed, and something needs it: a container started with it, or an engine that would "
        "start containers with it; nothing was removed.",
        "End what the message names, or take it out of the engine; then remove ocigpu again.",
    ),
    # KUBE: device plugin
    "OCIGPU-KUBE-1": Code(
        "The configuration of the Kubernetes device plugin cannot be read or understood.",
        "The message names the key, variable or option; the file has the schema of NVIDIA's device plugin.",
    ),
    "OCIGPU-KUBE-2": Code(
        "The kubelet asks for devices that cannot be given to a container.",
        "Delete the pod, so that its controller makes another.",
    ),
    "OCIGPU-KUBE-3": Code(
        "The Kubernetes device plugin cannot do its work: its socket, or what it is made of.",
        "It must run as root, with the kubelet's directory of device plugins.",
    ),
    "OCIGPU-KUBE-4": Code(
        "The options or the collectors file of the metrics exporter cannot be read, understood or obeyed.",
        'The message names the line, option or variable; "ocigpu exporter --print-collectors" prints a good file.',
    ),
    "OCIGPU-KUBE-5": Code(
        "The API server of the cluster cannot be reached, or refuses what the service account asks for.",
        "See the words in the message: rights are in packaging/kubernetes, 404 means a missing type of resource.",
    ),
    "OCIGPU-KUBE-6": Code(
        "A control daemon of CUDA's Multi-Process Service cannot be run; its resource is not offered meanwhile.",
        "It needs a privileged pod with the driver's programs, and GPUs nobody uses.",
    ),
    "OCIGPU-KUBE-7": Code(
        "The driver gives no answer about GPUs that are on the PCI bus, so the node cannot be labelled.",
        "Look for the reason on the node: ocigpu doctor; in a pod the runtime must give it the GPUs.",
    ),
    "OCIGPU-KUBE-8": Code(
        "ocigpu could not be installed on this node, or its container engine not told of it.",
        "More is in the pod's log and in the node's annotation ocigpu/runtime.",
    ),
    # LEASE: GPUs lent to tenants
    "OCIGPU-LEASE-1": Code(
        "The journal of GPU leases cannot be read or written; no GPU is given away meanwhile.",
        "See the words in the message: a full disk, a missing right, or another program that holds the lock.",
    ),
    "OCIGPU-LEASE-2": Code(
        "A GPU is asked for whose lease is not Free.",
        'The message says where it is and why; "ocigpu lease show GPU" says what it waits for.',
    ),
    "OCIGPU-LEASE-3": Code(
        "An operator's act is not possible with the lease as it is now, or names another generation.",
        'See the lease: "ocigpu lease show GPU"; then name the generation that it has.',
    ),
    "OCIGPU-LEASE-4": Code(
        "What the agent needs to take a GPU back does not answer: the kubelet, or the check.",
        "The GPU stays where it is meanwhile; the agent goes on when it answers.",
    ),
    # TEN: tenancies
    "OCIGPU-TEN-1": Code(
        "A tenancy that is named is not there, or what the commands for tenancies need is not installed.",
        "Names: \"ocigpu tenancy list\"; the client library: pip install 'ocigpu[kubernetes]'.",
    ),
    "OCIGPU-TEN-2": Code(
        "This replica of the tenancy controller stopped, because another one may be leading.",
        "Nothing is to be done: one of them leads again within some seconds.",
    ),
    # CAAS: containers as a service
    "OCIGPU-CAAS-1": Code(
        "The service for containers cannot start: an option, its store, its address, or the cluster's configuration.",
        "The message names it; docs/CAAS.md has what each option means.",
    ),
    "OCIGPU-CAAS-2": Code(
        "The service for containers refuses a request; the message begins with its problem code.",
        "docs/CAAS.md lists the problem codes with what to do.",
    ),
    "OCIGPU-CAAS-3": Code(
        "The service for containers cannot be reached, or something else answers at its address.",
        "Check --url (or OCIGPU_CAAS_URL), --ca, and the service's log.",
    ),
    # MIG: layouts
    "OCIGPU-MIG-1": Code(
        "The file of MIG layouts cannot be used, or has no such layout.",
        "The format is that of NVIDIA's mig-parted, version v1; see: ocigpu mig export",
    ),
    "OCIGPU-MIG-2": Code(
        "The MIG layout is not possible on these GPUs.",
        "Run: ocigpu mig plan, with the same options. Nothing was changed.",
    ),
    "OCIGPU-MIG-3": Code(
        "NVML could not read or change the MIG devices.",
        "Needs root. A device that a process uses cannot be destroyed: ocigpu top shows them.",
    ),
    "OCIGPU-MIG-4": Code("MIG mode changes only with a reset of the GPU.", "Reset it, then run the command again."),
    "OCIGPU-MIG-5": Code("A program of the file of hooks failed.", "Run it by hand; the message has what it said."),
    "OCIGPU-MIG-6": Code(
        "The MIG manager could not use the host.",
        "It needs the host's root (--host-root), and ocigpu on the host.",
    ),
    # VFIO: GPUs that virtual machines get
    "OCIGPU-VFIO-1": Code(
        "It could not be found out who has a GPU that is bound to VFIO.",
        "Run it as root, in the host's PID namespace (in a pod: hostPID: true).",
    ),
    "OCIGPU-VFIO-2": Code(
        "The GPU was not reset: a process has it.",
        "See who: ocigpu vfio holders. A virtual machine without a pod is ended by its process id.",
    ),
    "OCIGPU-VFIO-3": Code(
        "The GPU cannot be reset here: a reset would reach too much, or there is none that is right for the board.",
        "See what it would be: ocigpu vfio reset GPU --dry-run. Nothing was changed.",
    ),
    "OCIGPU-VFIO-4": Code(
        "The reset of a GPU failed on the way; the GPU must not be used.",
        "See dmesg; a GPU that has left the bus needs a restart of the machine, as a rule.",
    ),
    "OCIGPU-VFIO-5": Code(
        "A reset was asked for and nothing was reset: what the last user left is still in the GPU.",
        "Try it again; then see whether firmware or a hypervisor below keeps resets from the port.",
    ),
    "OCIGPU-VFIO-6": Code(
        "The GPU was reset, but did not say that it has started up and cleared its memory.",
        "Reset it again; else have its memory sampled in a virtual machine that checks (vfio reset --no-scrub).",
    ),
    "OCIGPU-VFIO-7": Code(
        "The module id of a GPU is unknown, or its sources contradict each other; nothing was changed.",
        "After a board was replaced: ocigpu vfio identify --record --replaced",
    ),
    # FW: firmware of GPUs, board controllers
    "OCIGPU-FW-1": Code(
        "A board controller (Redfish), or NVML, gives no answer, or tells nothing of GPUs.",
        "Look at the address, the account, and the certificate (--bmc-ca or --fingerprint); see what curl says.",
    ),
    "OCIGPU-FW-2": Code(
        "A board controller, or a file of facts on firmware, says what cannot be: it is not believed.",
        "Restart the board controller and ask again; else find out what answers at its address.",
    ),
    "OCIGPU-FW-3": Code(
        "The file with the credentials for a board controller cannot be used.",
        "One line USER:PASSWORD, owned by root or the caller, mode 0600.",
    ),
    "OCIGPU-FW-4": Code(
        "The file with the firmware baseline cannot be used, or nobody has signed it off.",
        "Make it: ocigpu firmware record FILE; look at it; then: ocigpu firmware approve FILE --by NAME",
    ),
    # SIM: simulated host
    "OCIGPU-SIM-1": Code(
        "The simulated host could not be made or read.",
        "Run it as root, with gcc or cc installed, for a directory that is new or a simulated host.",
    ),
    # FAB: NVLink partitions by Fabric Manager
    "OCIGPU-FAB-1": Code(
        "The address of Fabric Manager, or its library libnvfm.so.1, cannot be used.",
        "--library names the library (package nvidia-fabricmanager-dev); --address is tcp:IPV4[:PORT], unix:PATH or"
        " vsock:CID:PORT, and a path that of FM_CMD_UNIX_SOCKET_PATH in fabricmanager.cfg.",
    ),
    "OCIGPU-FAB-2": Code(
        "Fabric Manager cannot be reached, or does not answer.",
        "Look at the service machine: systemctl status nvidia-fabricmanager; it listens on FM_CMD_BIND_INTERFACE"
        " (127.0.0.1 unless changed) or, where that is set, on FM_CMD_UNIX_SOCKET_PATH alone.",
    ),
    "OCIGPU-FAB-3": Code(
        "Fabric Manager does not partition: every GPU reaches every other one by NVLink.",
        "Set FABRIC_MODE=1 in fabricmanager.cfg of the service machine and restart it; never give such GPUs to several"
        " tenants.",
    ),
    "OCIGPU-FAB-4": Code(
        "The board has no such partition, or none that is free.", "See the sets that there are: ocigpu fabric list"
    ),
    "OCIGPU-FAB-5": Code(
        "A GPU of the set is in another active partition.",
        "End and reset its user, then deactivate that partition; ocigpu fabric activate --replace does the latter.",
    ),
    "OCIGPU-FAB-6": Code(
        "Fabric Manager refused to activate or deactivate a partition, or it did not happen.",
        "Reset the GPUs of the set and try once more; if it fails again, use none of them and read the manager's log.",
    ),
    "OCIGPU-FAB-7": Code(
        "Fabric Manager is starting, or was restarted and waits for the partitions that were active.",
        "Run: ocigpu fabric restore; it has to come within a minute of the restart.",
    ),
    "OCIGPU-FAB-8": Code(
        "Library and Fabric Manager do not understand each other, or the answer makes no sense.",
        "Install libnvfm of the branch that the service machine's Fabric Manager has.",
    ),
    "OCIGPU-FAB-9": Code(
        "The host's state of its partitions cannot be read or written.",
        "Make it a file that can be read and written; where no GPU is in use it can be removed.",
    ),
    "OCIGPU-FAB-10": Code(
        "The service in front of Fabric Manager does not let the caller in.",
        "ocigpu fabric serve --allow names who may call: a name in the client's certificate, cid:2 or uid:0.",
    ),
    # DEMO: ocigpu demo
    "OCIGPU-DEMO-1": Code(
        "The demo cannot be run here: something that it needs is missing.",
        "Run it as root on a machine with runc or crun, and with busybox (package busybox-static).",
    ),
    "OCIGPU-DEMO-2": Code(
        "A step of the demo did not give the expected result.",
        "The message says what was expected; the container's own output is above it.",
    ),
    # DRA: driver of dynamic resource allocation
    "OCIGPU-DRA-1": Code(
        "A resource claim is not one that can be prepared here: deleted, replaced, not allocated, or of another node.",
        "The kubelet asks again while the pod waits; delete the pod if its claim is gone.",
    ),
    "OCIGPU-DRA-2": Code(
        "The configuration that a claim or device class carries for the driver is wrong, or does not suit the device.",
        "The message names the field; kinds and fields are those of resource.nvidia.com/v1beta1 (docs/DRA.md).",
    ),
    "OCIGPU-DRA-3": Code(
        "A device that was allocated to a claim is not on this node now, or cannot be made ready.",
        "See on the node: ocigpu doctor; the kubelet asks again while the pod waits.",
    ),
    "OCIGPU-DRA-4": Code(
        "A device that was allocated to a claim is still in use by another one.",
        "It is given when the pods of the other claim have ended; the message names that claim.",
    ),
    "OCIGPU-DRA-5": Code(
        "The DRA driver cannot read or write its own files, in which prepared claims are written down.",
        "They are below the kubelet's directory plugins, in that of the driver; the disk may be full.",
    ),
    "OCIGPU-DRA-6": Code(
        "The DRA driver cannot serve the kubelet, or was started with options that make no sense.",
        "It must run as root, with the kubelet's directories plugins and plugins_registry.",
    ),
    "OCIGPU-DRA-7": Code(
        "The node's devices cannot be published: the API server refuses or changes the ResourceSlices.",
        "The message has the server's words; Kubernetes 1.34 or later is needed, and the chart's rights.",
    ),
    # TRC: traces
    "OCIGPU-TRC-1": Code(
        "The trace cannot be read.",
        "Name the file that OCIGPU_TRACE or the setting trace names; the next start of a container makes it.",
    ),
    "OCIGPU-TRC-2": Code(
        "The file has no start of a container, or none of the container that was named.",
        "Start the container with OCIGPU_TRACE=FILE in the environment of ocigpu-runtime, or with the setting trace.",
    ),
    # INT: defects
    "OCIGPU-INT-1": Code(
        "An unexpected error inside ocigpu: a defect.", "Set OCIGPU_DEBUG=1 for a traceback and report it."
    ),
    "OCIGPU-INT-2": Code(
        "The process that works inside the container was killed before it was done.",
        "What it had done was undone; look for the out-of-memory killer in dmesg, then start the container again.",
    ),
    "OCIGPU-INT-3": Code(
        "The Python that ocigpu was installed for, or a part of ocigpu itself, is missing or damaged.",
        "Install that Python and ocigpu again, the way they were installed: packages, make install or pipx.",
    ),
    "OCIGPU-INT-4": Code(
        "The system refused something that every program needs: a process, memory, an open file or space on a disk.",
        "Look at the limits (ulimit -a, pids.max and memory.max of the cgroup), disks and dmesg, then start it again.",
    ),
    "OCIGPU-INT-5": Code(
        "Something that a start needs gave no answer in time; the message names the step and its path.",
        "A file system that hangs, as a rule: look at the path's mount (findmnt --target PATH) and at dmesg.",
    ),
}

AREAS = {
    "ARG": "Command line",
    "SET": "Settings",
    "SPEC": "Bundle and OCI configuration",
    "RT": "Low-level runtime",
    "REQ": "Requests of containers",
    "HOST": "Driver and host",
    "DEV": "Devices",
    "LIB": "Driver libraries",
    "NS": "Namespaces and processes",
    "MNT": "Mounts, files and links in containers",
    "CG": "Device cgroup",
    "LD": "Loader cache",
    "CDI": "CDI specifications and devices named by them",
    "CTR": "Containers that exist",
    "ENG": "Configuration of container engines",
    "KUBE": "Kubernetes device plugin",
    "LEASE": "Leases of GPUs",
    "TEN": "Tenancies",
    "CAAS": "Containers as a service",
    "MIG": "MIG layouts",
    "VFIO": "GPUs for virtual machines",
    "FW": "Firmware and board controllers",
    "SIM": "Simulated host",
    "FAB": "NVLink partitions by Fabric Manager",
    "DEMO": "Demo",
    "DRA": "Kubernetes DRA driver",
    "TRC": "Traces",
    "INT": "Defects",
}
"""Titles of the groups of codes, by the second part of a code."""
