"""The attacks on GPU containers that NVIDIA's container stack was, or could have been, open to.

Each row: what the attacker tries, the vulnerability of the vendor's stack that it was (id of the CVE; "" where it is a
rule without one), the ways it is tried in, and where.  Ways are the modes of the shim, ``configure`` of
ocigpu-container-cli, and the hooks of a CDI specification (:data:`security_lab.CDI_HOOKS`).
"""

from typing import NamedTuple

MODES = ("hook", "spec", "cdi")
GIVERS = (*MODES, "configure")
RUNNING = ("ps", "verify", "repair", "attach")
"""Commands for containers that run."""
MERGE = "merge"
"""Mode hook with the setting loader-cache = "merge"."""
FILES_OF_LOADER = ("update-ldcache", "enable-cuda-compat")
ALL_HOOKS = (
    "create-symlinks",
    "enable-cuda-compat",
    "update-ldcache",
    "disable-device-node-modification",
    "update-application-profile",
    "chmod",
)


class Row(NamedTuple):
    """``cves``: without the prefix "CVE-"; ``tests``: pairs of file and function."""

    tries: str
    cves: tuple[str, ...]
    ways: tuple[str, ...]
    tests: tuple[tuple[str, str], ...]
    elsewhere: str = ""


def here(file: str, *functions: str) -> tuple[tuple[str, str], ...]:
    return tuple((f"security/test_security_{file}.py", function) for function in functions)


IMAGES = (
    *here("images", "test_a_hostile_image_gets_nothing_of_the_host"),
    *here("old_kernels", "test_a_hostile_image_gets_nothing_on_an_old_kernel"),
    *here("user_namespace", "test_a_hostile_image_gets_nothing_in_a_user_namespace"),
)
LINKS = (*here("links", "test_links_out_of_an_image_lead_nowhere"), *IMAGES[1:])

