"""The exporter's pure parts: the file that chooses metrics, options, owners, and the text."""

import csv
import os
import re
from pathlib import Path

import pytest
from exporter_lab import read_page, value
from hypothesis import given
from hypothesis import strategies as st
from support.product import REPOSITORY

from ocigpu.core.errors import OcigpuError, SettingsError, UsageError
from ocigpu.exporter.collectors import DEFAULTS, Collector, parse_collectors, write_collectors
from ocigpu.exporter.exposition import Picture, render
from ocigpu.exporter.metrics import (
    BY_NAME,
    CLOCK_COUNT,
    GPM_METRICS,
    METRICS,
    XID,
    XID_COUNT,
    XID_MESSAGES,
    XID_TOTAL,
)
from ocigpu.exporter.nvml_readers import LABEL_READERS, READERS
from ocigpu.exporter.options import Devices, ExporterOptions, parse_address, parse_devices, parse_options
from ocigpu.exporter.owners import WHOLE, find_owners, find_vfio_owners, read_jobs
from ocigpu.exporter.sample import GpuSample, Instance, Sample, parse_sample
from ocigpu.gpus.pci import Function
from ocigpu.gpus.vfio.facts import Candidate
from ocigpu.kubernetes.cluster.owners import Claim, Held, Owner

UTIL, USED = "DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_FB_USED"
GPUS = (
    GpuSample(0, "GPU-a", "00000000:01:00.0", "NVIDIA A100", values={UTIL: 10, USED: 100, "DCGM_FI_DEV_GPU_TEMP": 40}),
    GpuSample(
        1, "GPU-b", "00000000:02:00.0", "NVIDIA A100",
        values={USED: 300, "DCGM_FI_DEV_GPU_TEMP": 50},
        instances=(
            Instance(7, ("MIG-1", "MIG-2"), "2g.10gb", {USED: 11}), Instance(1, ("MIG-3",), "3g.20gb", {USED: 22}),
        ),
    ),
)  # fmt: skip
ALL = tuple(Collector(metric.name, metric.kind, metric.help) for metric in METRICS)


def page_of(picture: Picture, options: ExporterOptions | None = None) -> str:
    return render(ALL, picture, options or ExporterOptions(), "node-1").decode()


def test_every_metric_of_the_table_has_a_reader_and_only_one() -> None:
    read = [name for names, _ in READERS for name in names]
    assert len(read) == len(set(read))
    special = {XID, XID_COUNT, XID_TOTAL, CLOCK_COUNT, "DCGM_FI_DRIVER_VERSION", "DCGM_FI_NVML_VERSION"}
    assert {*read, *GPM_METRICS, *LABEL_READERS, *special} == set(BY_NAME)
    assert len(BY_NAME) == len(METRICS)


# --- the file of collectors


def test_the_printed_file_is_the_default_and_its_comments_can_be_switched_on() -> None:
    text = write_collectors(DEFAULTS)
    assert parse_collectors(text, "f") == (DEFAULTS, ())
    everything = re.sub("(?m)^# DCGM", "DCGM", text)
    assert parse_collectors(everything, "f") == (ALL, ())
    records = [record for record in csv.reader(everything.splitlines()[1:]) if record]
    assert {len(record) for record in records} == {3}, "other readers join no fields"


