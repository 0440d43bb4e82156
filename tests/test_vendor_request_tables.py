"""Requests under NVIDIA's own tables: what its programs take them for, and where ours do otherwise, with the reason.

The tables are those of the documentation and unit tests of the container toolkit (1.20) and of nvidia-container-cli
(1.18).  Every difference is one of DIFFERENCES, whose sentences docs/VENDOR.md has word for word.
"""

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ocigpu.core.errors import RequestError
from ocigpu.core.facts import Gpu, HostFacts
from ocigpu.core.settings import Settings
from ocigpu.gpus.nvidia.require import check_requirements, parse_requirement
from ocigpu.gpus.nvidia.selection import select_devices
from ocigpu.gpus.vendors import parse_request

PAGE = Path(__file__).parents[1] / "docs/VENDOR.md"
DEVICES = "NVIDIA_VISIBLE_DEVICES"
UUID = "GPU-5f0e3d1c-8a7b-4c6d-9e0f-112233445566"
MIG = "MIG-5f0e3d1c-8a7b-4c6d-9e0f-112233445566"
OLD_MIG = f"MIG-{UUID}/1/0"
DIRECTORY = "/var/run/nvidia-container-devices"
HOOK = Settings(mode="hook")
JIT = Settings(mode="auto")
CDI = Settings(mode="cdi")
REFUSED = "refused"
NOTHING = "nothing"

DIFFERENCES = {
    "capabilities": "NVIDIA's default mode ignores `NVIDIA_DRIVER_CAPABILITIES` and provides every driver file.",
    "requirements": "NVIDIA's default and CDI modes ignore `NVIDIA_REQUIRE_*`.",
    "mig": "NVIDIA's default mode ignores `NVIDIA_MIG_CONFIG_DEVICES` and `NVIDIA_MIG_MONITOR_DEVICES`.",
    "repeated": "A device that is listed twice counts once. NVIDIA's toolkit reads `0,0` differently in each mode: as"
    " another list, as `none`, or as an error.",
    "names": "PCI addresses and prefixes of UUIDs identify GPUs in modes `auto` and `spec`, too.",
    "zeros": "`NVIDIA_VISIBLE_DEVICES=01` is refused: an index has no leading zeros.",
    "keys": "Annotations count only if their keys have the form that device plugins write, `cdi.k8s.io/PLUGIN_DEVICE`;"
    " `cdi.k8s.io/x` is ignored with a warning.",
    "half": "A list that mixes CDI names with other names stops the container, and so does an annotation with a plain"
    " name outside of mode cdi.",
    "unobeyed": "If variables are ignored, annotations and opt-in variables (`NVIDIA_GDS` and the like) are ignored"
    " too ([SECURITY.md](SECURITY.md)).",
    "vendors": "Variables and annotations can request only devices of `cdi.environment-vendors`, and of NVIDIA's"
    " kinds only GPUs: neither `nvidia.com/pgpu` nor another vendor's disk.",
    "run": "Volume mounts below `/run/nvidia-container-devices` count like those below `/var/run`; paths that only"
    " begin with that name do not.",
    "void": "`void` in a volume mount means no device, as in a variable.",
    "malformed": "A volume mount that names no device stops the container; NVIDIA's toolkit skips it.",
    "parts": "`NVIDIA_GDS` and the like, and IMEX channels, also take effect in mode cdi.",
    "imex-none": "`NVIDIA_IMEX_CHANNELS=none` means no channel; for NVIDIA's toolkit it means all channels.",
    "imex-all": "A volume mount `imex/all` is refused: channels are requested by number.",
    "unknown": "A requirement with a name other than cuda, driver, arch and brand stops the container in every mode;"
    " NVIDIA's Tegra mode ignores it.",
    "spaces": "Driver capabilities are parsed the same way in every mode; in NVIDIA's legacy mode `compute, graphics`"
    " with a space provides no graphics files.",
}  # fmt: skip


