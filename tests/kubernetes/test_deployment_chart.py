"""The Helm chart and the plain manifests: valid objects that fit together and to the programs."""

import functools
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from deployment_lab import CASES, CHART, DEPLOYMENT, RENDERER, Object, admits, containers, objects, of_kind
from support.api_server import FakeApiServer, make_account
from support.process import run
from support.product import PROGRAMS, REPOSITORY
from support.products import one_in

from ocigpu import __version__
from ocigpu.kubernetes.installer import program as node_installer
from ocigpu.kubernetes.labels.program import find_place, publish, withdraw
from ocigpu.kubernetes.mig import manager as mig_manager
from ocigpu.kubernetes.mps.daemon import check_size
from ocigpu.kubernetes.node.config import (
    OPTIONS,
    CommandInput,
    PluginOptions,
    parse_config_file,
    parse_flags,
    read_configuration,
)

every_case = pytest.mark.parametrize("found", CASES, indirect=True)
FOREIGN = ("monitoring.coreos.com/v1",)
ON_HOST = ("node-installer", "mig-manager")
"""Programs with the host's root, privileged."""
WIDE = {f"{kind}{more}" for kind in ("ClusterRole", "ValidatingAdmissionPolicy") for more in ("", "Binding")}
WIDE.add("RuntimeClass")
GPU_NODE = {"nvidia.com/gpu.present": "true", "nvidia.com/mps.capable": "true"}


@functools.cache
def of_case(name: str) -> list[Object]:
    return objects(CASES[name])


@pytest.fixture
def found(request: pytest.FixtureRequest) -> list[Object]:
    """The objects of a case; tests only look at them."""
    return of_case(request.param)


@functools.cache
def validate(text: str, version: str) -> None:
    """Most objects are the same in most cases."""
    kubernetes_validate.validate(json.loads(text), version, strict=True)


@pytest.mark.product(single=True)
@every_case
@pytest.mark.parametrize("version", ["1.30", "1.37"])
def test_objects_are_those_of_kubernetes(found: list[Object], version: str) -> None:
    for each in found:
        if each["apiVersion"] not in FOREIGN:
            validate(json.dumps(each), version)


@every_case
def test_objects_are_of_the_namespace_and_of_one_name_each(found: list[Object]) -> None:
    names = [(each["kind"], each["metadata"]["name"]) for each in found]
    assert len(set(names)) == len(names)
    for each in found:
        assert each["metadata"].get("namespace") == (None if each["kind"] in WIDE else "gpu")


@every_case
def test_selectors_choose_their_own_pods_and_no_others(found: list[Object]) -> None:
    daemon_sets = of_kind(found, "DaemonSet")
    labels = {name: each["spec"]["template"]["metadata"]["labels"] for name, each in daemon_sets.items()}
    for name, each in daemon_sets.items():
        selector = each["spec"]["selector"]["matchLabels"].items()
        assert [other for other, theirs in labels.items() if selector <= theirs.items()] == [name]
    for service in of_kind(found, "Service").values():
        selector = service["spec"]["selector"].items()
        (chosen,) = [name for name, theirs in labels.items() if selector <= theirs.items()]
        (container,) = daemon_sets[chosen]["spec"]["template"]["spec"]["containers"]
        assert service["spec"]["ports"][0]["targetPort"] == container["ports"][0]["name"]
        for monitor in of_kind(found, "ServiceMonitor").values():
            assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()


@every_case
def test_accounts_exist_and_only_those_that_ask_the_api_server_have_a_token(found: list[Object]) -> None:
    accounts = of_kind(found, "ServiceAccount")
    used = {pod["serviceAccountName"] for pod, _ in containers(found)}
    assert used == set(accounts)
    assert not any(each["automountServiceAccountToken"] for each in accounts.values())
    tokens = {pod["serviceAccountName"] for pod, _ in containers(found) if pod["automountServiceAccountToken"]}
    first = "gpus" if "gpus-node-labels" in accounts else "ocigpu"
    asking = {f"{first}-{name}" for name in ("node-labels", "exporter", *ON_HOST)}
    assert tokens <= asking
    for kind in ("Role", "ClusterRole"):
        roles, bindings = of_kind(found, kind), of_kind(found, f"{kind}Binding")
        assert {each["roleRef"]["name"] for each in bindings.values()} == set(roles)
        for binding in bindings.values():
            (subject,) = binding["subjects"]
            name = binding["roleRef"]["name"]
            assert name in asking
            assert subject == {"kind": "ServiceAccount", "name": name, "namespace": "gpu"}
            assert binding["roleRef"]["kind"] == kind