def test_type_and_help_are_those_of_the_file() -> None:
    found, _ = parse_collectors(" DCGM_FI_DEV_GPU_TEMP ,counter, hot, hotter \n", "f")
    assert found == (Collector("DCGM_FI_DEV_GPU_TEMP", "counter", "hot, hotter"),)


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("DCGM_FI_DEV_GPU_TEMP, gauge", "three fields"),
        ("DCGM_FI_DEV_GPU_TEMP", "three fields"),
        ("DCGM_FI_DEV_GPU_TEMP, histogram, x", 'type "histogram"'),
        ("GPU_TEMP, gauge, x", 'unknown metric "GPU_TEMP"'),
        (
            "DCGM_FI_DEV_GPU_TMEP, gauge, x",
            'unknown metric "DCGM_FI_DEV_GPU_TMEP": did you mean DCGM_FI_DEV_GPU_TEMP?',
        ),
        ("DCGM_FI_PROF_PIPE_TENSOR_ACTIV, gauge, x", 'unknown metric "DCGM_FI_PROF_PIPE_TENSOR_ACTIV": did you mean'),
        ("DCGM_EXP_XID_ERRORS_COUNTS, gauge, x", 'unknown metric "DCGM_EXP_XID_ERRORS_COUNTS": did you mean'),
        ("DCGM_FI_DEV_SM_CLOCK, gauge, again", "occurs twice"),
        ("DCGM_FI_DRIVER_VERSION, gauge, x", "is a label"),
        ("DCGM_FI_DEV_GPU_TEMP, label, x", "is a gauge"),
        ("dcgm_sm_clok, gauge, x", 'unknown metric "dcgm_sm_clok"'),
        ('DCGM_FI_DEV_GPU_TEMP, gauge, "never closed', "no CSV"),
        ('DCGM_FI_DEV_GPU_TEMP, gauge, "closed" too early', "no CSV"),
    ],
)
def test_a_bad_line_is_an_error_that_names_it(line: str, cause: str) -> None:
    text = f"# comment\n\nDCGM_FI_DEV_SM_CLOCK, gauge, x\n{line}\n"
    with pytest.raises(SettingsError, match=re.escape(cause)) as raised:
        parse_collectors(text, "c.csv")
    assert "c.csv line 4" in raised.value.message
    assert raised.value.code == "OCIGPU-KUBE-4"


def test_a_file_is_real_csv() -> None:
    text = (
        '# a "comment\n"DCGM_FI_DEV_GPU_TEMP", gauge, "hot, ""very"" hot"\nDCGM_FI_DEV_SM_CLOCK,gauge,"two\n  lines"\n'
    )
    assert parse_collectors(text, "f") == (
        (
            Collector("DCGM_FI_DEV_GPU_TEMP", "gauge", 'hot, "very" hot'),
            Collector("DCGM_FI_DEV_SM_CLOCK", "gauge", "two lines"),
        ),
        (),
    )
    found, _ = parse_collectors(text, "f")
    assert set(parse_collectors(write_collectors(found), "f")[0]) == set(found)


def test_names_of_the_first_exporter_are_understood_and_kept() -> None:
    text = "dcgm_sm_clock, gauge, x\ndcgm_gpu_utilization, gauge, x\ndcgm_xid_errors, gauge, x\n"
    found, notes = parse_collectors(text, "f")
    metrics = ["DCGM_FI_DEV_SM_CLOCK", "DCGM_FI_DEV_GPU_UTIL", "DCGM_FI_DEV_XID_ERRORS"]
    assert ([each.metric for each in found], notes) == (metrics, ())
    gpu = GPUS[0]._replace(values={"DCGM_FI_DEV_SM_CLOCK": 1410.0}, xid=0)
    page = render(found, Picture(Sample((gpu,))), ExporterOptions(), "").decode()
    assert "# TYPE dcgm_sm_clock gauge" in page
    assert 'dcgm_sm_clock{gpu="0"' in page
    assert 'dcgm_xid_errors{gpu="0"' in page
    assert "DCGM_FI_DEV_SM_CLOCK" not in page


@pytest.mark.parametrize(
    "name",
    [
        "DCGM_EXP_NEXT_YEARS_COUNT",
        "DCGM_FI_PROF_PIPE_INT_ACTIVE",
        "DCGM_EXP_GPU_HEALTH_STATUS",
        "DCGM_FI_DEV_NVSWITCH_LINK_STATUS",
        "DCGM_FI_DEV_BAR1_USED",
        "DCGM_FI_DEV_CPU_UTIL_TOTAL",
        "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_L0",
    ],
)
def test_what_nvml_cannot_supply_is_named_and_left_out(name: str) -> None:
    found, (note,) = parse_collectors(f"{name}, gauge, x\nDCGM_FI_DEV_GPU_TEMP, gauge, x", "c.csv")
    assert [collector.name for collector in found] == ["DCGM_FI_DEV_GPU_TEMP"]
    assert note.startswith(f"c.csv line 1: {name} is left out: ")