class Row(NamedTuple):
    """A request, NVIDIA's answer, and ours where it is another: ``why`` is a key of DIFFERENCES."""

    request: Any
    vendor: str
    ours: str = ""
    why: str = ""


def config(
    env: dict[str, str] | None = None,
    mounts: tuple[str, ...] = (),
    annotations: dict[str, str] | None = None,
    privileged: bool = False,
) -> dict[str, Any]:
    return {
        "process": {
            "env": [f"{name}={value}" for name, value in (env or {}).items()],
            "capabilities": {"bounding": ["CAP_SYS_ADMIN"] if privileged else []},
        },
        "mounts": [{"source": "/dev/null", "destination": path} for path in mounts],
        "annotations": annotations or {},
    }


def answer(document: dict[str, Any], settings: Settings) -> str:
    """Return what a request is taken for: "nothing", "all", "none", devices, CDI names, or "refused"."""
    try:
        request = parse_request(document, settings)
    except RequestError:
        return REFUSED
    return ",".join(request.devices or request.cdi_devices) or request.selection


def check(row: Row, found: str) -> None:
    assert bool(row.ours) == bool(row.why)
    assert row.why == "" or row.why in DIFFERENCES
    assert not row.why or row.ours != row.vendor
    assert found == (row.ours or row.vendor)


def qualified(*names: str) -> str:
    return ",".join(f"nvidia.com/gpu={name}" for name in names)


LISTS = {
    "": [Row(HOOK, NOTHING), Row(JIT, NOTHING), Row(CDI, NOTHING)],
    "void": [Row(HOOK, NOTHING), Row(JIT, NOTHING), Row(CDI, NOTHING)],
    ", ,": [Row(HOOK, NOTHING), Row(JIT, NOTHING), Row(CDI, NOTHING)],
    "0,void": [Row(HOOK, NOTHING), Row(JIT, NOTHING), Row(CDI, NOTHING)],
    "all": [Row(HOOK, "all"), Row(JIT, "all"), Row(CDI, qualified("all"))],
    "none": [Row(HOOK, "none"), Row(JIT, "none"), Row(CDI, qualified("none"))],
    "0,all": [Row(HOOK, "all"), Row(JIT, "all"), Row(CDI, qualified("all"))],
    "none,all": [Row(HOOK, "none"), Row(JIT, "none"), Row(CDI, qualified("none"))],
    "0,none": [Row(HOOK, "none"), Row(JIT, "none"), Row(CDI, qualified("none"))],
    "0,1": [Row(HOOK, "0,1"), Row(JIT, "0,1"), Row(CDI, qualified("0", "1"))],
    " 1 ,, 0 ": [Row(HOOK, "1,0"), Row(JIT, "1,0"), Row(CDI, qualified("1", "0"))],
    "0,0": [
        Row(HOOK, ",0", "0", "repeated"),
        Row(JIT, "none", "0", "repeated"),
        Row(CDI, REFUSED, qualified("0"), "repeated"),
    ],
    UUID: [Row(HOOK, UUID), Row(JIT, UUID), Row(CDI, qualified(UUID))],
    MIG: [Row(HOOK, MIG), Row(JIT, MIG), Row(CDI, qualified(MIG))],
    "0:1": [Row(HOOK, "0:1"), Row(JIT, "0:1"), Row(CDI, qualified("0:1"))],
    OLD_MIG: [Row(HOOK, OLD_MIG), Row(JIT, OLD_MIG), Row(CDI, REFUSED)],
    "0000:3b:00.0": [
        Row(HOOK, "0000:3b:00.0"),
        Row(JIT, REFUSED, "0000:3b:00.0", "names"),
        Row(CDI, qualified("0000:3b:00.0")),
    ],
    "GPU-5f0e": [Row(HOOK, "GPU-5f0e"), Row(JIT, REFUSED, "GPU-5f0e", "names"), Row(CDI, qualified("GPU-5f0e"))],
    "gpu0": [Row(HOOK, REFUSED), Row(JIT, REFUSED), Row(CDI, qualified("gpu0"))],
    "nvidia.com/gpu=0": [Row(JIT, qualified("0")), Row(CDI, qualified("0")), Row(HOOK, REFUSED)],
    "nvidia.com/gpu=0,nvidia.com/gpu=0": [
        Row(JIT, REFUSED, qualified("0"), "repeated"),
        Row(CDI, REFUSED, qualified("0"), "repeated"),
    ],
    "nvidia.com/gpu=0,1": [Row(CDI, qualified("0", "1")), Row(JIT, qualified("0", "1"), REFUSED, "half")],
    "runtime.nvidia.com/gpu=0": [Row(JIT, "0"), Row(CDI, "0")],
    "runtime.nvidia.com/gpu=0,nvidia.com/gpu=1": [Row(JIT, REFUSED), Row(CDI, REFUSED)],
    "example.com/disk=0": [
        Row(JIT, "example.com/disk=0", REFUSED, "vendors"),
        Row(CDI, "example.com/disk=0", REFUSED, "vendors"),
    ],
    "nvidia.com/pgpu=0": [
        Row(JIT, "nvidia.com/pgpu=0", REFUSED, "vendors"),
        Row(CDI, "nvidia.com/pgpu=0", REFUSED, "vendors"),
    ],
}
"""NVIDIA_VISIBLE_DEVICES by the settings' mode (the request of a row): legacy, just-in-time CDI, CDI."""


