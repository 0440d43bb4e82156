"""The DRA driver's metrics, and taints that withhold nothing."""

from collections import Counter

import pytest
from dra_lab import DRIVER, NODE
from exporter_lab import read_page, value
from kubernetes_lab import host

from ocigpu.core.errors import HostError, SettingsError
from ocigpu.core.settings import Settings
from ocigpu.kubernetes.dra.devices import DraNode, Taint, make_devices
from ocigpu.kubernetes.dra.driver import DraDriver
from ocigpu.kubernetes.dra.metrics import BOUNDS, METRICS, DraMetrics
from ocigpu.kubernetes.dra.options import parse_options
from ocigpu.kubernetes.node.health import Event
from ocigpu.kubernetes.node.program import EventWatcher


def test_calls_errors_and_slices_are_counted() -> None:
    metrics = DraMetrics(DRIVER, NODE, lambda: {"mig": 3})
    page = read_page(metrics.render().decode())
    assert value(page, "nvidia_dra_requests_total", operation="prepare") == 0, "known before the first call"
    assert "ocigpu_dra_published_devices" not in page, "nothing was published yet"
    with metrics.call("prepare"):
        running = read_page(metrics.render().decode())
        assert value(running, "nvidia_dra_requests_inflight", operation="prepare", driver=DRIVER) == 1
    metrics.failed("prepare", "OCIGPU-DRA-4")
    metrics.failed_to_publish()
    metrics.published(8, 2, Counter({(f"{DRIVER}/xid", "None"): 1}))
    text = metrics.render().decode()
    page = read_page(text)
    assert value(page, "nvidia_dra_requests_inflight", operation="prepare") == 0
    assert value(page, "nvidia_dra_requests_total", operation="prepare") == 1
    assert len(BOUNDS) == 9
    assert value(page, "nvidia_dra_request_duration_seconds_bucket", operation="prepare", le="0.05") == 1
    assert value(page, "nvidia_dra_node_prepare_errors_total", error_type="OCIGPU-DRA-4") == 1
    assert value(page, "nvidia_dra_prepared_devices", device_type="mig", node=NODE, driver=DRIVER) == 3
    assert value(page, "nvidia_dra_prepared_devices", device_type="gpu") == 0
    assert value(page, "ocigpu_dra_published_slices") == 2
    assert value(page, "ocigpu_dra_tainted_devices", taint=f"{DRIVER}/xid", effect="None") == 1
    assert value(page, "ocigpu_dra_publish_errors_total") == 1
    metrics.failed("unprepare", "OCIGPU-DRA-5")
    names = {line.split()[2] for line in metrics.render().decode().splitlines() if line.startswith("# TYPE")}
    assert names == set(METRICS)


def test_what_is_prepared_has_no_series_while_it_is_not_known() -> None:
    def fail() -> dict[str, int]:
        raise HostError("OCIGPU-DRA-5", "it is not understood")

    page = read_page(DraMetrics(DRIVER, NODE, fail).render().decode())
    assert "nvidia_dra_prepared_devices" not in page
    assert "nvidia_dra_requests_total" in page


@pytest.mark.parametrize(
    "words", [("--http-endpoint=nowhere",), ("--http-endpoint=:99999",), ("--metrics-path=/other",)]
)
def test_an_endpoint_that_is_none_is_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(SettingsError, match=words[0].partition("=")[0]):
        parse_options(("--node-name=n", *words), {})
    parse_options(("--node-name=n", "--metrics-path=/metrics"), {"HTTP_ENDPOINT": ":8080"})


def test_an_xid_of_a_program_and_an_unwatched_gpu_withhold_nothing() -> None:
    driver = DraDriver(parse_options(("--node-name=n", "--vendor=nvidia"), {}), Settings())
    driver.node = DraNode(host("a100-8"))
    driver.devices = make_devices(driver.node)
    uuids = [gpu.uuid for gpu in driver.node.facts.gpus]
    watcher = driver.watchers["nvidia"] = EventWatcher()
    watcher.unwatched = frozenset(uuids[:2])
    inventory = driver._inventory()
    driver.monitor.record_event(Event(31, uuids[1]), inventory, 1e9)
    driver.monitor.record_event(Event(13, uuids[2]), inventory, 1e9)
    driver.monitor.record_event(Event(79, uuids[2]), inventory, 1e9)
    driver.update_reasons()
    taints = [each.taints for each in driver.offered]
    assert taints[:4] == [
        (Taint(f"{DRIVER}/unmonitored", "", "None"),),
        (Taint(f"{DRIVER}/xid", "31", "None"),),
        (Taint(f"{DRIVER}/xid", "79", "NoSchedule"),),
        (),
    ]