def rights(found: list[Object]) -> set[tuple[str, str, str]]:
    """Return (API group, resource, verb) of all roles."""
    rules = [
        rule for kind in ("Role", "ClusterRole") for role in of_kind(found, kind).values() for rule in role["rules"]
    ]
    return {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


@pytest.mark.parametrize(("target", "removing"), [("node-feature", False), ("node-feature", True), ("node", False)])
def test_rights_are_those_that_the_program_uses(tmp_path: Path, target: str, removing: bool) -> None:
    make_account(tmp_path)
    server = FakeApiServer(tmp_path)
    server.objects = {"/api/v1/nodes/n": {"metadata": {}}, "/api/v1/namespaces/gpu/pods/p": {"metadata": {}}}
    try:
        place = find_place(
            PluginOptions(), target, {"NODE_NAME": "n", "POD_NAME": "p", "POD_NAMESPACE": "gpu"}, server.place
        )
        for value in "12":
            publish(place, {"nvidia.com/gpu.count": value})
        if removing:
            withdraw(place)
    finally:
        server.close()
    used = set()
    for method, path in server.requests:
        group = path.split("/")[2] if path.startswith("/apis/") else ""
        used.add((group, path.split("/")[-2], method.lower()))
    if target == "node-feature":
        used.add(("nfd.k8s-sigs.io", "nodefeatures", "create"))  # apply makes what is not there
    arguments = ["--remove-on-exit"] if removing else []
    assert rights(objects({"nodeLabels": {"target": target, "args": arguments}})) == used


@pytest.mark.parametrize(
    ("values", "asks"),
    [
        ({}, False),
        ({"enablePodLabels": True}, True),
        ({"enablePodUID": True}, True),
        ({"enablePodUID": True, "pods": False}, False),
        ({"enablePodUID": True, "enabled": False}, False),
    ],
)
def test_the_exporter_may_read_pods_only_where_it_does(values: Object, asks: bool) -> None:
    found = objects({"exporter": values, "nodeLabels": {"enabled": False}})
    assert rights(found) == ({("", "pods", "get")} if asks else set())
    tokens = {container["name"] for pod, container in containers(found) if pod["automountServiceAccountToken"]}
    assert tokens == ({"exporter"} if asks else set())


def flags_of(container: Object, environment: dict[str, str]) -> CommandInput | None:
    """Return what a container's program is told by its words that are options of the device plugin's family."""
    program, *words = container["args"]
    if program == "device-plugin":
        return parse_flags([word for word in words if word != "--log-format=json"], environment)
    if program not in ("node-labels", "mps-control-daemon"):
        return None
    own = ("--json", "--publish=", "--shm-size=", "--remove-on-exit")
    words = [word for word in words if not word.startswith(own)]
    return parse_flags(words, environment, program)


@every_case
def test_configurations_are_accepted_by_the_programs(found: list[Object], tmp_path: Path) -> None:
    maps = of_kind(found, "ConfigMap")
    files = [each["data"] for name, each in maps.items() if name.endswith("-config")]
    for name, text in files[0].items() if files else ():
        (tmp_path / name).write_text(text)
        assert parse_config_file(text, name)[1] == ()
    if not files:
        (tmp_path / "default").write_text("version: v1\n")
    for _, container in containers(found):
        environment = {each["name"]: each["value"] for each in container["env"] if "value" in each}
        told = flags_of(container, environment)
        if told is None:
            continue
        assert Path(told.file).parent == Path("/config")
        configuration = read_configuration(told._replace(file=str(tmp_path / Path(told.file).name)))
        assert configuration.options.mps_root
        if container["args"][0] == "device-plugin":
            socket = configuration.options.kubelet_socket
            assert os.path.dirname(socket) in [mount["mountPath"] for mount in container["volumeMounts"]]


@pytest.mark.parametrize("case", one_in(2, ["as it is", "everything", "other places", "nodes that nobody logs into"]))
def test_command_lines_are_accepted_by_the_programs(case: str) -> None:
    """The first word that is not known is the one that we add: options are read in order, before anything is done."""
    for _, container in containers(objects(CASES[case])):
        said = run([PROGRAMS / "ocigpu", *container["args"], "--no-such-option"], check=False)
        assert said.returncode == 2, said.stderr
        assert "--no-such-option" in said.stderr


@every_case
def test_sizes_of_shared_memory_are_accepted(found: list[Object]) -> None:
    for _, container in containers(found):
        for word in container["args"]:
            if word.startswith("--shm-size="):
                check_size(word.partition("=")[2])


@every_case
def test_mounts_have_their_volumes_and_maps(found: list[Object]) -> None:
    maps = {*of_kind(found, "ConfigMap"), "mine"}
    for pod, container in containers(found):
        mounted = [mount["name"] for mount in container.get("volumeMounts", [])]
        assert sorted(mounted) == sorted(volume["name"] for volume in pod.get("volumes", []))
        assert {volume["configMap"]["name"] for volume in pod.get("volumes", []) if "configMap" in volume} <= maps


@every_case
def test_host_paths_are_read_only_but_for_what_the_program_writes(found: list[Object]) -> None:
    writable = {
        "device-plugin": {"device-plugins", "cdi", "simulation"},
        "mps-control-daemon": {"mps", "simulation"},
        "node-labels": {"simulation"},
        "exporter": {"simulation"},
        "node-installer": {"host"},
        "mig-manager": {"host"},
    }
    for pod, container in containers(found):
        host = {volume["name"] for volume in pod.get("volumes", []) if "hostPath" in volume}
        written = {mount["name"] for mount in container.get("volumeMounts", []) if not mount.get("readOnly")} & host
        assert written <= writable[container["name"]]
        assert not any(pod.get(name) for name in ("hostNetwork", "hostIPC"))
        assert not pod.get("hostPID") or container["name"] in ("mps-control-daemon", *ON_HOST)


@every_case
def test_rights_of_containers_are_as_few_as_can_be(found: list[Object]) -> None:
    for pod, container in containers(found):
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"] is True
        simulated = any(volume["name"] == "simulation" for volume in pod.get("volumes", []))
        if security.get("privileged"):
            assert simulated or container["name"] in ("mps-control-daemon", *ON_HOST)
            continue
        assert security["allowPrivilegeEscalation"] is False
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert security["capabilities"]["drop"] == ["ALL"]
        assert security["capabilities"].get("add", []) in ([], ["SYS_ADMIN"])
        assert security.get("runAsNonRoot") is not (security["runAsUser"] == 0)


def test_by_default_only_those_are_root_that_must_be() -> None:
    users = {each["name"]: each["securityContext"]["runAsUser"] for _, each in containers(objects({}))}
    assert users == {"device-plugin": 0, "exporter": 0, "node-labels": 65532}
    added = [each["securityContext"]["capabilities"].get("add") for _, each in containers(objects({}))]
    assert added == [None, None, None]
    users = {each["name"]: each["securityContext"]["runAsUser"] for _, each in containers(objects(CASES["few rights"]))}
    assert users["exporter"] == 65532


@every_case
def test_every_gpu_node_has_one_pod_of_each_kind(found: list[Object]) -> None:
    files = of_kind(found, "ConfigMap").get("ocigpu-config", {"data": {"default": ""}})["data"]
    for chosen in (None, "default", "shared", "mixed", "unknown"):
        labels = GPU_NODE if chosen is None else {**GPU_NODE, "nvidia.com/device-plugin.config": chosen}
        pods = [(each["name"], each["args"]) for pod, each in containers(found) if admits(pod, labels)]
        assert len({name for name, _ in pods}) == len(pods)
        for name, words in pods:
            if name not in ("exporter", *ON_HOST):
                assert f"--config-file=/config/{chosen if chosen in files else 'default'}" in words
    assert not any(admits(pod, {}) for pod, _ in containers(found)), "nodes without GPUs have none"
    capable = {"nvidia.com/gpu.present": "true"}
    assert not any(admits(pod, capable) for pod, each in containers(found) if each["name"] == "mps-control-daemon")


@every_case
def test_the_memory_of_what_a_network_reaches_is_bounded(found: list[Object]) -> None:
    for _, container in containers(found):
        if "ports" in container:
            assert container["resources"]["limits"]["memory"] == "512Mi"


HOST_ROOTS: list[tuple[dict[str, Any], bool]] = [
    ({}, False),
    ({"devicePlugin": {"deviceListStrategy": "volume-mounts"}}, False),
    ({"devicePlugin": {"deviceListStrategy": "envvar,cdi-annotations"}}, True),
    ({"devicePlugin": {"args": ["--device-list-strategy=cdi-cri"]}}, True),
    ({"devicePlugin": {"args": ["--pass-device-specs"]}}, True),
    ({"config": {"files": {"more": "flags: {plugin: {passDeviceSpecs: true}}\n"}}}, True),
    ({"config": {"files": {"more": "imex: {channelIDs: [0]}\n"}}}, True),
    ({"config": {"existing": "mine"}}, True),
    ({"runtimeClass": {"name": ""}}, True),
    ({"amd": True}, False),
    ({"amd": True, "devicePlugin": {"deviceListStrategy": "volume-mounts"}}, True),
]


@pytest.mark.parametrize(("values", "mounted"), HOST_ROOTS, ids=str)
def test_the_hosts_files_are_mounted_only_where_they_are_needed(values: dict[str, Any], mounted: bool) -> None:
    found = objects({**values, "host": {"driverRoot": "/run/nvidia/driver"}})
    for pod, container in containers(found):
        paths = [volume["hostPath"]["path"] for volume in pod.get("volumes", []) if "hostPath" in volume]
        assert "/" not in paths
        if container["name"] == "device-plugin":
            assert ("/run/nvidia/driver" in paths) is mounted
            root = "/run/nvidia/driver" if mounted else "/"
            assert f"--driver-root={root}" in container["args"], "that of its own container where nothing is mounted"


def test_a_chart_that_contains_this_one_can_name_pin_and_switch_it_off() -> None:
    found = objects(CASES["in another chart"])
    assert all(each["metadata"]["name"].startswith("gpus-") for each in found if each["kind"] != "RuntimeClass")
    assert {each["image"] for _, each in containers(found)} == {f"ocigpu@sha256:{'0' * 64}"}
    for each in of_kind(found, "DaemonSet").values():
        assert each["spec"]["updateStrategy"] == CASES["in another chart"]["updateStrategy"]
        assert each["spec"]["selector"]["matchLabels"]["app.kubernetes.io/name"] == "ocigpu"
    (monitor,) = of_kind(found, "ServiceMonitor").values()
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    assert objects({"enabled": False}) == []


@pytest.mark.parametrize("name", ["pci-0302_10de", "pci-0300_10de", "pci-10de"])
def test_nodes_are_found_by_the_labels_of_node_feature_discovery(name: str) -> None:
    """Its default names a PCI device by class and vendor; NVIDIA's chart has it name the vendor only."""
    for each, expected in (("true", True), ("false", False)):
        labels = {f"feature.node.kubernetes.io/{name}.present": each}
        assert {admits(pod, labels) for pod, _ in containers(objects({}))} == {expected}
    assert not any(
        admits(pod, {"feature.node.kubernetes.io/pci-0300_1a03.present": "true"}) for pod, _ in containers(objects({}))
    )


@pytest.mark.parametrize("pci_class", ["1200", "0380", "0300"])
def test_nodes_of_another_vendor_have_what_serves_its_gpus(pci_class: str) -> None:
    """A node with a configuration of its own has plugin and labels of that alone."""
    labels = {f"feature.node.kubernetes.io/pci-{pci_class}_1002.present": "true"}

    def placed(more: dict[str, str]) -> list[tuple[str, str]]:
        there = [(pod, each) for pod, each in containers(of_case("another vendor too")) if admits(pod, labels | more)]
        configs = [next((word for word in each["args"] if "--config-file" in word), "") for _, each in there]
        return sorted((each["name"], name.rpartition("/")[2]) for (_, each), name in zip(there, configs, strict=True))

    others = [("exporter", ""), ("node-installer", "")]
    for more, config in (({}, "default"), ({"nvidia.com/device-plugin.config": "shared"}, "shared")):
        assert placed(more) == [("device-plugin", config), *others, ("node-labels", config)]
    assert not any(admits(pod, labels) for pod, _ in containers(objects({})))
    for _, container in containers(of_case("another vendor too")):
        # the pod starts below ocigpu-runtime there, which refuses NVIDIA's variable alone
        asks = "AMD_VISIBLE_DEVICES" in {each["name"] for each in container["env"]}
        assert asks == (container["name"] in ("device-plugin", "exporter", "node-labels")), container["name"]


@every_case
def test_gpus_reach_the_pods_through_a_runtime_class_that_exists(found: list[Object]) -> None:
    classes = of_kind(found, "RuntimeClass")
    for pod, container in containers(found):
        name = pod.get("runtimeClassName")
        if container["name"] in ON_HOST:  # it comes before the runtime, and uses the host's programs
            assert name is None
            continue
        assert name is None or classes[name]["handler"] == "ocigpu"
        environment = {each["name"]: each.get("value") for each in container["env"]}
        assert environment["NVIDIA_VISIBLE_DEVICES"] == "all"
        wanted = "compute,utility" if container["name"] == "mps-control-daemon" else "utility"
        assert environment["NVIDIA_DRIVER_CAPABILITIES"] == wanted


def test_the_pages_device_plugin_alone_serves_its_pod() -> None:
    page = (REPOSITORY / "docs/KUBERNETES.md").read_text()
    alone = page.partition("### The device plugin alone")[2].partition("\n## ")[0]
    words = re.findall(r"--set (\S+)=(\S+)", alone)
    values: dict[str, Any] = {}
    for path, value in words:
        section, name = path.split(".")
        values.setdefault(section, {})[name] = {"false": False}.get(value, value)
    found = objects(values, "ocigpu")
    assert [f"daemonset/{name}" for name in of_kind(found, "DaemonSet")] == re.findall(r"daemonset/\S+", alone)
    (template,) = pods_of(found).values()
    label = re.findall(r"label node NODE (\S+)=(\S+)", alone)
    assert admits(template["spec"], dict(label))
    pod = yaml.safe_load(page.partition("**4. A pod**:\n\n")[2].partition("\n\nWith")[0])
    kubernetes_validate.validate(pod, "1.30", strict=True)
    assert pod["spec"]["runtimeClassName"] in of_kind(found, "RuntimeClass")
    assert pod["metadata"]["name"] in re.findall(r"kubectl wait pod (\S+)", alone)


def test_the_pages_two_releases_serve_nodes_of_their_own() -> None:
    page = (REPOSITORY / "docs/KUBERNETES.md").read_text()
    part = page.partition("### Nodes of different kinds")[2].partition("\n### ")[0]
    labels = dict(re.findall(r"label node (\S+) gpu-stack=(\S+)", part))
    known: set[tuple[str, str]] = set()
    for release, words in re.findall(r"helm install (\S+) ((?:.*\\\n)*.*)", part):
        values: dict[str, Any] = {}
        for path, value in re.findall(r"--set (\S+)=(\S+)", words):
            section, _, name = path.rpartition(".")
            (values.setdefault(section, {}) if section else values)[name] = yaml.safe_load(value)
        found = [each for each in yaml.safe_load_all(RENDERER.render(values, namespace="x", release=release)) if each]
        names = {(each["kind"], each["metadata"]["name"]) for each in found}
        assert not known & names
        known |= names
        for each in found:
            if each["kind"] == "DaemonSet":
                chosen = each["spec"]["template"]["spec"]["nodeSelector"]["gpu-stack"]
                assert chosen == labels["RACK-NODE" if release == "ocigpu-rack" else "OTHER-NODE"]
    assert {("DaemonSet", "ocigpu-device-plugin"), ("DaemonSet", "ocigpu-rack-dra-driver")} <= known
    assert ("DaemonSet", "ocigpu-rack-device-plugin") not in known


def test_without_variables_the_pods_ask_by_a_mount() -> None:
    for pod, container in containers(objects(CASES["no variables"])):
        (mount,) = [each for each in container["volumeMounts"] if each["name"] == "all-gpus"]
        assert mount["mountPath"] == "/var/run/nvidia-container-devices/all"
        assert {"path": "/dev/null", "type": "CharDevice"} in [each.get("hostPath") for each in pod["volumes"]]


def pods_of(found: list[Object]) -> dict[str, Object]:
    """Return the pod template of each program of nodes."""
    templates = [each["spec"]["template"] for each in of_kind(found, "DaemonSet").values()]
    return {template["spec"]["containers"][0]["name"]: template for template in templates}


PODS = ("device-plugin", "exporter", "node-labels", "mps-control-daemon", "node-installer", "mig-manager")


def test_a_programs_section_adds_to_what_all_pods_have_or_replaces_it() -> None:
    found = of_case("pods of their own")
    pods = pods_of(found)
    assert set(pods) == set(PODS)
    exporter = pods.pop("exporter")
    for template in pods.values():
        assert {"team": "gpu"}.items() <= template["metadata"]["labels"].items()
        assert template["metadata"]["annotations"] == {"a": "1"}
        pod = template["spec"]
        assert pod["nodeSelector"] == {"pool": "gpu"}
        assert pod["affinity"]["podAntiAffinity"] == {"preferredDuringSchedulingIgnoredDuringExecution": []}
        assert [each.get("value") for each in pod["containers"][0]["env"]][-2:] == ["http://proxy.example:3128", "UTC"]
        assert pod["priorityClassName"] == "system-node-critical"
    assert exporter["metadata"]["labels"]["team"] == "metrics"
    assert exporter["metadata"]["annotations"] == {"a": "1", "b": "2"}
    pod = exporter["spec"]
    assert pod["nodeSelector"] == {"pool": "gpu", "disk": "ssd"}
    assert "podAntiAffinity" not in pod["affinity"]
    assert pod["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"][0]["weight"] == 1
    assert [each["name"] for each in pod["containers"][0]["env"]].count("TZ") == 1
    assert {"name": "TZ", "value": "CET"} in pod["containers"][0]["env"]
    assert (pod["priorityClassName"], pod["tolerations"]) == ("low", [])
    strategies = {name: each["spec"]["updateStrategy"] for name, each in of_kind(found, "DaemonSet").items()}
    assert [name for name, each in strategies.items() if each == {"type": "OnDelete"}] == ["ocigpu-exporter"]
    (monitor,) = of_kind(found, "ServiceMonitor").values()
    assert monitor["spec"]["endpoints"] == [{
        "port": "metrics", "honorLabels": False, "interval": "30s", "scrapeTimeout": "10s",
        "relabelings": [{"action": "labeldrop", "regex": "instance"}],
        "metricRelabelings": [{"action": "drop", "regex": "x"}],
    }]  # fmt: skip


def test_pods_are_on_the_hosts_network_if_they_are_told_to() -> None:
    own = {"nodeInstaller": {"hostNetwork": False}, "leases": {"enabled": True, "check": "true", "hostNetwork": True}}
    for values, expected in (({"hostNetwork": True}, set(PODS) - {"node-installer"}), ({}, set())):
        found = objects(
            {**CASES["pods of their own"], **values, "nodeInstaller": {"enabled": True, **own["nodeInstaller"]}}
        )
        on_host = {name for name, template in pods_of(found).items() if template["spec"].get("hostNetwork")}
        assert on_host == expected
        for template in pods_of(found).values():
            assert ("dnsPolicy" in template["spec"]) is ("hostNetwork" in template["spec"])
    agent = pods_of(objects({"leases": own["leases"], "extraEnv": [{"name": "TZ", "value": "UTC"}]}))["lease-agent"]
    assert agent["spec"]["hostNetwork"] is True
    for container in agent["spec"]["containers"]:
        assert container["env"][-1] == {"name": "TZ", "value": "UTC"}
    driver = pods_of(objects({"dra": {"enabled": True, "podLabels": {"a": "b"}}}))["dra-driver"]
    assert driver["metadata"]["labels"]["a"] == "b"


def test_a_network_policy_lets_peers_reach_the_exporters_port_alone() -> None:
    peer = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    assert of_kind(objects({}), "NetworkPolicy") == {}
    for peers in ([], [peer]):
        found = objects({"exporter": {"networkPolicy": True, "from": peers, "port": 9500}})
        (policy,) = of_kind(found, "NetworkPolicy").values()
        kubernetes_validate.validate(policy, "1.37", strict=True)
        assert policy["spec"]["policyTypes"] == ["Ingress"]
        (rule,) = policy["spec"]["ingress"]
        assert rule == {"ports": [{"protocol": "TCP", "port": 9500}]} | ({"from": peers} if peers else {})
        selector = policy["spec"]["podSelector"]["matchLabels"]
        chosen = [name for name, pod in pods_of(found).items() if selector.items() <= pod["metadata"]["labels"].items()]
        assert chosen == ["exporter"]


def test_services_in_front_have_the_labels_of_all_pods() -> None:
    values = {"podLabels": {"a": "b"}, "tenants": {"enabled": True}, "caas": {"enabled": True, "tlsSecret": "x"}}
    deployments = of_kind(objects(values), "Deployment")
    assert len(deployments) == 2
    for each in deployments.values():
        assert each["spec"]["template"]["metadata"]["labels"]["a"] == "b"


# --- values, schema, renderer, plain manifests


def leaves(values: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for name, value in values.items():
        whole = f"{prefix}{name}" in ("config.files", "updateStrategy")
        nested = isinstance(value, dict) and value and not whole and name != "resources"
        found += leaves(value, f"{prefix}{name}.") if nested else [f"{prefix}{name}"]
    return found


def test_every_value_is_used_and_known_to_the_schema() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    templates = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    assert [name for name in leaves(values) if f".Values.{name}" not in templates] == []
    jsonschema.Draft7Validator.check_schema(json.loads((CHART / "values.schema.json").read_text()))
    for case in CASES.values():
        objects(case)  # Helm validates the values


WRONG: list[dict[str, Any]] = [
    {"imagee": {}},
    {"image": {"pullPolicy": "Sometimes"}},
    {"image": {"repository": ""}},
    {"image": {"digest": "sha256:abc"}},
    {"updateStrategy": {"type": "Sometimes"}},
    {"nameOverride": "Upper"},
    {"config": {"files": {"Upper": ""}}},
    {"mps": {"shmSize": "8g,mode=0"}},
    {"nodeLabels": {"target": "file"}},
    {"host": {"kubelet": "relative"}},
    {"exporter": {"port": 0}},
    {"exporter": {"port": 70000}},
    {"exporter": {"port": True}},
    {"exporter": {"pods": "no"}},
    {"exporter": {"args": "--no-hostname"}},
    {"nodeInstaller": {"enabled": "yes"}},
    {"nodeInstaller": {"remov": True}},
    {"nodeSelectorTerms": []},
    {"nodeSelectorTerms": [{"matchFields": []}]},
    {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {}}}},
    {"podLabels": {"app.kubernetes.io/component": "x"}},
    {"extraEnv": [{"name": "NODE_NAME", "value": "x"}]},
    {"exporter": {"extraEnv": [{"name": "NVIDIA_MIG_CONFIG_DEVICES", "value": "all"}]}},
    {"hostNetwork": "yes"},
    {"devicePlugin": {"deviceListStrategy": "envar"}},
    {"devicePlugin": {"deviceListStrategy": "envvar;cdi-cri"}},
    {"exporter": {"serviceMonitorInterval": "often"}},
    {"devicePlugin": {"podLabels": {"ocigpu/config": "x"}}},
]