@pytest.mark.parametrize(
    ("value", "row"),
    [(value, row) for value, rows in LISTS.items() for row in rows],
    ids=lambda item: item.request.mode if isinstance(item, Row) else item,
)
def test_the_device_list(value: str, row: Row) -> None:
    check(row, answer(config({DEVICES: value}), row.request))


def test_an_index_with_leading_zeros() -> None:
    request = parse_request(config({DEVICES: "01"}), JIT)
    try:
        found = ",".join(str(gpu.index) for gpu in select_devices(request, HOST).gpus)
    except RequestError:
        found = REFUSED
    check(Row("01", "1", REFUSED, "zeros"), found)
    assert answer(config({DEVICES: "01"}), CDI) == qualified("01"), "a name, which no specification of either has"


VARIABLES = [
    Row({}, NOTHING),
    Row({"CUDA_VERSION": "9.0"}, "all"),
    Row({"CUDA_VERSION": "9.0", DEVICES: "none"}, "none"),
    Row({"CUDA_VERSION": "9.0", DEVICES: ""}, NOTHING),
    Row({"CUDA_VERSION": "9.0", "NVIDIA_REQUIRE_CUDA": "cuda>=9.0"}, NOTHING),
    Row({"CUDA_VERSION": "9.0", "NVIDIA_REQUIRE_CUDA": ""}, "all"),
    Row({"CUDA_VERSION": "9.0", "NVIDIA_REQUIRE_REQ0": "cuda>=1"}, "all"),
    Row({"DOCKER_RESOURCE_GPUS": "", DEVICES: "all"}, NOTHING),
    Row({"DOCKER_RESOURCE_GPUS": "1", DEVICES: "all"}, "1"),
    Row({"DOCKER_RESOURCE_GPUS": "1", "OTHER_GPUS": "3,2"}, "1,3,2"),
    Row({"OTHER_GPUS": "3", "DOCKER_RESOURCE_GPUS": "1"}, "1,3"),
]
"""Images of before NVIDIA_REQUIRE_CUDA, and swarm-resource."""


@pytest.mark.parametrize("row", VARIABLES, ids=lambda row: " ".join(f"{k}={v}" for k, v in row.request.items()))
@pytest.mark.parametrize("settings", [HOOK, JIT], ids=["legacy", "default"])
def test_which_variable_counts(row: Row, settings: Settings) -> None:
    check(row, answer(config(row.request), settings._replace(swarm_resource=" DOCKER_RESOURCE_GPUS,OTHER_GPUS ")))