@given(st.text(max_size=200))
def test_any_text_is_a_file_or_an_error(text: str) -> None:
    try:
        parse_collectors(text, "f")
    except SettingsError as error:
        assert "\n" not in error.render("ocigpu").split("\nhint:")[0]  # noqa: PT017 - either is right


# --- options


def test_a_flag_comes_before_its_variable_and_that_before_the_default() -> None:
    variables = {"DCGM_EXPORTER_LISTEN": ":1", "DCGM_EXPORTER_INTERVAL": "5000", "DCGM_EXPORTER_KUBERNETES": "true"}
    found = parse_options(
        ["--address=:2", "-f", "x.csv", "--no-hostname"], {**variables, "NVIDIA_RESOURCE_NAMES": "a/b, c/d"}
    )
    assert found == ExporterOptions(
        address=":2", collect_interval=5.0, kubernetes=True, collectors="x.csv", no_hostname=True,
        nvidia_resource_names=("a/b", "c/d"),
    )  # fmt: skip
    assert parse_options(["-k=false"], variables).kubernetes is False
    again = ["--nvidia-resource-names", "a/b", "--nvidia-resource-names=c/d,e/f"]
    assert parse_options(again, {"NVIDIA_RESOURCE_NAMES": "x/y"}).nvidia_resource_names == ("a/b", "c/d", "e/f")
    assert parse_options(["--gpu-bind-unbind-poll-interval", "500ms"], {}).gpu_bind_unbind_poll_interval == 0.5


@pytest.mark.parametrize(
    ("words", "variables", "named"),
    [
        (["-c", "0"], {}, "--collect-interval"),
        (["-c", "1s"], {}, "--collect-interval"),
        ([], {"DCGM_EXPORTER_INTERVAL": "abc"}, "DCGM_EXPORTER_INTERVAL"),
        (["--kubernetes=maybe"], {}, "--kubernetes"),
        (["--devices=x"], {}, "--devices"),
        (["-d", "i:3"], {}, "--devices"),
        (["-d", "g:1-"], {}, "--devices"),
        (["--gpu-bind-unbind-poll-interval=1"], {}, "--gpu-bind-unbind-poll-interval"),
        (["--hostname-label=host"], {}, "--hostname-label"),
        (["--configmap-data", "ns:name"], {}, "--configmap-data"),
        ([], {"DCGM_EXPORTER_CONFIGMAP_DATA": "ns:name"}, "DCGM_EXPORTER_CONFIGMAP_DATA"),
        (["--kubernetes-enable-pod-uid=perhaps"], {}, "--kubernetes-enable-pod-uid"),
        ([], {"KUBERNETES_ENABLE_DRA": "perhaps"}, "KUBERNETES_ENABLE_DRA"),
        (["--remote-hostengine-info=localhost:5555"], {}, "--remote-hostengine-info"),
        (["--web-config-file", "x"], {}, "--web-config-file"),
        (["--web-systemd-socket"], {}, "--web-systemd-socket"),
        (["--enable-pprof"], {}, "--enable-pprof"),
        ([], {"DCGM_EXPORTER_DUMP_ENABLED": "true"}, "DCGM_EXPORTER_DUMP_ENABLED"),
        (["--config-file=/x"], {}, "--config-file"),
        ([], {"USE_FAKE_GPUS": "1"}, "USE_FAKE_GPUS"),
    ],
)  # fmt: skip
def test_a_value_that_is_refused_is_named(words: list[str], variables: dict[str, str], named: str) -> None:
    with pytest.raises(SettingsError) as raised:
        parse_options(words, variables)
    assert raised.value.message.startswith(named)


@pytest.mark.parametrize(
    ("words", "variables"),
    [
        (["--configmap-data", "none"], {"DCGM_EXPORTER_CONFIGMAP_DATA": "none"}),
        (["--config-file=", "-s", "f"], {"KUBERNETES_ENABLE_DRA": "", "DCGM_LOG_LEVEL": ""}),
    ],
)
def test_refused_options_that_ask_for_nothing_are_accepted(words: list[str], variables: dict[str, str]) -> None:
    assert parse_options(words, variables) == ExporterOptions()