WITH_EVERY_NODE_PROGRAM: dict[str, Any] = {
    "dra": {"enabled": True, "amd": True, "privileged": True},
    "computeDomains": {"enabled": True},
    "migManager": {"enabled": True, "pods": "drain"},
    "nodeInstaller": {"enabled": True},
    "nodeLabels": {"target": "node"},
    "exporter": {"enablePodLabels": True, "serviceMonitor": True},
}


def test_two_releases_share_only_what_the_second_can_leave_out() -> None:
    """Helm refuses an object that another release owns."""

    def names(release: str, values: dict[str, Any]) -> set[tuple[str, str]]:
        found = yaml.safe_load_all(RENDERER.render(values, namespace="gpu", release=release))
        return {(each["kind"], each["metadata"]["name"]) for each in found if each}

    first = names("one", WITH_EVERY_NODE_PROGRAM)
    assert {kind for kind, _ in first & names("two", WITH_EVERY_NODE_PROGRAM)} == {
        *("CustomResourceDefinition", "DeviceClass", "RuntimeClass"),
    }
    second = {
        **WITH_EVERY_NODE_PROGRAM,
        "dra": {**WITH_EVERY_NODE_PROGRAM["dra"], "deviceClasses": False},
        "computeDomains": {"enabled": True, "kinds": False},
        "runtimeClass": {"create": False},
    }
    assert first & names("two", second) == set()
    plugin = names("two", {"runtimeClass": {"create": False}})
    assert first & plugin == set(), "claims on some nodes, the device plugin on others"


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_the_schema_refuses_what_is_wrong(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    place = rf"at '(/{name}|': additional properties '{name}')"
    if "files" in str(wrong) or "podLabels" in str(wrong):
        place = "invalid propertyName '(Upper|app.kubernetes.io/component|ocigpu/config)'"
    with pytest.raises(RENDERER.ChartError, match=f"^values .* {place}"):
        RENDERER.render(wrong)


def test_the_command_renders_values_of_a_file_plainly_or_says_in_a_line_what_is_wrong(tmp_path: Path) -> None:
    RENDERER.find_helm()
    command = [sys.executable, DEPLOYMENT / "render.py", "--namespace", "gpu", "--values", tmp_path / "mine.yaml"]
    (tmp_path / "mine.yaml").write_text("exporter: {port: 9500}\n")
    for more in ([], ["--plain"]):
        found = list(yaml.safe_load_all(run([*command, *more]).stdout))
        assert of_kind(found, "Service")["ocigpu-exporter"]["spec"]["ports"][0]["port"] == 9500
        assert [each["metadata"]["name"] for each in found if each["kind"] == "Namespace"] == ["gpu"] * len(more)
    for text in ("exporter: {prot: 1}\n", "[]\n", "a: [\n"):
        (tmp_path / "mine.yaml").write_text(text)
        failed = run(command, check=False)
        assert (failed.returncode, failed.stderr.startswith("render.py: ")) == (1, True)
        assert failed.stderr.count("\n") == 1


def test_the_command_says_what_to_install_where_there_is_no_helm(tmp_path: Path) -> None:
    python = os.path.realpath(sys.executable)  # with an environment of its own
    failed = run([python, "-I", "-S", DEPLOYMENT / "render.py"], check=False, env={"PATH": str(tmp_path)})
    assert (failed.returncode, failed.stderr) == (
        1, "render.py: no helm: install it (https://helm.sh), or run packaging/kubernetes/get_helm.py DIRECTORY\n",
    )  # fmt: skip


def test_a_configuration_without_default_is_refused() -> None:
    with pytest.raises(RENDERER.ChartError, match=r"at '/config/files': missing property 'default'"):
        objects({"config": {"files": {"default": None, "other": ""}}})


@pytest.mark.parametrize(
    ("values", "why"),
    one_in(3, [
        ({"config": {"files": {"b": "version: v2\n"}}}, "config.files.b: version v2: only v1 is known"),
        ({"config": {"files": {"b": "version: 1\n"}}}, "config.files.b: version 1: only v1 is known"),
        ({"config": {"files": {"b": "- 1\n"}}}, "config.files.b: not a mapping in YAML"),
        ({"extraEnv": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]}, "extraEnv contains A twice"),
        ({"exporter": {"extraEnv": [{"name": "A"}, {"name": "A"}]}}, "extraEnv contains A twice"),
    ]),
)  # fmt: skip
def test_what_a_schema_cannot_say_is_refused_too(values: dict[str, Any], why: str) -> None:
    with pytest.raises(RENDERER.ChartError, match=re.escape(why)):
        RENDERER.render(values)