class Access(NamedTuple):
    """Who may ask: accept-nvidia-visible-devices-envvar-when-unprivileged, and CAP_SYS_ADMIN."""

    accepted: bool
    privileged: bool


ACCESS = [
    Row(Access(True, False), "0"),
    Row(Access(True, True), "0"),
    Row(Access(False, True), "0"),
    Row(Access(False, False), NOTHING),
]


@pytest.mark.parametrize("row", ACCESS, ids=lambda row: f"{row.request}")
def test_who_may_ask_by_variable(row: Row) -> None:
    settings = JIT._replace(accept_nvidia_visible_devices_envvar_when_unprivileged=row.request.accepted)
    check(row, answer(config({DEVICES: "0"}, privileged=row.request.privileged), settings))


MOUNTS = [
    Row((f"{DIRECTORY}/0",), "0"),
    Row((f"{DIRECTORY}/0/",), "0"),
    Row((f"{DIRECTORY}/0", f"{DIRECTORY}/0"), "0"),
    Row((f"{DIRECTORY}/0", f"{DIRECTORY}/1"), "0,1"),
    Row((DIRECTORY,), NOTHING),
    Row((f"{DIRECTORY}/all",), "all"),
    Row((f"{DIRECTORY}/none",), "none"),
    Row((f"{DIRECTORY}/void",), REFUSED, NOTHING, "void"),
    Row((f"{DIRECTORY}/imex/0",), NOTHING),
    Row((f"{DIRECTORY}/cdi/nvidia.com/gpu/0",), qualified("0")),
    Row((f"{DIRECTORY}/cdi/nvidia.com/gpu=0",), qualified("0")),
    Row((f"{DIRECTORY}/cdi/example.com/disk/0",), "example.com/disk=0"),
    Row((f"{DIRECTORY}/cdi/nvidia.com/gpu",), NOTHING, REFUSED, "malformed"),
    Row((f"{DIRECTORY}/cdi/nvidia.com/gpu/0", f"{DIRECTORY}/all"), "all", REFUSED, "half"),
    Row(("/run/nvidia-container-devices/0",), NOTHING, "0", "run"),
    Row((f"{DIRECTORY}-foo/0",), REFUSED, NOTHING, "run"),
]


@pytest.mark.parametrize("row", MOUNTS, ids=lambda row: " ".join(row.request))
def test_volume_mounts(row: Row) -> None:
    settings = JIT._replace(accept_nvidia_visible_devices_as_volume_mounts=True)
    check(row, answer(config(mounts=row.request), settings))
    assert answer(config(mounts=row.request), JIT) == NOTHING


def test_a_volume_mount_comes_before_the_variable() -> None:
    settings = JIT._replace(accept_nvidia_visible_devices_as_volume_mounts=True)
    document = config({DEVICES: "1"}, mounts=(f"{DIRECTORY}/cdi/nvidia.com/gpu/0",))
    assert answer(document, settings) == qualified("0")


