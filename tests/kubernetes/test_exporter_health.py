"""Whether a GPU is healthy, as the exporter tells it."""

import pytest
from exporter_lab import read_page

from ocigpu.exporter.exposition import Picture, render
from ocigpu.exporter.health import HealthWatch
from ocigpu.exporter.options import ExporterOptions, parse_options
from ocigpu.exporter.owners import WHOLE
from ocigpu.exporter.sample import GpuSample, Instance, Sample
from ocigpu.kubernetes.node.health import Rules, parse_policy

GPU = GpuSample(0, "GPU-a", "00000000:01:00.0", "A")
RULES = Rules(probes=2, hold=10.0)


def watch(**variables: str) -> HealthWatch:
    options = parse_options((), variables)
    policy, notes = parse_policy(options.disabled_health_checks, options.enabled_health_checks)
    assert notes == ()
    return HealthWatch(policy, RULES)


def test_an_xid_makes_a_gpu_unhealthy_until_it_has_answered_well_for_a_while() -> None:
    health = watch()
    sick = GPU._replace(xid_totals={79: 1})
    for now, gpu, reason in (
        (0, GPU, ""), (1, GPU._replace(xid_totals={31: 5}), ""), (2, sick, "XID 79"), (3, sick, "XID 79"),
        (11, sick, "XID 79"), (13, sick, ""), (14, GPU._replace(xid_totals={79: 2}), "XID 79"),
    ):  # fmt: skip
        health.take((gpu,), now)
        assert health.reasons == {("GPU-a", WHOLE): reason}, now
    health.take((), 15)
    assert health.reasons == {}


def test_counts_that_begin_anew_are_new_faults() -> None:
    health = watch()
    health.take((GPU._replace(xid_totals={79: 3, 48: 1}),), 0)
    health.take((GPU._replace(xid_totals={48: 1}),), 1)
    assert health.reasons == {("GPU-a", WHOLE): "XID 48"}


def test_a_lost_gpu_and_an_instance_have_their_own_reasons() -> None:
    health = watch()
    parts = (Instance(7, ("MIG-1",), "2g.10gb", {}, xid_totals={94: 1}), Instance(1, ("MIG-2",), "3g.20gb", {}))
    other = GPU._replace(number=1, uuid="GPU-b", instances=parts)
    foreign = GPU._replace(uuid="0x1", names={"gpu_id": "0"})
    gpus = (GPU._replace(error='GPU is lost"\n'), other, foreign)
    health.take(gpus, 0)
    picture = Picture(Sample(gpus), health=health.reasons)
    page = read_page(render((), picture, ExporterOptions(), "n").decode())["ocigpu_gpu_health"]
    assert [(each["UUID"], each.get("GPU_I_ID"), each["reason"], number) for each, number in page] == [
        ("GPU-a", None, 'GPU is lost"\n', 0), ("GPU-b", None, "", 1), ("GPU-b", "7", "XID 94", 0),
        ("GPU-b", "1", "", 1),
    ]  # fmt: skip
    one = read_page(render((), picture, ExporterOptions(devices="g:1"), "").decode())["ocigpu_gpu_health"]
    assert {each["UUID"] for each, _ in one} == {"GPU-b"}


@pytest.mark.parametrize(("variables", "reason"), [({"DP_DISABLE_HEALTHCHECKS": "79"}, ""), ({}, "XID 79")])
def test_the_device_plugins_variables_count(variables: dict[str, str], reason: str) -> None:
    health = watch(**variables)
    health.take((GPU._replace(xid_totals={79: 1}),), 0)
    assert health.reasons == {("GPU-a", WHOLE): reason}