MIG_ARGS = {"enabled": True, "args": ["--dynamic-mig"]}
FABRIC = {"enabled": True, "fabric": "127.0.0.1:6666"}


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"dra": {"enabled": True}, "mps": {"enabled": True}}, "mps.enabled: its daemons serve the device plugin"),
        ({"leases": {"enabled": True, "check": "x"}, "mps": {"enabled": True}}, "mps.enabled: its daemons serve"),
        ({"dra": MIG_ARGS}, "dra.args: --dynamic-mig needs dra.privileged=true"),
        ({"dra": {"enabled": True, "args": ["--passthrough=true"]}}, "dra.args: --passthrough needs dra.privileged"),
        ({"dra": FABRIC}, "dra.fabric: 127.0.0.1:6666 is the pod's own address"),
        ({"hostNetwork": True, "dra": {**FABRIC, "hostNetwork": False}}, "dra.fabric: 127.0.0.1:6666 is the pod's"),
        ({"dra": {"amd": True}}, "dra.amd: it adds nodes to the DRA driver, and dra.enabled is false"),
        ({"migManager": {"enabled": True, "existing": "a", "layouts": "b"}}, "migManager.existing replaces it"),
        ({"nodeInstaller": {"remove": True}}, "leave nodeInstaller.enabled=true until it has"),
        ({"hostNetwork": True, "exporter": {"networkPolicy": True}}, "policies do not apply to pods on the host's"),
        ({"exporter": {"from": [{"podSelector": {}}]}}, "exporter.from: it limits nothing"),
    ],
)
def test_values_that_contradict_each_other_are_refused(values: dict[str, Any], why: str) -> None:
    with pytest.raises(RENDERER.ChartError, match=re.escape(why)):
        RENDERER.render(values)
    assert RENDERER.render({**values, "enabled": False}) == ""