KEY = "cdi.k8s.io/plugin_a"
OTHER_KEY = "cdi.k8s.io/plugin_b"
FOREIGN = Settings(mode="cdi", cdi_environment_vendors=("nvidia.com", "example.com"))
UNOBEYED = CDI._replace(accept_nvidia_visible_devices_envvar_when_unprivileged=False)
ANNOTATIONS: list[tuple[Settings, Row]] = [
    (CDI, Row({KEY: qualified("0")}, qualified("0"))),
    (JIT, Row({KEY: qualified("0")}, qualified("0"))),
    (HOOK, Row({KEY: qualified("0")}, NOTHING)),
    (CDI, Row({KEY: "0"}, qualified("0"))),
    (JIT, Row({KEY: "0"}, NOTHING, REFUSED, "half")),
    (CDI, Row({"cdi.k8s.io/x": "0"}, qualified("0"), NOTHING, "keys")),
    (JIT, Row({"cdi.k8s.io/x": "0"}, NOTHING)),
    (CDI, Row({"cdi.k8s.io/foo": "example.com/device"}, qualified("example.com/device"), NOTHING, "keys")),
    (CDI, Row({OTHER_KEY: qualified("1"), KEY: qualified("0")}, qualified("0", "1"))),
    (FOREIGN, Row({KEY: "example.com/disk=0"}, "example.com/disk=0")),
    (CDI, Row({KEY: "example.com/disk=0"}, "example.com/disk=0", REFUSED, "vendors")),
    (CDI, Row({KEY: "/dev/null"}, REFUSED)),
    (CDI, Row({KEY: "vendor3.com=device3"}, REFUSED)),
    (UNOBEYED, Row({KEY: qualified("0")}, qualified("0"), NOTHING, "unobeyed")),
    (UNOBEYED._replace(cdi_engine_filters_annotations=True), Row({KEY: qualified("0")}, qualified("0"))),
    (CDI._replace(cdi_annotation_prefixes=("a.b/", "c.d/")), Row({"a.b/p_x": qualified("0")}, qualified("0"))),
    (CDI._replace(cdi_annotation_prefixes=("a.b/", "c.d/")), Row({KEY: qualified("0")}, NOTHING)),
]


@pytest.mark.parametrize(
    ("settings", "row"), ANNOTATIONS, ids=[f"{one.mode} {row.request}" for one, row in ANNOTATIONS]
)
def test_annotations(settings: Settings, row: Row) -> None:
    check(row, answer(config(annotations=row.request), settings))


IMEX = [
    Row("", ""),
    Row("0", "0"),
    Row("0,5", "0,5"),
    Row("channel5", "5"),
    Row("all", ""),
    Row("none", "all", "-", "imex-none"),
    Row("0,void", ""),
    Row("1048575", "1048575"),
    Row("1048576", REFUSED),
    Row("-1", REFUSED),
    Row("x", REFUSED),
]


@pytest.mark.parametrize("row", IMEX, ids=lambda row: row.request or "empty")
@pytest.mark.parametrize("settings", [HOOK, JIT], ids=["legacy", "default"])
def test_imex_channels(row: Row, settings: Settings) -> None:
    try:
        request = parse_request(config({DEVICES: "0", "NVIDIA_IMEX_CHANNELS": row.request}), settings)
        found = ",".join(map(str, request.imex_channels))
    except RequestError:
        found = REFUSED
    check(row, found or ("-" if row.why else ""))
    ignored = settings._replace(features_ignore_imex_channel_requests=True)
    assert parse_request(config({DEVICES: "0", "NVIDIA_IMEX_CHANNELS": row.request}), ignored).imex_channels == ()


def test_imex_channels_by_volume_mounts_and_of_old_images() -> None:
    settings = JIT._replace(accept_nvidia_visible_devices_as_volume_mounts=True)
    mounts = (f"{DIRECTORY}/0", f"{DIRECTORY}/imex/3")
    document = config({"NVIDIA_IMEX_CHANNELS": "7"}, mounts=mounts)
    assert parse_request(document, settings).imex_channels == (3,)
    check(
        Row("imex/all", "all", REFUSED, "imex-all"), answer(config(mounts=(*mounts, f"{DIRECTORY}/imex/all")), settings)
    )
    assert parse_request(config({"CUDA_VERSION": "9.0"}), JIT).imex_channels == ()


