"""Every check, in the order in which causes come before their effects.  docs/DOCTOR.md is generated from it."""

from ocigpu.doctor import containers, docker, driver, engines, nodes, settings, specs, system
from ocigpu.doctor.records import Check

CHECKS = (
    Check(
        "simulated-host", "simulated host in use",
        "Nothing can be computed on a simulated host. Containers start and see GPUs that do not exist.",
        system.check_simulated,
    ),
    Check(
        "settings-unusable", "settings file unreadable or wrong",
        "A settings file that cannot be used stops every container that asks for a GPU: guessing could give too much.",
        settings.check_settings,
    ),
    Check(
        "programs-broken", "programs of ocigpu or their Python missing",
        "Engines run ocigpu-runtime and ocigpu-hook. When the Python they were installed with is removed by an update "
        "of the system, they cannot start.",
        settings.check_programs,
    ),
    Check(
        "runtime-missing", "no low-level runtime",
        "ocigpu-runtime edits a container's configuration and then becomes runc or crun.",
        settings.check_runtime,
    ),
    # The driver
    Check(
        "no-gpu", "no GPU on the PCI bus",
        "Without a GPU there is nothing to give. A virtual machine sees one only when it is passed through.",
        driver.check_gpu,
    ),
    Check(
        "nouveau-loaded", "nouveau has the GPUs",
        "The kernel's own driver nouveau takes the cards at boot, and NVIDIA's module then finds none.",
        driver.check_nouveau,
    ),
    Check(
        "no-driver", "no driver loaded",
        "The kernel module makes the devices; libraries alone do nothing. After a kernel update it often has to be "
        "built anew (DKMS).",
        driver.check_driver,
    ),
    Check(
        "gpu-other-driver", "GPU bound to another driver",
        "A card that vfio-pci has is reserved for virtual machines; one without a driver was often left behind by a "
        "program that ended early.",
        driver.check_binding,
    ),
    Check(
        "driver-libraries", "libraries of the driver missing",
        "Containers get libcuda and libnvidia-ml from the host: an image must not bring its own.",
        driver.check_libraries,
    ),
    Check(
        "driver-library-mismatch", "kernel module and libraries of different versions",
        "An update of the driver replaces its libraries at once and its kernel module at the next boot. Until then "
        'NVML says "Driver/library version mismatch".',
        driver.check_versions,
    ),
    Check(
        "nvml-failed", "NVML does not answer",
        "nvidia-smi and every tool ask NVML. When it fails on the host it fails in every container.",
        driver.check_nvml,
    ),
    Check(
        "gpu-lost", "GPU lost or not listed",
        "A GPU that has fallen off the bus stays listed by the kernel and fails every call. Only a reset or a reboot "
        "brings it back.",
        driver.check_lost,
    ),
    Check(
        "persistence-off", "persistence mode off",
        "Without it the driver puts an idle GPU to sleep, and the next container waits until all are awake again.",
        nodes.check_persistence,
    ),
    Check(
        "fabric-manager", "fabric manager not running beside NVSwitches",
        "On machines with NVSwitches CUDA works only after the fabric manager, of the driver's very version, has set "
        "them up.",
        nodes.check_fabric_manager,
    ),
    # Nodes
    Check(
        "device-nodes-missing", "device nodes missing",
        "The driver does not make its nodes in /dev: nvidia-smi does, or nvidia-modprobe, when root runs them after "
        "boot.",
        nodes.check_missing,
    ),
    Check(
        "uvm-missing", "nvidia-uvm or its nodes missing",
        "CUDA needs nvidia-uvm and nvidia-smi does not, so everything looks well until a program computes.",
        nodes.check_uvm,
    ),
    Check(
        "device-nodes-wrong", "device nodes with another number or other permissions",
        "Majors are given out anew at each boot. A node that was kept, in a container's image or in a snapshot, can "
        "name another device.",
        nodes.check_wrong,
    ),
    Check(
        "dev-char-links", "links in /dev/char missing",
        "systemd looks a device up by /dev/char/MAJOR:MINOR when it writes the rules of a cgroup. The driver makes no "
        "such links, so a daemon-reload takes the GPU away from running containers.",
        nodes.check_links,
    ),
    Check(
        "mig-pending", "change of MIG mode waits for a reset",
        "MIG mode changes when the GPU is reset, which needs it to be idle.",
        nodes.check_mig_mode,
    ),
    Check(
        "mig-half-configured", "MIG mode without instances",
        "A GPU in MIG mode without instances can be used by nobody, and a GPU instance needs a compute instance to be "
        "a device.",
        nodes.check_mig_instances,
    ),
    Check(
        "mig-nodes", "nodes of MIG capabilities missing",
        "A container opens its MIG device through /dev/nvidia-caps.",
        nodes.check_mig_nodes,
    ),
    # CDI
    Check(
        "cdi-missing", "no CDI specification where one is needed",
        "CDI devices exist only as far as a specification describes them.",
        specs.check_missing,
    ),
    Check(
        "cdi-unreadable", "CDI specification that cannot be used",
        "Engines leave out a file with a mistake, and say only that a device is unknown.",
        specs.check_unreadable,
    ),
    Check(
        "cdi-stale", "CDI specification older than the driver",
        "A specification names files of one driver version. After an update they are gone or are the wrong ones.",
        specs.check_stale,
    ),
    Check(
        "cdi-partial", "CDI specification without device nodes",
        "One that was written before the nodes were there gives libraries and no GPU, and no engine complains.",
        specs.check_partial,
    ),
    Check(
        "cdi-too-new", "CDI specification too new for an engine",
        "An engine refuses a version, or a field, that it does not know, and with it the whole file.",
        specs.check_too_new,
    ),
    Check(
        "cdi-duplicate", "CDI device defined twice",
        "Of two directories the later one wins, which may be the stale file. Twice in one directory is refused.",
        specs.check_duplicate,
    ),
    Check(
        "cdi-hook-missing", "program of a CDI hook missing",
        "A specification that was written by a tool that is no longer installed stops every container that uses it.",
        specs.check_hooks,
    ),
    # Engines
    Check(
        "engine-config-broken", "configuration of an engine cannot be read",
        "A daemon with a mistake in its file does not start again.",
        engines.check_problems,
    ),
    Check(
        "engine-not-configured", "engine that knows nothing of GPUs",
        "An engine needs a runtime entry, a hook for --gpus, or CDI.",
        engines.check_configured,
    ),
    Check(
        "engine-runtime-missing", "engine configured for a program that is not there",
        "The entry stayed when the program went. As the default runtime it stops every container.",
        engines.check_runtimes,
    ),
    Check(
        "docker-gpus-hook", "Docker's --gpus without its hook",
        "At its start dockerd looks for a program named nvidia-container-runtime-hook on its PATH. Without one --gpus "
        f"fails with: {engines.NO_DRIVER_ERROR}.",
        docker.check_gpus_hook,
    ),
    Check(
        "docker-cdi-off", "Docker's CDI switched off",
        "Docker 25 to 28.1 take CDI devices only with features.cdi in daemon.json.",
        docker.check_docker_cdi,
    ),
    Check(
        "docker-not-restarted", "dockerd does not know its present configuration",
        "dockerd reads new runtimes when it starts or reloads, CDI and the hook only when it starts.",
        docker.check_restarted,
    ),
    Check(
        "docker-snap", "Docker from a snap",
        "A snap is confined: it sees neither the driver's files nor /etc/docker.",
        docker.check_snap,
    ),
    Check(
        "docker-context", "docker command with another context",
        "Docker Desktop and remote contexts are other machines, with other GPUs or none.",
        docker.check_context,
    ),
    Check(
        "containerd-two-configs", "several configurations of containerd",
        "k3s, RKE2 and a system's own containerd each read a file of their own.",
        engines.check_two_containerds,
    ),
    Check(
        "systemd-cgroup-loses-devices", "systemd may take devices back",
        "Where systemd manages cgroups it writes device rules anew at each daemon-reload, and knows only those that "
        "were declared: a hook's are lost.",
        engines.check_systemd_cgroups,
    ),
    Check(
        "vendor-toolkit", "the vendor's toolkit beside ocigpu",
        "Both can be installed. Two services that write one file take turns.",
        engines.check_vendor,
    ),
    # The system
    Check(
        "no-cgroups-mismatch", "no-cgroups does not fit the engines",
        "With no-cgroups nobody tells the device cgroup of the GPU: for root's containers that means no access.",
        settings.check_no_cgroups,
    ),
    Check(
        "rootless-no-ids", "rootless user without subordinate ids",
        "A rootless container needs a range of user and group ids of its own.",
        system.check_subordinate_ids,
    ),
    Check(
        "rootless-no-delegation", "cgroups not delegated to rootless users",
        "systemd passes only some controllers on to users unless it is told.",
        system.check_delegation,
    ),
    Check(
        "selinux-denies", "SELinux refuses devices to containers",
        "The policy lets containers use devices only with a boolean, whatever the nodes' permissions say.",
        system.check_selinux,
    ),
    Check(
        "apparmor-denies", "AppArmor refuses something of the driver",
        "A profile that was written for other programs can keep a container from the driver's files.",
        system.check_apparmor,
    ),
    Check(
        "ldconfig-missing", "no ldconfig to run for containers",
        "In mode hook the loader's cache of a container is written by the host's ldconfig.",
        system.check_ldconfig,
    ),
    Check(
        "kernel-too-old", "kernel too old for a feature in use",
        "Older kernels lack calls that ocigpu uses. Most have a slower way.",
        system.check_kernel,
    ),
    Check(
        "container-lost-gpu",
        "running containers that have lost a GPU",
        "Rules that a hook wrote into a container's device cgroup go when systemd or the runtime writes it anew: after "
        "systemctl daemon-reload or docker update.",
        containers.check_lost_gpus,
    ),
    Check(
        "driver-capabilities",
        "images that use driver files their containers have not",
        "NVIDIA's default mode gives every driver file, whatever NVIDIA_DRIVER_CAPABILITIES says. Here it counts, and "
        "where it is not set a container gets compute and utility: no graphics, no video.",
        containers.check_driver_capabilities,
    ),
    Check(
        "deleted-driver-files", "running programs hold replaced driver files",
        "An update replaces files; a container that was started before keeps the old ones, which no longer fit the "
        "driver.",
        system.check_deleted,
    ),
)  # fmt: skip