@pytest.mark.parametrize(
    "values",
    [
        {"dra": {**MIG_ARGS, "privileged": True}},
        {"dra": {"enabled": True, "args": ["--dynamic-mig=false"]}},
        {"dra": {**FABRIC, "hostNetwork": True}},
        {"hostNetwork": True, "dra": FABRIC},
        {"dra": {"enabled": True, "fabric": "10.127.0.1:6666"}},
    ],
)
def test_values_that_go_together_are_rendered(values: dict[str, Any]) -> None:
    assert "ocigpu-dra-driver" in of_kind(objects(values), "DaemonSet")


@pytest.mark.parametrize(
    ("values", "what", "least"),
    [
        ({"dra": {"enabled": True}}, "dra.enabled", 34),
        ({"computeDomains": {"enabled": True}}, "computeDomains.enabled", 34),
        ({"dra": {"enabled": True, "shares": "4"}}, "dra.shares", 36),
        ({"dra": {**MIG_ARGS, "privileged": True}}, "dra.args: --dynamic-mig", 36),
    ],
)
def test_a_kubernetes_without_what_values_need_is_refused(values: dict[str, Any], what: str, least: int) -> None:
    def render(version: str) -> str:
        return RENDERER.call_helm(["template", "r", str(CHART), "--kube-version", version], [values])

    for version in (f"1.{least}.0", f"1.{least}.1-gke.100", f"1.{least}.0-alpha.1", f"1.{least + 1}.2+k3s1"):
        assert "kind: DaemonSet" in render(version)
    for version in (f"1.{least - 1}.9", f"1.{least - 1}.3-eks-1"):
        with pytest.raises(RENDERER.ChartError, match=re.escape(f"{what}: needs Kubernetes 1.{least} or later")):
            render(version)