ALL = "compat32,compute,display,graphics,ngx,utility,video"
CAPABILITIES: list[tuple[str, str | None, bool, str]] = [
    # supported, NVIDIA_DRIVER_CAPABILITIES, an image of before NVIDIA_REQUIRE_CUDA, given
    (ALL, None, True, ALL),
    (ALL, None, False, "compute,utility"),
    ("video,utility", None, True, "utility,video"),
    ("video,utility", None, False, "utility"),
    (ALL, "", True, "compute,utility"),
    (ALL, "", False, "compute,utility"),
    (ALL, "all", True, ALL),
    ("video,display", "all", False, "display,video"),
    (ALL, "display,video", False, "display,video"),
    (ALL, " video , ,display ", False, "display,video"),
    ("video,display", "video", False, "video"),
    ("display,video", "compute", False, REFUSED),
    (ALL, "none", False, REFUSED),
    (ALL, "compute,nonsense", False, REFUSED),
]


@pytest.mark.parametrize(("supported", "asked", "old", "given"), CAPABILITIES)
@pytest.mark.parametrize("settings", [HOOK, JIT], ids=["legacy", "default"])
def test_driver_capabilities_are_those_of_legacy_mode(
    supported: str, asked: str | None, old: bool, given: str, settings: Settings
) -> None:
    """NVIDIA's default mode gives everything: the differences "capabilities" and "spaces"."""
    env = {DEVICES: "0", **({"CUDA_VERSION": "9.0"} if old else {})}
    if asked is not None:
        env["NVIDIA_DRIVER_CAPABILITIES"] = asked
    try:
        found = ",".join(
            parse_request(config(env), settings._replace(supported_driver_capabilities=supported)).capabilities
        )
    except RequestError:
        found = REFUSED
    assert found == given


MIG_VARIABLES = [
    Row(("all", True), "all"),
    Row(("all", False), REFUSED),
    Row(("", False), ""),
    Row(("0", True), REFUSED),
]


@pytest.mark.parametrize("name", ["CONFIG", "MONITOR"])
@pytest.mark.parametrize("row", MIG_VARIABLES, ids=lambda row: f"{row.request}")
@pytest.mark.parametrize("settings", [HOOK, JIT], ids=["legacy", "default"])
def test_mig_variables_are_those_of_legacy_mode(name: str, row: Row, settings: Settings) -> None:
    value, privileged = row.request
    try:
        request = parse_request(
            config({DEVICES: "0", f"NVIDIA_MIG_{name}_DEVICES": value}, privileged=privileged), settings
        )
        found = request.mig_config + request.mig_monitor
    except RequestError:
        found = REFUSED
    check(row, found)


PARTS = {"NVIDIA_GDS": "gds", "NVIDIA_MOFED": "mofed", "NVIDIA_GDRCOPY": "gdrcopy", "NVIDIA_NVSWITCH": "nvswitch"}


@pytest.mark.parametrize(("variable", "part"), PARTS.items())
def test_opt_in_parts(variable: str, part: str) -> None:
    for value, wanted in (("enabled", (part,)), ("true", ()), ("", ())):
        assert parse_request(config({DEVICES: "0", variable: value}), JIT).features == wanted
    by_name = answer(config({DEVICES: "0", variable: "enabled"}), CDI)
    check(Row("mode cdi", qualified("0"), f"{qualified('0')},nvidia.com/{part}=all", "parts"), by_name)
    mounted = JIT._replace(
        accept_nvidia_visible_devices_envvar_when_unprivileged=False,
        accept_nvidia_visible_devices_as_volume_mounts=True,
    )
    request = parse_request(config({variable: "enabled"}, mounts=(f"{DIRECTORY}/0",)), mounted)
    check(Row("where variables are not obeyed", part, "-", "unobeyed"), "".join(request.features) or "-")


CUDA_VERSIONS = [
    Row("9.0", "cuda>=9.0"),
    Row("9", "cuda>=9.0"),
    Row("0", "cuda>=0.0"),
    Row("v11.6", "cuda>=11.6"),
    Row("9.0.116", "cuda>=9.0"),
    Row("4294967295.0", "cuda>=4294967295.0"),
    *(Row(text, REFUSED) for text in ("9.", "9..0", "9.0.116.50", "-9", "9.0.116foo", "4294967296.0", "legacy")),
]


