"""Images that put something else in the place of /dev/null, which runtimes mount over what they hide."""

from pathlib import Path
from typing import Any

import pytest
from hostile_images import without_dev
from security_lab import Attacks, Build, Marker
from support.products import one_in

pytestmark = [pytest.mark.root, pytest.mark.engine]

MASKED = ["/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/timer_list", "/sys/firmware"]
"""A part of what Docker and containerd hide."""
LOOK = (
    "echo started; /busybox cat /proc/self/mountinfo; /busybox cat /proc/driver/nvidia/gpus/*/information; "
    "/busybox ls -R /proc/driver/nvidia /dev"
)
TARGETS = (
    "a file of the host",
    "a directory of the host",
    "the driver's GPUs",
    "a directory of the image",
    "the memory",
)


def replace_null(what: str) -> Build:
    def build(rootfs: Path, marker: Marker) -> None:
        targets = {
            "a file of the host": f"{marker.relative()}/secret",
            "a directory of the host": marker.absolute,
            "the driver's GPUs": "/proc/driver/nvidia/gpus",
            "a directory of the image": "/opt/lib",
            "the memory": "/proc/kcore",
        }
        (rootfs / "dev/null").symlink_to(targets[what])

    return build


def masked(config: dict[str, Any]) -> None:
    without_dev(config)
    config["linux"]["maskedPaths"] = list(MASKED)


CASES = [(way, what, "runc") for what in TARGETS for way in ("hook", "spec")]
CASES += [(way, "the driver's GPUs", "runc") for way in ("cdi", "configure")]
CASES += [(way, "a directory of the image", "crun") for way in ("hook", "spec")]


@pytest.mark.parametrize(("way", "what", "low_level"), one_in(3, CASES))
def test_another_null_shows_neither_the_host_nor_other_gpus(
    attacks: Attacks, way: str, what: str, low_level: str
) -> None:
    """19: runc before 1.2.8, 1.3.3 and 1.4.0-rc.3 mounts what the link names (CVE-2025-31133), inside the container.

    Whatever the runtime makes of it, ours opens no /dev/null of an image, and what it hides stays hidden.
    """
    arguments = ["/busybox", "sh", "-c", LOOK]
    outcome = attacks.start(replace_null(what), way, low_level=low_level, arguments=arguments, edit=masked)
    assert outcome.started or "of the host" not in what, outcome.said
    assert attacks.host.gpus[1] not in outcome.result.stdout
    assert "nvidia1" not in outcome.result.stdout