def test_strategies_are_those_of_the_program() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]["devicePlugin"]["properties"]
    pattern = re.compile(schema["deviceListStrategy"]["pattern"])
    (option,) = [option for option in OPTIONS if option.name == "device_list_strategy"]
    assert set(option.choices) == set(re.findall("[a-z]+(?:-[a-z]+)?", pattern.pattern))
    assert all(map(pattern.search, [*option.choices, "envvar, cdi-cri", "envvar,volume-mounts,"]))


def test_the_plain_manifests_are_those_of_the_chart() -> None:
    text = (DEPLOYMENT / "ocigpu.yaml").read_text()
    assert text == RENDERER.plain({}), "run: packaging/kubernetes/render.py --plain > packaging/kubernetes/ocigpu.yaml"
    namespace, *others = yaml.safe_load_all(text)
    assert namespace["metadata"]["labels"] == {"pod-security.kubernetes.io/enforce": "privileged"}
    kubernetes_validate.validate(namespace, "1.37", strict=True)
    kinds = [(each["kind"], each["metadata"]["name"]) for each in others]
    assert kinds == [(each["kind"], each["metadata"]["name"]) for each in objects({}, "ocigpu")]
    assert {each["metadata"]["labels"]["app.kubernetes.io/managed-by"] for each in others} == {"kubectl"}