@pytest.mark.parametrize("row", CUDA_VERSIONS, ids=lambda row: row.request)
def test_cuda_versions_of_old_images(row: Row) -> None:
    try:
        requirements = dict(parse_request(config({"CUDA_VERSION": row.request, DEVICES: "0"}), JIT).requirements)
        found = requirements["CUDA_VERSION"]
    except RequestError:
        found = REFUSED
    check(row, found)


def test_which_requirements_count() -> None:
    env = {
        DEVICES: "0",
        "CUDA_VERSION": "9.0",
        "NVIDIA_REQUIRE_REQ0": "driver>=1",
        "NVIDIA_REQUIRE_JETPACK": "csv-mounts=all",
        "NVIDIA_REQUIRE_JETPACK_HOST_MOUNTS": "base-only",
    }
    found = (("CUDA_VERSION", "cuda>=9.0"), ("NVIDIA_REQUIRE_REQ0", "driver>=1"))
    for settings in (HOOK, JIT, CDI):  # "requirements": not there in the latter two
        assert parse_request(config(env), settings).requirements == found
        assert parse_request(config(env), settings._replace(disable_require=True)).requirements == ()
    for value in ("1", "t", "T", "TRUE", "true", "True"):
        assert parse_request(config({**env, "NVIDIA_DISABLE_REQUIRE": value}), JIT).requirements == ()
    assert parse_request(config({**env, "NVIDIA_DISABLE_REQUIRE": "yes"}), JIT).requirements == found


TESLA = Gpu(0, 0, UUID, "00000000:3b:00.0", brand="Tesla", architecture="8.0")
HOST = HostFacts(driver_version="550.163.01", cuda_version="12.4", gpus=(TESLA,))
MET, UNMET = "met", "not met"
EXPRESSIONS = [
    Row("", MET),
    Row(",", MET),
    Row("cuda>=12.4", MET),
    Row("cuda>=12.5", UNMET),
    Row("CUDA>=12.4", MET),
    Row("cuda>=12.0,driver>=550", MET),
    Row("cuda>=12.0,driver>=560", UNMET),
    Row("cuda>=13.0 driver>=550", MET),
    Row("cuda>=13.0 brand=tesla,driver>=470,driver<471", UNMET),
    Row("brand=TESLA", MET),
    Row("brand!=tesla", UNMET),
    Row("brand>tesla", REFUSED),
    Row("arch>=8.0", MET),
    Row("arch<8", UNMET),
    Row("cuda=12.4.0", MET),
    Row("cuda>12.4", UNMET),
    Row("cuda<12.10", MET),
    Row("driver<551", MET),
    Row("cuda==12.4", REFUSED),
    Row("cuda=<12.4", REFUSED),
    Row("cuda>=", REFUSED),
    Row("cuda=foo", REFUSED),
    Row("cuda >= 12.0", REFUSED),
    Row("cuda>=12.0 driver>=foo", REFUSED),
    Row("memory>=1 cuda>=13.0", UNMET, REFUSED, "unknown"),
    Row("memory>=1", MET, REFUSED, "unknown"),
]


@pytest.mark.parametrize("row", EXPRESSIONS, ids=lambda row: row.request or "empty")
def test_requirements(row: Row) -> None:
    """nvidia-container-cli's grammar, and of Tegra's mode what is another's there."""
    try:
        parse_requirement(row.request)
    except RequestError:
        check(row, REFUSED)
        return
    try:
        check_requirements((("NVIDIA_REQUIRE_CUDA", row.request),), HOST, HOST.gpus)
        found = MET
    except RequestError as error:
        found = UNMET if error.code == "OCIGPU-REQ-3" else error.code
    check(row, found)


def test_every_difference_is_told_to_users() -> None:
    page = " ".join(PAGE.read_text().split())
    missing = [key for key, sentence in DIFFERENCES.items() if sentence not in page]
    assert missing == []