@pytest.mark.parametrize("words", [["--what"], ["-q"], ["collectors"], ["--address"], ["--web-config-file"]])
def test_what_is_no_option_is_an_error_of_usage(words: list[str]) -> None:
    with pytest.raises(UsageError):
        parse_options(words, {})


def test_devices_and_addresses() -> None:
    assert parse_devices("g:0,2-4") == Devices("g", frozenset({0, 2, 3, 4}))
    assert [parse_devices(text) for text in ("f", "g", "i")] == [Devices("f"), Devices("g"), Devices("i")]
    assert [parse_address(text) for text in (":9400", "[::1]:80", "10.0.0.1:1")] == [
        ("", 9400),
        ("::1", 80),
        ("10.0.0.1", 1),
    ]
    for text in ("9400", "a:b", ":70000", ":0000099999", ":"):
        with pytest.raises(SettingsError):
            parse_address(text)


def test_options_that_mean_nothing_here_are_taken() -> None:
    words = ["--disable-startup-validate", "--dump-directory", "/tmp/x", "--dump-retention=24", "--dump-compression"]
    variables = {"DISABLE_STARTUP_VALIDATE": "true", "DCGM_EXPORTER_DUMP_ENABLED": "false"}
    assert parse_options([*words, "--debug"], variables) == ExporterOptions(debug=True)
    assert (
        parse_options(["-rbmn"], {}) == parse_options(["-rb"], {}) == ExporterOptions(replace_blanks_in_model_name=True)
    )


def test_every_xid_of_the_catalog_has_its_words() -> None:
    assert sorted(XID_MESSAGES) == list(range(173))
    assert all(text and text == text.strip() for text in XID_MESSAGES.values())
    assert (XID_MESSAGES[79], XID_MESSAGES[171]) == ("GPU has fallen off the bus", "Uncorrectable DRAM Error")


# --- owners


def containers(*ids: str, resource: str = "nvidia.com/gpu", pod: str = "p") -> list[Held]:
    return [Held(Owner(pod, "ns", "c"), resource, device_id) for device_id in ids]


@pytest.mark.parametrize(
    ("device_id", "keys"),
    [
        ("GPU-a", {("GPU-a", WHOLE)}),
        ("GPU-a::3", {("GPU-a", WHOLE)}),
        ("MIG-2", {("GPU-b", 7)}),
        ("MIG-3::0", {("GPU-b", 1)}),
        ("MIG-GPU-b/7/0", {("GPU-b", 7)}),
        ("nvidia0", {("GPU-a", WHOLE)}),
        ("nvidia1/gi1", {("GPU-b", 1)}),
        ("nvidia0/vgpu1", {("GPU-a", WHOLE)}),
        ("GPU-b", {("GPU-b", WHOLE), ("GPU-b", 7), ("GPU-b", 1)}),
        ("GPU-none", set()),
        ("nvidia9", set()),
        ("9", set()),
        ("", set()),
    ],
)
def test_ids_of_all_plugins_are_understood(device_id: str, keys: set[tuple[str, int]]) -> None:
    found = find_owners(containers(device_id), GPUS, ["nvidia.com/"])
    assert found.gpus == dict.fromkeys(keys, (Owner("p", "ns", "c"),))
    assert set(found.others) == (set() if keys else {("nvidia.com/gpu", device_id)})


def test_the_vendors_key_of_a_mig_device_is_found_by_index_too() -> None:
    assert find_owners(containers("nvidia0/gi1"), GPUS, ["nvidia.com/"]).gpus == {
        ("GPU-a", 1): (Owner("p", "ns", "c"),)
    }


@pytest.mark.parametrize(
    ("resource", "counts"),
    [
        ("nvidia.com/gpu", True),
        ("nvidia.com/gpu.shared", True),
        ("nvidia.com/pgpu", True),
        ("nvidia.com/mig-1g.5gb", True),
        ("acme.org/fast-gpu", True),
        ("acme.org/fast", False),
        ("amd.com/gpu", False),
    ],
)
def test_resources_count_by_their_prefix_or_name(resource: str, counts: bool) -> None:
    found = find_owners(containers("GPU-a", resource=resource), GPUS, ["nvidia.com/"], ["acme.org/fast-gpu"])
    assert bool(found.gpus) is counts