def test_the_notes_can_be_rendered() -> None:
    assert "kubectl -n n get pods -l app.kubernetes.io/instance=r" in RENDERER.notes("r", "n")


def test_the_chart_is_of_this_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == __version__
    assert f"ocigpu:{__version__}" in (DEPLOYMENT / "Containerfile").read_text()


def test_node_installer_is_off_unless_asked_for_and_then_chooses_the_nodes_of_pods() -> None:
    found = objects({})
    assert "ocigpu-node-installer" not in of_kind(found, "DaemonSet")
    assert "scheduling" not in of_kind(found, "RuntimeClass")["ocigpu"]
    found = objects(CASES["nodes that nobody logs into"])
    daemon_set = of_kind(found, "DaemonSet")["ocigpu-node-installer"]
    pod = daemon_set["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert of_kind(found, "RuntimeClass")["ocigpu"]["scheduling"] == {"nodeSelector": {node_installer.LABEL: "ready"}}
    assert pod["hostPID"] is True
    assert "runtimeClassName" not in pod  # it is what makes the runtime
    assert "securityContext" not in pod
    words = container["args"]
    assert {"--name=ocigpu", "--default", "--cdi", "--json", "--restart=systemd"} <= set(words)
    assert "--remove" not in words
    (ready,) = (word.partition("=")[2] for word in words if word.startswith("--ready-file="))
    assert container["readinessProbe"]["exec"]["command"] == ["test", "-e", ready]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    options = node_installer.InstallerOptions()
    assert volumes[mounts[options.host_root]]["hostPath"]["path"] == "/"
    assert "emptyDir" in volumes[mounts[os.path.dirname(ready)]]
    plugin = of_kind(found, "DaemonSet")["ocigpu-device-plugin"]["spec"]["template"]["spec"]["containers"][0]
    assert f"--nvidia-cdi-hook-path={options.prefix}/current/bin/ocigpu-hook" in plugin["args"]
    role = of_kind(found, "ClusterRole")["ocigpu-node-installer"]
    assert role["rules"] == [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["patch"]}]
    found = objects(CASES["nodes that are set back"])
    container = of_kind(found, "DaemonSet")["ocigpu-node-installer"]["spec"]["template"]["spec"]["containers"][0]
    assert {"--remove", "--name=gpus"} <= set(container["args"])
    assert container["resources"] == {"limits": {"memory": "200Mi"}}


