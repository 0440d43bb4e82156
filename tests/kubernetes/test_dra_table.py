"""The table of what a DRA driver and a MIG manager must do: each row is a test here, or names those that have it."""

import ast
from pathlib import Path
from typing import Any

import pytest
from dra_lab import DRIVER, NODE, Killed
from support.cluster import Cluster
from switch_lab import GIVEN, HAD, SwitchHost

from ocigpu.core.settings import Settings
from ocigpu.kubernetes.dra.cluster import open_cluster
from ocigpu.kubernetes.dra.devices import make_devices
from ocigpu.kubernetes.dra.node import read_dra_node
from ocigpu.kubernetes.dra.publisher import Publisher

ROWS = {
    "prepare of a claim with another uid in the API: an error of that claim, nothing changed": [
        "test_dra_prepare.test_what_cannot_be_prepared_changes_nothing"
    ],
    "prepare twice: the same answer, no second side effect": [
        "test_dra_prepare.test_prepared_twice_it_is_the_same_without_the_api_server",
        "test_dra_switch.test_a_gpu_and_its_group_go_to_vfio_for_a_claim",
    ],
    "kill -9 between the bind to VFIO and the CDI file: undone at the start, the kubelet's retry succeeds": [
        "test_dra_table.test_killed_between_the_bind_and_the_specification",
        "test_dra_switch.test_a_driver_that_is_killed_at_any_moment_leaves_nothing",
        "test_dra_mig.test_a_driver_that_is_killed_at_any_moment_leaves_nothing",
    ],
    "unprepare of an unknown claim: success": ["test_dra_prepare.test_giving_back_what_nobody_knows_is_no_error"],
    "another boot id: nothing is prepared, CDI files are swept": [
        "test_dra_prepare.test_after_a_reboot_nothing_is_prepared"
    ],
    "no NVML at the start: registers, an empty slice (or devices of VFIO), unprepare works": [
        "test_dra_kubelet.test_without_driver_and_api_server_claims_are_given_back",
        "test_dra_table.test_a_node_without_a_driver_publishes_an_empty_slice",
        "test_dra_slices.test_gpus_for_virtual_machines",
    ],
    "API server without partitionable devices: noticed, said, devices without counters": [
        "test_dra_cluster.test_counters_that_are_dropped_are_noticed_before_a_device_needs_them",
        "test_dra_doctor.test_what_the_server_leaves_out_and_what_a_device_plugin_offers_too",
    ],
    "9 GPUs with all MIG placements: several slices, their number right, one generation": [
        "test_dra_slices.test_dynamic_mig_devices_share_counters"
    ],
    "a string of 65 characters, a name of 33: refused here, with the field": [
        "test_dra_slices.test_what_the_api_would_refuse_is_named_with_its_field"
    ],
    "a claimed device is tainted NoExecute: unprepare arrives, the taint stays until it is cleared": [
        "test_dra_leases.test_the_devices_say_where_their_leases_are"
    ],
    "two claims for one device: the second fails with the name of the first": [
        "test_dra_prepare.test_two_claims_never_have_one_device"
    ],
    "unprepare while a machine has the node of VFIO: an error, tried again; the lease shows the process": [
        "test_dra_effects.test_a_gpu_that_a_machine_still_has_is_not_given_back",
        "test_lease_agent.test_a_pod_that_is_deleted_by_force_leaves_its_machine",
    ],
    "an alternative of firstAvailable: the answer has the request's name alone": [
        "test_dra_prepare.test_an_alternative_is_answered_by_its_request"
    ],
    "mig: what is wanted is there: NVML is only read": [
        "test_mig_apply.test_gpus_that_are_as_the_layout_says_are_only_read"
    ],
    "mig: a pod has an instance: refused or evicted, labels given back": [
        "test_mig_manager.test_pods_that_have_what_would_go_are_not_disturbed",
        "test_mig_manager.test_pods_are_evicted_where_the_policy_says_so",
    ],
    "mig: 4g, 2g and 1g are wanted while 1g at 0 is in use: impossible, nothing destroyed": [
        "test_mig_layouts.test_what_is_there_stays_and_what_is_held_is_not_destroyed"
    ],
    "mig: a failure in the middle: the layout of before is back": [
        "test_mig_layouts.test_a_failure_half_way_puts_all_back",
        "test_mig_apply.test_a_change_that_is_killed_leaves_what_was_before",
    ],
}


@pytest.mark.parametrize("row", ROWS)
def test_a_row_has_its_tests(row: str) -> None:
    for name in ROWS[row]:
        file, _, test = name.partition(".")
        tree = ast.parse((Path(__file__).parent / f"{file}.py").read_text())
        assert test in {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}, name


@pytest.mark.root
def test_killed_between_the_bind_and_the_specification(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = SwitchHost(tmp_path)

    def killed(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("ocigpu.kubernetes.dra.prepare.write_claim_spec", killed)
        patch.setattr(type(node.preparer), "undo_if_possible", killed)
        with pytest.raises(Killed):
            node.preparer.prepare(node.ref)
    assert node.drivers == GIVEN
    node.restart()
    assert (node.drivers, node.specs, node.preparer.held()) == (HAD, [], ())
    assert node.preparer.prepare(node.ref)
    assert (node.drivers, len(node.specs)) == (GIVEN, 1)


def test_a_node_without_a_driver_publishes_an_empty_slice(tmp_path: Path) -> None:
    (tmp_path / "host").mkdir()
    reading = read_dra_node(Settings(simulation_root=str(tmp_path / "host")))
    assert reading.node
    with Cluster() as cluster:
        ours = open_cluster(str(cluster.write_kubeconfig(tmp_path / "kubeconfig")))
        done = Publisher(ours, DRIVER, NODE, lambda *_, **__: None).publish(make_devices(reading.node))
        ours.close()
        (published,) = cluster.objects("ResourceSlice")
    assert done.made == 1
    assert published["spec"]["devices"] == []
    assert published["spec"]["pool"] == {"name": NODE, "generation": 1, "resourceSliceCount": 1}