def test_every_pod_of_a_shared_gpu_is_an_owner_once() -> None:
    asked = [*containers("GPU-a::0", "GPU-a::1"), *containers("GPU-a::2", pod="q")]
    assert find_owners(asked, GPUS, [""]).gpus["GPU-a", WHOLE] == (Owner("p", "ns", "c"), Owner("q", "ns", "c"))
    virtual = find_owners(asked, GPUS, [""], virtual=True).gpus["GPU-a", WHOLE]
    assert [(owner.pod, owner.vgpu) for owner in virtual] == [("p", "0"), ("p", "1"), ("q", "2")]


@pytest.mark.parametrize(
    ("device", "keys"),
    [
        ("gpu-5", {("GPU-a", WHOLE)}),
        ("gpu-3", {("GPU-b", WHOLE), ("GPU-b", 7), ("GPU-b", 1), ("GPU-b", 4)}),
        ("gpu-0", set()),
        ("gpu-3-mig-2g10gb-14-4", {("GPU-b", 7)}),
        ("gpu-3-mig-14-4-2", {("GPU-b", 7)}),
        ("gpu-3-mig-3g20gb-9-0", {("GPU-b", 1)}),
        ("gpu-3-mig-1g5gb-me-20-6", {("GPU-b", 4)}),
        ("gpu-3-mig-9-0-4", set()),
        ("gpu-3-mig-1g5gb-19-0", set()),
        ("gpu-vfio-0", set()),
        ("channel-0", set()),
        ("", set()),
    ],
)
def test_devices_of_claims_are_found_by_their_names(device: str, keys: set[tuple[str, int]]) -> None:
    """By minor number and first slice; by profile where NVML tells no slices (start -1) and it is the only one."""
    mig = GPUS[1]._replace(
        minor=3,
        instances=(
            GPUS[1].instances[0]._replace(start=4), GPUS[1].instances[1], Instance(4, ("MIG-4",), "1g.5gb+me", {}),
        ),
    )  # fmt: skip
    claim = Claim("claim", "ns", "gpu.nvidia.com", "node-1", device)
    owner = Owner("p", "ns", "c", claim=claim)
    gpus = (GPUS[0]._replace(minor=5), mig)
    found = find_owners([], gpus, ["nvidia.com/"], claimed=[owner, owner])
    assert found.gpus == dict.fromkeys(keys, (owner,))
    assert found.others == {}
    foreign = owner._replace(claim=claim._replace(driver="gpu.example.com"))
    assert find_owners([], gpus, [""], claimed=[foreign]).gpus == {}


def test_gpus_that_vfio_has_not_are_none_for_virtual_machines() -> None:
    function = Function("0000:3b:00.0", 0x10DE, 0x2330, 0x030200, "nvidia")
    candidates = [Candidate(function._replace(driver=driver), 9) for driver in ("nvidia", "", "nouveau")]
    assert find_vfio_owners(candidates, {}) == []


def test_gpus_for_virtual_machines_have_their_pods() -> None:
    function = Function("0000:3b:00.0", 0x10DE, 0x2330, 0x030200, "vfio-pci")
    candidates = (Candidate(function, 9), Candidate(function._replace(address="0000:3c:00.0"), 10, 4))
    found = find_owners(containers("9", resource="nvidia.com/GH100_H100"), GPUS, ["nvidia.com/"])
    assert [(each.bus_id, each.owners) for each in find_vfio_owners(candidates, found.others)] == [
        ("0000:3b:00.0", (Owner("p", "ns", "c"),)),
        ("0000:3c:00.0", ()),
    ]