def test_who_uses_gpus_is_away_while_they_are_cut() -> None:
    found = objects(CASES["GPUs cut by labels"])
    labels = {**GPU_NODE, "nvidia.com/mig.config": "all-balanced"}
    every = {"device-plugin", "exporter", "node-labels", "mps-control-daemon", "mig-manager"}
    assert {each["name"] for pod, each in containers(found) if admits(pod, labels)} == every
    paused = {**labels, **dict.fromkeys(mig_manager.OURS, mig_manager.PAUSED)}
    assert {each["name"] for pod, each in containers(found) if admits(pod, paused)} == {"mig-manager"}
    for pod, each in containers(found):  # it knows them by the labels
        text = json.dumps(pod["affinity"])
        assert any(f'"{key}"' in text for key in mig_manager.OURS) != (each["name"] == "mig-manager")
    (container,) = [each for _, each in containers(found) if each["name"] == "mig-manager"]
    assert container["args"][1:] == ["--json", "--pods=drain", "--default-layout=a", "--layouts=/layouts/config.yaml"]
    rules = of_kind(found, "ClusterRole")["ocigpu-mig-manager"]["rules"]
    may = {(resource, verb) for rule in rules for resource in rule["resources"] for verb in rule["verbs"]}
    refusing = objects(CASES["GPUs cut by labels, from a map"])
    less = of_kind(refusing, "ClusterRole")["ocigpu-mig-manager"]["rules"]
    assert may == {
        *(("nodes", verb) for verb in ("get", "patch", "watch")),
        ("pods", "list"),
        ("daemonsets", "get"),
        ("pods/eviction", "create"),
    }
    assert len(less) == 3
    assert "mig-manager" not in {each["name"] for _, each in containers(objects({}))}


def test_the_page_names_values_that_the_chart_has() -> None:
    """Those of the table for who comes from NVIDIA's charts."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    page = (REPOSITORY / "docs/KUBERNETES.md").read_text()
    table = page.partition("## From values for NVIDIA's charts")[2].partition("\n## ")[0]
    rows = [line.split("|")[3] for line in table.splitlines() if line.startswith("| ")][1:]
    named = [name for row in rows for name in re.findall(r"`([a-z]\w+(?:\.\w+)*)`", row)]
    named = [name for name in named if name not in ("default", "flags", "flags.migStrategy")]
    assert len(named) > 20
    for name in named:
        found: Any = values
        for word in name.split("."):
            assert word in found, name
            found = found[word]