BATTERY: dict[int, Row] = {
    1: Row(
        "pass off host files as compatibility libraries, through a directory that is a link",
        ("2024-0132", "2025-23359"),
        (*GIVERS, "enable-cuda-compat"),
        IMAGES,
    ),
    2: Row(
        "have something other than a file opened, or waited for, as a compatibility library",
        ("2024-0132",),
        (*GIVERS, "enable-cuda-compat"),
        IMAGES,
    ),
    3: Row(
        "have files created on the host, where links in place of the image's directories point",
        ("2024-0133", "2024-0134"),
        (*GIVERS, *ALL_HOOKS),
        LINKS,
    ),
    4: Row(
        "have host files created, emptied or mounted over, through links in place of the driver's files",
        ("2024-0132", "2024-0133", "2024-0134"),
        (*GIVERS, MERGE, *ALL_HOOKS),
        LINKS,
    ),
    5: Row(
        "swap a directory for a link between its resolution and its use",
        ("2025-23359", "2026-24260"),
        (*GIVERS, *ALL_HOOKS),
        (
            *here(
                "race",
                "test_names_that_are_exchanged_lead_no_provisioning_out_of_the_root",
                "test_names_that_are_exchanged_lead_mode_spec_nowhere_else",
                "test_names_that_are_exchanged_lead_no_configure_out_of_the_root",
                "test_names_that_are_exchanged_lead_no_container_out_of_its_root",
            ),
            (
                "engines/test_engines_cdi_attacks.py",
                "test_a_container_that_exchanges_names_on_a_shared_volume_gets_nothing_of_the_host",
            ),
        ),
    ),
    6: Row(
        "have code from the image loaded into host processes, through the image's variables",
        ("2025-23266",),
        (*GIVERS, *ALL_HOOKS),
        (
            *here("ldconfig", "test_every_hook_that_is_written_has_an_environment_of_its_own"),
            *here("inherited", "test_nothing_of_an_image_runs_on_the_host"),
            *here("environment", "test_what_an_image_sets_reaches_its_own_processes_alone"),
        ),
    ),
    7: Row(
        "have the image's modules and programs loaded from the working directory",
        ("2025-23266",),
        (*GIVERS, *ALL_HOOKS),
        (
            *here("inherited", "test_nothing_of_an_image_runs_on_the_host"),
            *here("environment", "test_an_engines_variables_and_directory_change_nothing"),
        ),
    ),
    8: Row(
        "have the image's own ldconfig executed",
        ("2024-0136", "2024-0137"),
        (*GIVERS, *FILES_OF_LOADER),
        here("ldconfig", "test_the_images_own_ldconfig_is_never_executed"),
        "no setting makes it run, so there is nothing to confine",
    ),
    9: Row(
        "write to the host's ldconfig while it runs",
        ("2024-0135",),
        ("hook", "configure", "update-ldcache"),
        here("ldconfig", "test_the_hosts_ldconfig_cannot_be_written_while_it_runs"),
        "mode spec runs no ldconfig, mode cdi the hook update-ldcache",
    ),
    10: Row(
        "have the loader's cache or configuration written or read in the wrong place, or without end",
        ("2025-23267",),
        (*GIVERS, MERGE, *FILES_OF_LOADER),
        IMAGES,
    ),
    11: Row(
        "stall the host with very many, or malformed, libraries",
        (),
        (*GIVERS, MERGE, *FILES_OF_LOADER),
        (*IMAGES, *here("ldconfig", "test_very_many_libraries_do_not_hold_up_the_host")),
    ),
    12: Row(
        "have mounts left on the host through a root directory shared with it",
        (),
        (*GIVERS, MERGE, *(way for way in ALL_HOOKS if way != "chmod")),
        here(
            "lasting",
            "test_a_root_that_is_shared_with_the_host_leaves_no_mount_there",
            "test_a_volume_that_is_shared_with_the_host_leaves_no_mount_there",
        ),
        "chmod mounts nothing",
    ),
    13: Row(
        "find what a half-failed start left behind",
        (),
        (*GIVERS, MERGE, *ALL_HOOKS),
        (
            *here(
                "faults",
                "test_a_start_that_ends_at_any_step_leaves_nothing",
                "test_a_hook_that_ends_at_any_step_leaves_nothing",
            ),
            ("provision/test_apply_runtimes.py", "test_a_failed_hook_stops_runc_and_leaves_the_image_as_it_was"),
            (
                "provision/test_apply_here.py",
                "test_a_failed_hook_stops_the_container_and_leaves_the_image_as_it_was",
            ),
        ),
    ),
    14: Row(
        "request channels that cannot exist",
        (),
        GIVERS,
        here(
            "requests",
            "test_channels_that_cannot_be_given_stop_the_container_before_anything_is_made",
            "test_a_channel_without_a_node_on_the_host_makes_none_there",
            "test_empty_channels_between_commas_count_for_nothing",
        ),
    ),
    15: Row(
        "state requirements that take forever to read, or that forge log lines",
        (),
        GIVERS,
        here("requests", "test_requirements_are_read_within_bounds_and_told_in_one_line"),
    ),
    16: Row(
        "have more read than a malformed loader cache of the driver root contains",
        (),
        ("plan",),
        here("requests", "test_a_malformed_loader_cache_of_the_driver_root_is_no_trouble"),
        "the host's facts are the same in every mode",
    ),
    17: Row(
        "(no attack) lose the GPU, or gain another, when limits change or rules are reapplied",
        (),
        MODES,
        (("engines/test_engines_update.py", "test_a_container_keeps_its_gpus_and_gets_no_others"),),
        "the rules that configure adds are in no config.json, so who applies that anew takes the GPU away; where an"
        " engine writes the CDI hooks, the rules are the engine's",
    ),
    18: Row(
        "block the exporter's probe and scrape, or exhaust memory, with many, slow or large requests",
        ("2026-47483",),
        ("exporter",),
        tuple(
            ("kubernetes/test_exporter_web.py", function)
            for function in (
                "test_a_flood_of_slow_clients_stops_neither_the_probe_nor_the_scrape",
                "test_a_client_too_many_takes_the_place_of_the_slowest",
                "test_probes_have_places_that_no_other_client_takes",
                "test_a_client_that_reads_no_answer_keeps_no_page_of_its_own",
                "test_what_is_no_request_for_a_page_is_refused_and_the_connection_closed",
            )
        ),
        "no start of a container listens to a network; caas has a row of its own",
    ),
    19: Row(
        "have a host file, or another's GPU, shown instead of what is hidden, through another /dev/null",
        ("2025-31133",),
        GIVERS,
        here("masks", "test_another_null_shows_neither_the_host_nor_other_gpus"),
    ),
    20: Row(
        "get devices in spite of the settings, through annotations of an image or a pod",
        ("2024-3154", "2026-53492"),
        MODES,
        (
            (
                "engines/test_engines_annotations.py",
                "test_annotations_of_an_image_skip_no_setting_under_podman",
            ),
            (
                "engines/test_engines_annotations.py",
                "test_a_bundle_in_the_directory_of_containerds_cri_vouches_for_its_annotations",
            ),
            ("test_gate.py", "test_every_source_kind_and_setting"),
        ),
        "configure reads no annotation; the vulnerabilities were of engines",
    ),
    21: Row(
        "have an image's file trusted as the configuration of a running container, through an annotation named bundle",
        (),
        RUNNING,
        tuple(
            ("containers/test_bundles_believed.py", function)
            for function in (
                "test_an_annotation_names_no_bundle",
                "test_an_annotation_of_podmans_names_no_bundle",
                "test_whatever_a_configuration_says_only_devices_of_the_driver_that_were_given_are_allowed",
                "test_a_configuration_that_the_container_was_not_started_with_is_not_believed",
                "test_where_layers_of_images_and_volumes_lie_no_file_is_believed",
                "test_a_file_is_read_only_where_nobody_else_writes_and_nothing_else_is_opened",
            )
        ),
        "commands for running containers; a start is given its bundle by the engine",
    ),
    22: Row(
        "get from repair what a hook refused, or granted only in part",
        (),
        RUNNING,
        (
            ("containers/test_repair_containers.py", "test_what_the_hook_of_another_has_refused_is_not_given"),
            ("containers/test_repair_containers.py", "test_a_container_that_may_mount_shows_nothing_by_its_mounts"),
            (
                "containers/test_verify_grants.py",
                "test_a_mount_namespace_that_a_container_made_itself_tells_nothing",
            ),
        ),
        "commands for running containers",
    ),
    23: Row(
        "block the container service: with connections without a credential, or with one tenant's requests",
        (),
        ("caas",),
        tuple(
            (f"kubernetes/test_caas_{file}.py", function)
            for file, functions in (
                (
                    "streams",
                    (
                        "test_a_request_that_does_not_come_ends_its_connection",
                        "test_strangers_have_their_room_and_no_more",
                        "test_an_answer_that_a_stranger_does_not_read_ends_his_connection",
                    ),
                ),
                (
                    "load",
                    (
                        "test_one_tenancys_requests_wait_for_each_other_and_nobody_else_for_them",
                        "test_a_mebibyte_of_errors_is_refused_before_they_are_made",
                        "test_a_body_of_more_than_any_request_needs_is_refused_at_once",
                        "test_a_credential_has_so_many_requests_a_second",
                        "test_a_body_in_very_many_parts_ends_its_connection",
                        "test_nothing_of_a_connection_that_ended_is_kept",
                    ),
                ),
            )
            for function in functions
        ),
        "no start of a container listens to a network",
    ),
    24: Row(
        "start in a host directory that the runtime inherited open",
        ("2024-21626",),
        MODES,
        here("environment", "test_the_runtime_inherits_no_descriptor_of_ours"),
        "the vulnerability was of runc's own descriptors; other ways are hooks, which start no runtime",
    ),
    25: Row(
        "have files created, replaced or changed in a volume, where the image's links point or the driver's files go",
        (),
        (*GIVERS, MERGE, *ALL_HOOKS),
        (
            *here(
                "volumes",
                "test_nothing_is_made_in_a_volume",
                "test_nothing_is_made_in_a_volume_by_crun",
                "test_nothing_is_made_in_a_volume_of_a_container_with_a_user_namespace",
                "test_what_is_no_volume_works",
            ),
            *IMAGES[1:],
            ("engines/test_engines_volumes.py", "test_nothing_is_made_in_a_volume_of_podmans"),
        ),
    ),
}


def table() -> str:
    """Return the battery as docs/SECURITY.md has it."""
    lines = ["| | an attacker tries to | CVE | ways | tests below `tests/` |", "|---|---|---|---|---|"]
    for number, row in BATTERY.items():
        files = ", ".join(f"`{file}`" for file in dict.fromkeys(file for file, _ in row.tests))
        lines.append(f"| {number} | {row.tries} | {', '.join(row.cves)} | {', '.join(row.ways)} | {files} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