def test_gpus_for_virtual_machines_have_the_pods_of_claims() -> None:
    candidates = [Candidate(Function(f"0000:3{n}:00.0", 0x10DE, 0x2330, 0x030200, "vfio-pci"), n) for n in (1, 2)]
    claim = Claim("claim", "ns", "gpu.nvidia.com", "node-1", "gpu-vfio-0000-31-00-0")
    owner = Owner("p", "ns", "c", claim=claim)
    foreign = owner._replace(claim=claim._replace(driver="gpu.example.com", device="gpu-vfio-0000-32-00-0"))
    found = find_vfio_owners(candidates, {}, [owner, foreign])
    assert [(each.bus_id, each.owners) for each in found] == [("0000:31:00.0", (owner,)), ("0000:32:00.0", ())]


# --- the text


def test_labels_have_dcgm_exporters_names_and_order() -> None:
    picture = Picture(Sample(GPUS, {"DCGM_FI_DRIVER_VERSION": "550.1"}), {("GPU-b", 1): [Owner("p", "ns", "c")]})
    assert (
        'DCGM_FI_DEV_FB_USED{gpu="1",UUID="GPU-b",pci_bus_id="00000000:02:00.0",device="nvidia1",'
        'modelName="NVIDIA A100",GPU_I_PROFILE="3g.20gb",GPU_I_ID="1",hostname="node-1",'
        'DCGM_FI_DRIVER_VERSION="550.1",pod="p",namespace="ns",container="c"} 22'
    ) in page_of(picture).splitlines()
    old = ExporterOptions(use_old_namespace=True, hostname_label="Hostname", replace_blanks_in_model_name=True)
    assert (
        'DCGM_FI_DEV_FB_USED{gpu="1",uuid="GPU-b",pci_bus_id="00000000:02:00.0",device="nvidia1",'
        'modelName="NVIDIA-A100",GPU_I_PROFILE="3g.20gb",GPU_I_ID="1",Hostname="node-1",'
        'DCGM_FI_DRIVER_VERSION="550.1",pod_name="p",pod_namespace="ns",container_name="c"} 22'
    ) in page_of(picture, old).splitlines()
    assert "hostname" not in page_of(picture, ExporterOptions(no_hostname=True))


def test_an_instance_has_its_own_memory_and_its_gpus_temperature() -> None:
    page = read_page(page_of(Picture(Sample(GPUS))))
    assert {labels.get("GPU_I_ID"): number for labels, number in page[USED]} == {None: 100, "7": 11, "1": 22}
    assert {labels.get("GPU_I_ID"): number for labels, number in page["DCGM_FI_DEV_GPU_TEMP"]} == {
        None: 40,
        "7": 50,
        "1": 50,
    }
    assert len(page[UTIL]) == 1, "what a GPU does not answer has no series"
    assert "DCGM_FI_DEV_ENC_UTIL" not in page


@pytest.mark.parametrize(
    ("devices", "expected"), [("f", "0 1/1 1/7"), ("g", "0 1"), ("g:1", "1"), ("i", "1/1 1/7"), ("g:5", "")]
)
def test_what_has_series(devices: str, expected: str) -> None:
    page = read_page(page_of(Picture(Sample(GPUS)), ExporterOptions(devices=devices)))
    found = ("/".join(filter(None, (labels["gpu"], labels.get("GPU_I_ID")))) for labels, _ in page.get(USED, []))
    assert " ".join(sorted(found)) == expected


def test_xids_and_clock_events_have_labels_of_their_own() -> None:
    gpu = GPUS[0]._replace(xid=79, xids={79: 2, 31: 1}, clocks={"power_cap": 3})
    page = read_page(page_of(Picture(Sample((gpu, GPUS[0]._replace(number=1, uuid="GPU-c", xid=0))))))
    assert value(page, XID, gpu="0", err_code="79", err_msg="GPU has fallen off the bus") == 79
    assert value(page, XID, gpu="1", err_code="0", err_msg="No Error") == 0
    assert value(page, XID_COUNT, xid="79", window_size_in_ms="300000") == 2
    assert value(page, CLOCK_COUNT, clock_event="power_cap", window_size_in_ms="300000") == 3


def test_jobs_make_a_series_each() -> None:
    page = read_page(page_of(Picture(Sample(GPUS), jobs={(0, WHOLE): ("a", "b"), (1, 7): ("c",)})))
    assert sorted(labels.get("hpc_job", "") for labels, _ in page[USED]) == ["", "a", "b", "c"]


