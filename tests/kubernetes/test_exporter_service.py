"""What becomes of the page when samples are old, missing or more than one."""

import time
from collections.abc import Iterator

import pytest
from exporter_lab import read_page, value

from ocigpu.core.errors import HostError
from ocigpu.core.settings import Settings
from ocigpu.exporter.options import ExporterOptions
from ocigpu.exporter.sample import GpuSample, Sample
from ocigpu.exporter.service import ExporterService
from ocigpu.system.service import ServiceLog

TEMPERATURE = "DCGM_FI_DEV_GPU_TEMP"
GPU = GpuSample(0, "GPU-a", "00000000:01:00.0", "A", values={TEMPERATURE: 40})


@pytest.fixture
def service() -> Iterator[ExporterService]:
    found = ExporterService(
        ExporterOptions(address="127.0.0.1:0"), Settings(driver_root="/nonexistent"), ServiceLog(False)
    )
    yield found
    found.web.close()


def take(service: ExporterService, sample: Sample) -> None:
    """Let the service collect one sample."""
    samples = iter([sample])

    def wait(_seconds: float) -> list[Sample]:
        for one in samples:
            return [one]
        raise SystemExit

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(service.sources["nvidia"].sampler, "wait", wait)
        with pytest.raises(SystemExit):
            service.collect()


def test_values_outlive_a_failure_but_not_for_ever(service: ExporterService) -> None:
    take(service, Sample((GPU,)))
    take(service, Sample(error="it hangs"))
    assert TEMPERATURE in read_page(service.page.text.decode())
    own = read_page(service.own_metrics().decode())
    assert (value(own, "ocigpu_exporter_up"), value(own, "ocigpu_exporter_samples_total", result="failed")) == (0, 1)
    service.sources["nvidia"].sampled = time.monotonic() - 301
    take(service, Sample(error="it hangs"))
    assert read_page(service.page.text.decode()) == {}
    take(service, Sample((GPU,)))
    assert TEMPERATURE in read_page(service.page.text.decode())
    assert value(read_page(service.own_metrics().decode()), "ocigpu_exporter_up") == 1


def test_a_defect_is_told_and_the_work_begins_anew(
    service: ExporterService, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls: list[float] = []

    def wait(seconds: float) -> list[Sample]:
        calls.append(seconds)
        if len(calls) == 1:
            raise RuntimeError("a defect")
        if len(calls) == 2:
            return [Sample((GPU._replace(values={TEMPERATURE: 1}),)), Sample((GPU,))]
        raise SystemExit

    monkeypatch.setattr(service.sources["nvidia"].sampler, "wait", wait)
    monkeypatch.setattr("ocigpu.exporter.service.PAUSE", 0.0)
    with pytest.raises(SystemExit):
        service.collect()
    assert "RuntimeError: a defect" in capsys.readouterr().out
    assert value(read_page(service.page.text.decode()), TEMPERATURE) == 40, "the latest of two samples"
    assert service.sources["nvidia"].done == 1


@pytest.mark.parametrize(
    ("listed", "expected"), [(("0000:01:00.0",), [("GPU-a", 0.0), ("GPU-b", 1.0)]), ((), [("GPU-b", 1.0)])]
)
def test_a_gpu_that_nvml_does_not_know_is_lost_unless_the_driver_gave_it_up(
    service: ExporterService, listed: tuple[str, ...], expected: list[tuple[str, float]]
) -> None:
    other = GPU._replace(number=1, uuid="GPU-b", bus_id="00000000:02:00.0")
    take(service, Sample((GPU, other)))
    take(service, Sample((other._replace(number=0),), listed=("0000:02:00.0", *listed)))
    page = read_page(service.page.text.decode())
    assert sorted((labels["UUID"], number) for labels, number in page["ocigpu_exporter_gpu_up"]) == expected


def test_the_vendors_that_are_sampled_are_those_whose_driver_is_here(
    service: ExporterService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVIDIA's GPUs are waited for where there are no others; one that has been sampled stays, and fails."""

    def look(*names: str) -> list[str]:
        monkeypatch.setattr("ocigpu.exporter.service.find_vendors", lambda _: names)
        service._find_sources()
        return list(service.sources)

    assert look() == ["nvidia"]
    assert look("amd") == ["amd"], "nothing came of NVIDIA's"
    assert look("nvidia", "amd") == ["amd", "nvidia"]
    service.sources["nvidia"].take(Sample((GPU,)), 0.0, 0.0)
    assert look("amd") == ["amd", "nvidia"]

    def fail(_: Settings) -> tuple[str, ...]:
        raise HostError("OCIGPU-HOST-3", "no")

    monkeypatch.setattr("ocigpu.exporter.service.find_vendors", fail)
    service._find_sources()
    assert list(service.sources) == ["amd", "nvidia"]