def test_jobs_are_read_from_files_by_gpu_and_instance(tmp_path: Path) -> None:
    for name, text in {"0": "job-1\njob-2\njob-1\n", "1.7": "job-3", "2": "", "x": "no", "0.": "no"}.items():
        (tmp_path / name).write_text(text)
    os.mkfifo(tmp_path / "3")
    assert read_jobs(str(tmp_path)) == {
        (0, WHOLE): ("job-1", "job-2"),
        (1, 7): ("job-3",),
        (2, WHOLE): (),
    }
    assert read_jobs("") == read_jobs(str(tmp_path / "none")) == {}


def test_a_job_is_no_link_to_a_file_that_its_user_cannot_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("root:$6$hash:20000\n")
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs/0").symlink_to("../secret")
    (tmp_path / "jobs/1").write_text("17\n")
    assert read_jobs(str(tmp_path / "jobs")) == {(1, WHOLE): ("17",)}


def test_a_lost_gpu_is_down_and_has_no_values() -> None:
    page = read_page(page_of(Picture(Sample((GPUS[0]._replace(error="GPU is lost"), GPUS[1])))))
    assert value(page, "ocigpu_exporter_gpu_up", gpu="0", UUID="GPU-a") == 0
    assert value(page, "ocigpu_exporter_gpu_up", gpu="1") == 1
    assert {labels["gpu"] for labels, _ in page[USED]} == {"1"}


@given(name=st.text(max_size=30), pod=st.text(max_size=30))
def test_label_values_are_escaped(name: str, pod: str) -> None:
    picture = Picture(Sample((GPUS[0]._replace(name=name),)), {("GPU-a", WHOLE): [Owner(pod, "ns", 'a"b\\c\nd')]})
    text = page_of(picture)
    body = "".join(line + "\n" for line in text.split("\n") if line.startswith("DCGM_FI_DEV_FB_USED{"))
    (family,) = _families(body)
    labels = family.samples[0].labels
    assert (labels["modelName"], labels["pod"], labels["container"]) == (name, pod, 'a"b\\c\nd')


def _families(text: str) -> list[object]:
    from prometheus_client.parser import text_string_to_metric_families

    return list(text_string_to_metric_families(text))


# --- what comes from the process that asks NVML


@pytest.mark.parametrize(
    "data",
    [
        [], "x", 1, None, {}, {"gpus": 1}, {"gpus": [{}]},
        {"gpus": [{"number": "x"}], "labels": {}, "seconds": 0, "listed": []},
        {"gpus": [{"number": 0}], "labels": {}, "seconds": 0}, {"gpus": [], "labels": [], "seconds": 0},
    ],
    ids=str,
)  # fmt: skip
def test_a_document_that_is_no_sample_is_refused(data: object) -> None:
    with pytest.raises((ValueError, TypeError, KeyError, AttributeError)):
        parse_sample(data)


def test_values_that_are_no_numbers_are_left_out() -> None:
    gpu = {
        "number": 0,
        "labels": {},
        "xid": None,
        "xids": {},
        "instances": [],
        "minor": 0,
        "values": {"a": "x", "b": float("inf"), "c": 1.5, "d": None},
    }
    (found,) = parse_sample({"gpus": [gpu], "labels": {}, "seconds": 0.1, "listed": []}).gpus
    assert found.values == {"c": 1.5}


def test_every_error_of_the_exporter_has_a_code() -> None:
    with pytest.raises(OcigpuError) as raised:
        parse_options(["--address=x"], {})
    assert "OCIGPU-KUBE-4" in raised.value.render("ocigpu")


def test_the_documentation_has_what_the_exporter_says_of_itself() -> None:
    text = (REPOSITORY / "docs/METRICS.md").read_text()
    own = {name for path in (REPOSITORY / "ocigpu/exporter").glob("*.py")
           for name in re.findall(r'"(ocigpu_exporter_\w+)"', path.read_text())}  # fmt: skip
    assert own == set(re.findall(r"^\| `(ocigpu_exporter_\w+)`", text, re.MULTILINE))
