"""What an engine's configuration gets below a root: entries like those there, drop-ins, templates, the hook's link."""

import os
import tomllib
from pathlib import Path

import pytest
from support.engine_roots import CONTAINERD, PATHS, RUNTIME, V2, configure, make_host, put, read, remove, snapshot

from ocigpu.cli.front.main import main
from ocigpu.core.errors import OcigpuError
from ocigpu.engines import configure as module
from ocigpu.engines.status import read_engine_status


@pytest.fixture
def host(tmp_path: Path) -> Path:
    return make_host(tmp_path)


def test_a_containerd_entry_is_like_that_of_the_runtime_in_use(host: Path) -> None:
    put(host, PATHS["containerd"], CONTAINERD)
    configure(host, "containerd", default=True)
    configure(host, "containerd", cdi=True)  # the entry still follows crun
    plugin = read(host, "containerd")["plugins"][V2]
    assert plugin["containerd"]["runtimes"]["ocigpu"] == {
        "runtime_type": "io.containerd.runc.v2",
        "pod_annotations": ["x.*"],
        "options": {"BinaryName": RUNTIME, "SystemdCgroup": True},
    }
    assert plugin["enable_cdi"] is True
    assert plugin["cni"] == {"bin_dir": "/home/kubernetes/bin"}


@pytest.mark.parametrize(
    ("runtime", "options_wanted"),
    [
        pytest.param('runtime_type = "io.containerd.kata.v2"', {"BinaryName": RUNTIME}, id="not runc's shim"),
        pytest.param('runtime_type = "io.containerd.runtime.v1.linux"', {"Runtime": RUNTIME}, id="the first shim"),
        pytest.param('options = { BinaryName = "/opt/ocigpu-runtime", IoGid = 5 }', {"BinaryName": RUNTIME}, id="ours"),
    ],
)
def test_a_containerd_entry_follows_only_runtimes_like_runc(
    host: Path, runtime: str, options_wanted: dict[str, str]
) -> None:
    put(host, PATHS["containerd"], f'version = 2\n[plugins."{V2}".containerd.runtimes.runc]\n{runtime}\n')
    configure(host, "containerd")
    entry = read(host, "containerd")["plugins"][V2]["containerd"]["runtimes"]["ocigpu"]
    assert entry["options"] == options_wanted


VENDORS = """\
version = 2
[plugins."io.containerd.grpc.v1.cri".containerd]
default_runtime_name = "{default}"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia]
runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia.options]
BinaryName = "/usr/bin/nvidia-container-runtime"
SystemdCgroup = true
"""


@pytest.mark.parametrize("default", ["nvidia", "runc"])
def test_a_containerd_entry_of_the_vendors_alone_is_followed(host: Path, default: str) -> None:
    """Else the kubelet's cgroup driver would be systemd, and that of pods with our runtime cgroupfs."""
    put(host, PATHS["containerd"], VENDORS.format(default=default))
    for _ in range(2):
        configure(host, "containerd", default=True)
        runtimes = read(host, "containerd")["plugins"][V2]["containerd"]["runtimes"]
        assert runtimes["ocigpu"]["options"] == {"BinaryName": RUNTIME, "SystemdCgroup": True}
        assert runtimes["nvidia"]["options"]["BinaryName"] == "/usr/bin/nvidia-container-runtime"


@pytest.mark.parametrize("default", ["nvidia", "runc"])
def test_an_entry_follows_the_default_before_another(host: Path, default: str) -> None:
    """The kubelet's cgroup driver is that of the default."""
    runc = f'[plugins."{V2}".containerd.runtimes.runc]\nruntime_type = "io.containerd.runc.v2"\n'
    put(host, PATHS["containerd"], VENDORS.format(default=default) + runc)
    configure(host, "containerd")
    runtimes = read(host, "containerd")["plugins"][V2]["containerd"]["runtimes"]
    group = {"SystemdCgroup": True} if default == "nvidia" else {}
    assert runtimes["ocigpu"]["options"] == {"BinaryName": RUNTIME, **group}


REPLACED = """\
version = 3
[plugins.'io.containerd.cri.v1.runtime'.containerd]
default_runtime_name = '{default}'
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.nvidia]
runtime_type = '{type}'
base_runtime_spec = '/etc/containerd/base-runtime-spec.json'
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.nvidia.options]
BinaryName = '/usr/bin/nvidia-container-runtime'
SystemdCgroup = true
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
runtime_type = 'io.containerd.runc.v2'
base_runtime_spec = ''
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
SystemdCgroup = false
"""


@pytest.mark.parametrize(
    ("default", "runtime_type", "asked", "kept"),
    [
        pytest.param("nvidia", "io.containerd.runc.v2", True, True, id="the default"),
        pytest.param("nvidia", "io.containerd.runc.v2", False, True, id="the default, not asked to be"),
        pytest.param("runc", "io.containerd.runc.v2", False, True, id="not the default"),
        pytest.param("runc", "io.containerd.runc.v2", True, False, id="another default is followed"),
        pytest.param("nvidia", "io.containerd.foo.v2", True, False, id="not runc's shim"),
    ],
)
def test_an_entry_that_is_replaced_keeps_its_settings(
    host: Path, default: str, runtime_type: str, asked: bool, kept: bool
) -> None:
    put(host, PATHS["containerd"], REPLACED.format(default=default, type=runtime_type))
    for _ in range(2):
        configure(host, "containerd", name="nvidia", default=asked)
        containerd = read(host, "containerd")["plugins"]["io.containerd.cri.v1.runtime"]["containerd"]
        entry = containerd["runtimes"]["nvidia"]
        assert entry["options"] == {"BinaryName": RUNTIME, "SystemdCgroup": kept}
        assert entry["base_runtime_spec"] == ("/etc/containerd/base-runtime-spec.json" if kept else "")
        assert containerd["default_runtime_name"] == ("nvidia" if asked else default)
    remove(host, "containerd")
    assert read(host, "containerd") == tomllib.loads(REPLACED.format(default=default, type=runtime_type))


@pytest.mark.parametrize(
    ("engine", "path", "text"),
    [
        ("docker", PATHS["docker"], '{"default-runtime": "runsc", "runtimes": {"runsc": {"path": "/opt/runsc"}}}'),
        ("docker", PATHS["docker"], '{"default-runtime": "safe", "runtimes": {"safe": {"path": "/opt/kata-runtime"}}}'),
        ("docker", PATHS["docker"], '{"default-runtime": "io.containerd.kata.v2"}'),
        (
            "docker",
            PATHS["docker"],
            '{"default-runtime": "vm", "runtimes": {"vm": {"runtimeType": "io.containerd.kata.v2"}}}',
        ),
        (
            "containerd",
            PATHS["containerd"],
            CONTAINERD.replace('"crun"', '"vm"').replace("runtimes.crun", "runtimes.vm").replace("runc.v2", "kata.v2"),
        ),
        ("crio", "/etc/crio/crio.conf.d/10-kata.conf", '[crio.runtime]\ndefault_runtime = "kata"\n'),
        ("podman", "/etc/containers/containers.conf", '[engine]\nruntime = "krun"\n'),
    ],
)  # fmt: skip
def test_containers_do_not_leave_a_sandbox_unasked(host: Path, engine: str, path: str, text: str) -> None:
    put(host, path, text)
    before = snapshot(host)
    with pytest.raises(OcigpuError, match='leave the sandbox "') as caught:
        configure(host, engine, default=True)
    assert "--yes" in caught.value.hint
    assert snapshot(host) == before
    configure(host, engine)
    remove(host, engine)
    assert snapshot(host) == before
    plan = configure(host, engine, default=True, leave_sandbox=True)
    assert any("leave the sandbox" in note for note in plan.notes)
    assert not configure(host, engine, default=True).changed
    remove(host, engine)
    assert snapshot(host) == before


@pytest.mark.parametrize(
    ("text", "plugin"),
    [
        pytest.param('disabled_plugins = ["restart"]\n', "cri", id="no version is version 1"),
        pytest.param("version = 1\n", "cri", id="version 1"),
        pytest.param("version = 2\n", V2, id="version 2"),
        pytest.param("version = 3\n", "io.containerd.cri.v1.runtime", id="version 3"),
    ],
)
def test_the_version_of_a_containerd_file_says_which_table(host: Path, text: str, plugin: str) -> None:
    put(host, PATHS["containerd"], text)
    configure(host, "containerd", cdi=True, default=True)
    table = read(host, "containerd")["plugins"][plugin]
    assert table["enable_cdi"] is True
    assert table["containerd"]["default_runtime_name"] == "ocigpu"
    assert set(table["containerd"]["runtimes"]) == {"ocigpu", "runc"}
    remove(host, "containerd")
    assert (host / PATHS["containerd"].lstrip("/")).read_text() == text


def test_a_containerd_drop_in_is_imported_by_its_own_name(host: Path) -> None:
    put(host, PATHS["containerd"], "version = 2\noom_score = 0\n")
    before = snapshot(host)
    drop_in = "/etc/containerd/conf.d/gpus.toml"
    plan = configure(host, "containerd", drop_in=drop_in, default=True)
    assert [edit.file.path for edit in plan.edits] == [drop_in, PATHS["containerd"]]
    assert read(host, "containerd") == {"version": 2, "imports": [drop_in], "oom_score": 0}
    assert read(host, "containerd", drop_in)["version"] == 2
    (status,) = [status for status in read_engine_status(str(host)) if status.engine == "containerd"]
    assert status.is_default
    assert status.files == (PATHS["containerd"], drop_in)
    assert not configure(host, "containerd", drop_in=drop_in).changed
    remove(host, "containerd")  # the record of the main file names the drop-in
    assert snapshot(host) == before


def test_a_drop_in_that_a_pattern_imports_already_needs_no_import(host: Path) -> None:
    text = 'version = 2\nimports = ["/etc/containerd/conf.d/*.toml"]\n'
    file = put(host, PATHS["containerd"], text)
    before = snapshot(host)
    configure(host, "containerd", drop_in="/etc/containerd/conf.d/gpus.toml")
    assert file.read_text() == text
    remove(host, "containerd", drop_in="/etc/containerd/conf.d/gpus.toml")
    assert snapshot(host) == before


@pytest.mark.parametrize(
    ("files", "hint"),
    [
        pytest.param({"config.toml": CONTAINERD}, "leave out --drop-in", id="in the main file"),
        pytest.param(
            {
                "config.toml": 'version = 2\nimports = ["/etc/containerd/conf.d/*.toml"]\n',
                "conf.d/99-nvidia.toml": CONTAINERD,
            },
            "--drop-in /etc/containerd/conf.d/99-nvidia.toml",
            id="in another drop-in",
        ),
    ],
)
def test_a_drop_in_that_would_hide_settings_from_an_old_containerd_is_refused(
    host: Path, files: dict[str, str], hint: str
) -> None:
    for name, text in files.items():
        put(host, f"/etc/containerd/{name}", text)
    before = snapshot(host)
    with pytest.raises(OcigpuError) as caught:
        configure(host, "containerd", drop_in="/etc/containerd/conf.d/gpus.toml")
    assert (caught.value.code, caught.value.hint) == ("OCIGPU-ENG-2", hint)
    assert snapshot(host) == before
    if "nvidia" in hint:
        drop_in = "/etc/containerd/conf.d/99-nvidia.toml"
        configure(host, "containerd", drop_in=drop_in)
        assert RUNTIME in (host / drop_in.lstrip("/")).read_text()
        remove(host, "containerd", drop_in=drop_in)
        assert snapshot(host) == before


@pytest.mark.parametrize("name", ["config.toml", "config-v3.toml"])
@pytest.mark.parametrize("with_template", [True, False], ids=["template", "no template"])
def test_k3s_gets_a_template(host: Path, name: str, with_template: bool) -> None:
    directory = "/var/lib/rancher/k3s/agent/etc/containerd"
    version = 3 if "v3" in name else 2
    plugin = "io.containerd.cri.v1.runtime" if version == 3 else V2
    generated = f'[plugins."{plugin}".containerd.runtimes.runc.options]\nSystemdCgroup = false\nIoUid = 1\n'
    put(host, f"{directory}/config.toml", f"# File generated by k3s. DO NOT EDIT.\nversion = {version}\n{generated}")
    template = '{{ template "base" . }}\n\n# mirrors\n[debug]\n  level = {{ .Level | quote }}'
    if with_template:
        put(host, f"{directory}/{name}.tmpl", template)
    before = snapshot(host)
    config = f"{directory}/config.toml"
    configure(host, "containerd", config=config)
    assert not configure(host, "containerd", config=config).changed
    text = (host / f"{directory}/{name}.tmpl".lstrip("/")).read_text()
    assert text.startswith(template if with_template else '{{ template "base" . }}\n')
    ours = tomllib.loads(text.partition("configure\n")[2])
    (name, entry), *more = ours["plugins"][plugin]["containerd"]["runtimes"].items()
    assert (name, more) == ("ocigpu", [])
    assert entry["options"] == {"BinaryName": RUNTIME, "SystemdCgroup": False, "IoUid": 1}
    remove(host, "containerd", config=config)
    assert snapshot(host) == before


def test_crio_gets_an_entry_like_that_of_its_own_runtime(host: Path) -> None:
    packaged = put(
        host,
        "/etc/crio/crio.conf.d/10-crio.conf",
        '[crio.runtime]\ndefault_runtime = "crun"\n'
        '[crio.runtime.runtimes.crun]\nruntime_path = "/usr/libexec/crio/crun"\n'
        'monitor_path = "/usr/libexec/crio/conmon"\n'
        'allowed_annotations = [\n "io.containers.trace-syscall",\n]\n',
    )
    before = snapshot(host)
    configure(host, "crio", default=True)
    assert read(host, "crio") == {
        "crio": {
            "runtime": {
                "default_runtime": "ocigpu",
                "runtimes": {
                    "ocigpu": {
                        "runtime_path": RUNTIME,
                        "runtime_type": "oci",
                        "monitor_path": "/usr/libexec/crio/conmon",
                        "allowed_annotations": ["io.containers.trace-syscall"],
                    }
                },
            }
        }
    }
    assert sorted(path.name for path in packaged.parent.iterdir()) == ["10-crio.conf", "99-ocigpu.conf"]
    remove(host, "crio")
    assert snapshot(host) == before


def test_an_entry_that_a_drop_in_would_hide_from_an_old_containerd_is_refused(host: Path) -> None:
    put(host, "/etc/containerd/config.toml", 'version = 2\nimports = ["/etc/containerd/conf.d/*.toml"]\n')
    put(host, "/etc/containerd/conf.d/99-nvidia.toml", CONTAINERD)
    before = snapshot(host)
    with pytest.raises(OcigpuError, match=r"conf\.d/99-nvidia\.toml of the imports replaces") as caught:
        configure(host, "containerd")
    assert (caught.value.code, caught.value.hint) == (
        "OCIGPU-ENG-3",
        "--drop-in /etc/containerd/conf.d/99-nvidia.toml",
    )
    assert snapshot(host) == before
    configure(host, "containerd", drop_in="/etc/containerd/conf.d/99-nvidia.toml")
    assert "ocigpu" in (host / "etc/containerd/conf.d/99-nvidia.toml").read_text()
    remove(host, "containerd")  # finds it by its record
    assert snapshot(host) == before


def test_the_hook_is_linked_where_dockerd_looks_and_goes_with_the_removal(host: Path) -> None:
    before = snapshot(host)
    configure(host, "docker", gpus_hook=True)
    assert os.readlink(host / "usr/bin/nvidia-container-runtime-hook") == "ocigpu-hook"
    (status,) = [status for status in read_engine_status(str(host)) if status.engine == "docker"]
    assert (status.gpus_hook, status.gpus_hook_ours) == ("/usr/bin/nvidia-container-runtime-hook", True)
    assert not configure(host, "docker", gpus_hook=True).changed
    remove(host, "docker")
    assert snapshot(host) == before


def test_the_hook_of_a_shim_elsewhere_is_linked_by_its_path(host: Path) -> None:
    for name in ("ocigpu-runtime", "ocigpu-hook"):
        put(host, f"/opt/ocigpu/{name}", "#!/bin/sh\n", 0o755)
    (host / "usr/local/bin").mkdir(parents=True)
    configure(host, "docker", gpus_hook=True, path="/opt/ocigpu/ocigpu-runtime")
    assert os.readlink(host / "usr/local/bin/nvidia-container-runtime-hook") == "/opt/ocigpu/ocigpu-hook"


def test_a_hook_link_of_a_toolkit_that_was_removed_is_replaced(host: Path) -> None:
    link = host / "usr/bin/nvidia-container-runtime-hook"
    link.symlink_to("nvidia-container-toolkit")
    configure(host, "docker", gpus_hook=True)
    assert os.readlink(link) == "ocigpu-hook"
    remove(host, "docker")
    assert not os.path.lexists(link)


@pytest.mark.parametrize("where", ["/usr/bin", "/usr/local/bin", "/opt/bin"])
def test_a_hook_of_somebody_else_is_not_replaced(host: Path, where: str) -> None:
    put(host, f"{where}/nvidia-container-runtime-hook", "\x7fELF", 0o755)
    before = snapshot(host)
    with pytest.raises(OcigpuError, match="is not ocigpu's") as caught:
        configure(host, "docker", gpus_hook=True, hook_directory="/opt/bin" if where == "/opt/bin" else "")
    assert caught.value.code == "OCIGPU-ENG-2"
    assert snapshot(host) == before


def test_beside_another_toolkit_the_link_is_before_its_hook_if_it_is_insisted_on(host: Path) -> None:
    theirs = put(host, "/usr/bin/nvidia-container-runtime-hook", "\x7fELF", 0o755)
    (host / "usr/local/bin").mkdir(parents=True)
    before = snapshot(host)
    notes = " ".join(configure(host, "docker", gpus_hook=None).notes)
    assert "stays as it is: /usr/bin/nvidia-container-runtime-hook is not ocigpu's" in notes
    assert "--gpus-hook" in notes
    configure(host, "docker", gpus_hook=True)
    assert os.readlink(host / "usr/local/bin/nvidia-container-runtime-hook") == "/usr/bin/ocigpu-hook"
    (status,) = [status for status in read_engine_status(str(host)) if status.engine == "docker"]
    assert (status.gpus_hook, status.gpus_hook_ours) == ("/usr/local/bin/nvidia-container-runtime-hook", True)
    assert theirs.read_text() == "\x7fELF"
    assert not configure(host, "docker", gpus_hook=True).changed
    remove(host, "docker")
    assert snapshot(host) == before


def test_a_link_that_somebody_has_changed_stays(host: Path) -> None:
    configure(host, "docker", gpus_hook=True)
    link = host / "usr/bin/nvidia-container-runtime-hook"
    link.unlink()
    link.symlink_to("other-hook")
    assert "no longer ocigpu's link" in remove(host, "docker").notes[0]
    assert os.readlink(link) == "other-hook"


@pytest.mark.parametrize("there", [False, True], ids=["no file", "a file"])
def test_containerd_that_merges_plugins_gets_a_drop_in(
    host: Path, monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    """No containerd 2.1 is in the distributions that the tests run on: its version number stands for it."""
    monkeypatch.setattr(module, "program_version", lambda _root, _engine: (2, 1))
    if there:
        put(host, PATHS["containerd"], CONTAINERD)
    before = snapshot(host)
    configure(host, "containerd", cdi=True)
    drop_in = "/etc/containerd/conf.d/99-ocigpu.toml"
    version = 2 if there else 3
    main = read(host, "containerd")
    assert main == (
        {**tomllib.loads(CONTAINERD), "imports": [drop_in]} if there else {"version": 3, "imports": [drop_in]}
    )
    written = read(host, "containerd", drop_in)
    assert written["version"] == version
    plugin = written["plugins"][V2 if there else "io.containerd.cri.v1.runtime"]
    assert plugin["enable_cdi"] is True
    assert plugin["containerd"]["runtimes"]["ocigpu"]["options"] == {
        "BinaryName": RUNTIME,
        **({"SystemdCgroup": True} if there else {}),
    }
    assert not configure(host, "containerd", cdi=True).changed
    remove(host, "containerd")
    assert snapshot(host) == before


def test_a_file_of_version_1_gets_a_drop_in_where_containerd_2_would_pass_over_its_table(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Docker's package of containerd has such a file; a run before the update left an entry in it."""
    text = 'disabled_plugins = ["cri"]\n'
    put(host, PATHS["containerd"], text)
    configure(host, "containerd")
    assert "cri" in read(host, "containerd")["plugins"]
    monkeypatch.setattr(module, "program_version", lambda _root, _engine: (2, 1))
    configure(host, "containerd")
    drop_in = "/etc/containerd/conf.d/99-ocigpu.toml"
    assert read(host, "containerd")["imports"] == [drop_in]
    written = read(host, "containerd", drop_in)
    entry = written["plugins"]["io.containerd.cri.v1.runtime"]["containerd"]["runtimes"]["ocigpu"]
    assert (written["version"], entry["options"]) == (3, {"BinaryName": RUNTIME})
    assert not configure(host, "containerd").changed
    (status,) = [status for status in read_engine_status(str(host)) if status.engine == "containerd"]
    assert status.configured
    remove(host, "containerd")
    assert (host / PATHS["containerd"].lstrip("/")).read_text() == text


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("[engine]\n", ["crun", "crun-wasm", "krun", "ocigpu"]),
        ('[engine]\nruntime_supports_nocgroup = ["youki"]\n', ["youki", "ocigpu"]),
    ],
)
def test_podman_may_start_containers_without_cgroups_where_crun_is_behind(
    host: Path, text: str, names: list[str]
) -> None:
    put(host, "/etc/containers/containers.conf", text)
    before = snapshot(host)
    for _ in range(2):
        configure(host, "podman", cgroupless=True)
        engine = read(host, "podman")["engine"]
        with_json = ["crun", "runc", "kata", "runsc", "youki", "krun", "ocigpu"]
        assert engine == {
            "runtimes": {"ocigpu": [RUNTIME]},
            "runtime_supports_json": with_json,
            "runtime_supports_nocgroup": names,
        }
    remove(host, "podman")
    assert snapshot(host) == before
    configure(host, "podman")
    assert "runtime_supports_nocgroup" not in read(host, "podman")["engine"]


def test_an_engine_without_cdi_says_so(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "program_version", lambda _root, _engine: (1, 6))
    with pytest.raises(OcigpuError, match=r"containerd 1\.6 has no CDI; 1\.7 is the first"):
        configure(host, "containerd", cdi=True)


def test_the_deprecated_default_of_containerd_is_in_the_way(host: Path) -> None:
    put(host, PATHS["containerd"], '[plugins.cri.containerd.default_runtime]\nruntime_type = "io.containerd.runc.v1"\n')
    with pytest.raises(OcigpuError, match="default_runtime decides"):
        configure(host, "containerd", default=True)
    assert configure(host, "containerd").changed


def test_a_switched_off_kubernetes_interface_is_noted(host: Path) -> None:
    put(host, PATHS["containerd"], 'disabled_plugins = ["cri"]\n')
    assert "disabled_plugins switches" in configure(host, "containerd").notes[0]


RKE2 = "/var/lib/rancher/rke2/agent/etc/containerd"
WRITTEN = "# File generated by rke2. DO NOT EDIT. Use config.toml.tmpl instead.\n"
RUNC = """\
[plugins{0}.containerd]
  snapshotter = "overlayfs"
[plugins{0}.containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
"""
VERSION_1 = """\
[plugins.opt]
  path = "/var/lib/rancher/rke2/agent/containerd"
[plugins.cri]
  sandbox_image = "pause:3.6"
"""
ACTIONS = """\
{{- if .NodeConfig.AgentConfig.PauseImage }}
sandbox_image = "{{ .NodeConfig.AgentConfig.PauseImage }}"
{{end}}
"""


@pytest.mark.parametrize("header", [WRITTEN, "", "# ours\n"], ids=["generated's first line", "none", "another"])
@pytest.mark.parametrize(
    ("template", "version"),
    [
        pytest.param(VERSION_1 + RUNC.format(".cri"), 1, id="version 1"),
        pytest.param(VERSION_1 + RUNC.format(".cri") + ACTIONS, 1, id="version 1 with actions"),
        pytest.param("version = 2\n" + RUNC.format(f'."{V2}"'), 2, id="version 2"),
        pytest.param('{{ template "base" . }}\n[debug]\n  level = "debug"\n', 2, id="the base"),
        pytest.param(VERSION_1, 1, id="no entry for runc"),
        pytest.param(f'version = 2\n[plugins."{V2}".containerd.runtimes]\nrunc = {{ runtime_type = "x" }}\n', 2,
                     id="an entry for runc on one line"),
    ],
)  # fmt: skip
def test_a_users_template_keeps_its_version_and_the_entry_survives_a_restart(
    host: Path, header: str, template: str, version: int
) -> None:
    """k3s and RKE2 write config.toml anew from the template: what has no first line of theirs is generated too."""

    def render(text: str) -> None:
        base = f"version = 2\n{RUNC.format(f'.{chr(34)}{V2}{chr(34)}')}"
        filled = text.replace('{{ template "base" . }}', base).replace(ACTIONS, "")
        put(host, f"{RKE2}/config.toml", filled)

    template = header + template
    file = put(host, f"{RKE2}/config.toml.tmpl", template)
    render(template)
    before = snapshot(host)
    for _ in range(2):
        configure(host, "containerd", config=f"{RKE2}/config.toml")
        assert not (host / f"{RKE2}/config-v3.toml.tmpl".lstrip("/")).exists()
        render(file.read_text())
        data = read(host, "containerd", f"{RKE2}/config.toml")
        runtimes = data["plugins"]["cri" if version == 1 else V2]["containerd"]["runtimes"]
        assert set(runtimes) == {"runc", "ocigpu"}
        assert runtimes["ocigpu"]["options"]["BinaryName"] == RUNTIME
        (status,) = [status for status in read_engine_status(str(host)) if status.flavour == "rke2"]
        assert status.configured
    remove(host, "containerd", config=f"{RKE2}/config.toml")
    render(file.read_text())
    assert snapshot(host) == before


@pytest.mark.parametrize(
    ("generated", "there", "edited"),
    [
        pytest.param(3, ["config.toml.tmpl"], {"config.toml.tmpl": 2}, id="of version 2 under containerd 2"),
        pytest.param(3, ["config-v3.toml.tmpl"], {"config-v3.toml.tmpl": 3}, id="of version 3 under containerd 2"),
        pytest.param(2, ["config-v3.toml.tmpl"], {"config.toml.tmpl": 2, "config-v3.toml.tmpl": 3}, id="one for later"),
        pytest.param(2, ["config.toml.tmpl", "config-v3.toml.tmpl"],
                     {"config.toml.tmpl": 2, "config-v3.toml.tmpl": 3}, id="both"),
        pytest.param(3, [], {"config-v3.toml.tmpl": 3}, id="none under containerd 2"),
        pytest.param(2, [], {"config.toml.tmpl": 2}, id="none under containerd 1"),
        pytest.param(0, ["config.toml.tmpl"], {"config.toml.tmpl": 2}, id="before the first start"),
    ],
)  # fmt: skip
def test_no_template_of_the_users_is_switched_off(
    host: Path, generated: int, there: list[str], edited: dict[str, int]
) -> None:
    for name in there:
        put(host, f"{RKE2}/{name}", f'{{{{ template "base" . }}}}\n# {name}\n')
    if generated:
        put(host, f"{RKE2}/config.toml", f"{WRITTEN}version = {generated}\n")
    before = snapshot(host)
    configure(host, "containerd", config=f"{RKE2}/config.toml")
    assert not configure(host, "containerd", config=f"{RKE2}/config.toml").changed
    plugins = {2: V2, 3: "io.containerd.cri.v1.runtime"}
    found = {path.name: path.read_text() for path in (host / RKE2.lstrip("/")).glob("*.tmpl")}
    assert set(found) == set(edited)
    for name, text in found.items():
        assert (f"# {name}" in text) == (name in there)
        assert list(tomllib.loads(text.partition("configure\n")[2])["plugins"]) == [plugins[edited[name]]]
    remove(host, "containerd", config=f"{RKE2}/config.toml")
    assert snapshot(host) == before


def test_a_template_that_waits_for_the_next_start_is_told(host: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(host, f"{RKE2}/config.toml", "version = 2\n")
    assert main(["engine", "status", "rke2", "--root", str(host)]) == 0
    assert "not configured" in capsys.readouterr().out
    configure(host, "containerd", config=f"{RKE2}/config.toml")
    (status,) = [status for status in read_engine_status(str(host)) if status.flavour == "rke2"]
    assert (status.configured, status.waiting) == (False, f"{RKE2}/config.toml.tmpl")
    assert main(["engine", "status", "rke2", "--root", str(host)]) == 0
    assert "at its next start" in capsys.readouterr().out


def test_the_block_follows_a_template_to_another_version(host: Path) -> None:
    file = put(host, f"{RKE2}/config.toml.tmpl", "version = 2\n")
    configure(host, "containerd", config=f"{RKE2}/config.toml")
    file.write_text(file.read_text().replace("version = 2", "version = 3"))
    configure(host, "containerd", config=f"{RKE2}/config.toml")
    assert list(tomllib.loads(file.read_text())["plugins"]) == ["io.containerd.cri.v1.runtime"]


def test_a_template_whose_tables_containerd_passes_over_is_refused(host: Path) -> None:
    file = put(host, f"{RKE2}/config-v3.toml.tmpl", RUNC.format(".'io.containerd.cri.v1.runtime'"))
    put(host, f"{RKE2}/config.toml", file.read_text())
    with pytest.raises(OcigpuError, match="containerd 2 passes over its tables") as caught:
        configure(host, "containerd", config=f"{RKE2}/config.toml")
    line = caught.value.hint.rpartition(": ")[2]
    file.write_text(f"{line}\n{file.read_text()}")
    configure(host, "containerd", config=f"{RKE2}/config.toml")
    assert RUNTIME in file.read_text()


def test_an_entry_that_would_break_a_template_is_refused(host: Path) -> None:
    text = f'version = 2\n[plugins."{V2}"]\ncontainerd = {{ runtimes = {{ runc = {{ runtime_type = "x" }} }} }}\n'
    file = put(host, f"{RKE2}/config.toml.tmpl", text)
    with pytest.raises(OcigpuError, match="cannot be added to its content"):
        configure(host, "containerd", config=f"{RKE2}/config.toml")
    assert file.read_text() == text


@pytest.mark.parametrize("asked", [{"default": True}, {"cdi": True}, {"drop_in": "/x.toml"}])
def test_what_a_template_cannot_hold_is_refused(host: Path, asked: dict[str, bool]) -> None:
    path = "/var/lib/rancher/rke2/agent/etc/containerd/config.toml.tmpl"
    put(host, path, '{{ template "base" . }}\n')
    with pytest.raises(OcigpuError, match="cannot be set in a template") as caught:
        configure(host, "containerd", config=path, **asked)
    assert caught.value.code == "OCIGPU-ENG-5"


def test_an_entry_that_a_template_has_already_is_not_written_twice(host: Path) -> None:
    path = "/var/lib/rancher/k3s/agent/etc/containerd/config-v3.toml.tmpl"
    text = "[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.'ocigpu']\n"
    file = put(host, path, '{{ template "base" . }}\n' + text)
    with pytest.raises(OcigpuError, match="already exists"):
        configure(host, "containerd", config=path)
    assert file.read_text().endswith(text)


@pytest.mark.parametrize(
    "text",
    [
        "plugins = 1",
        "[plugins]\ncri = []",
        "[plugins.cri]\ncontainerd = true",
        "[plugins.cri.containerd]\nruntimes = 'x'",
        "[plugins.cri.containerd.runtimes]\nrunc = 1",
        "[plugins.cri.containerd.runtimes.runc]\noptions = 1",
        "[plugins.cri.containerd]\ndefault_runtime = 1",
        "[plugins.cri.containerd]\ndefault_runtime_name = 1",
        "[[plugins.cri.containerd.runtimes.ocigpu]]",
    ],
)
def test_a_value_of_another_type_than_containerds_is_an_error(host: Path, text: str) -> None:
    put(host, PATHS["containerd"], text + "\n")
    before = snapshot(host)
    with pytest.raises(OcigpuError) as caught:
        configure(host, "containerd", default=True)
    assert caught.value.code == "OCIGPU-ENG-2"
    assert " is " in caught.value.message
    assert snapshot(host) == before


@pytest.mark.parametrize("text", ["crio = 1", "[crio]\nruntime = 1", "[crio.runtime.runtimes]\nrunc = 1"])
def test_a_value_of_another_type_than_crios_is_an_error(host: Path, text: str) -> None:
    put(host, "/etc/crio/crio.conf", text + "\n")
    with pytest.raises(OcigpuError, match="is not a table"):
        configure(host, "crio", default=True)


def test_a_low_level_runtime_that_only_the_engine_knows_is_noted(host: Path) -> None:
    (host / "usr/bin/runc").unlink()
    assert "no runc or crun" in configure(host, "crio").notes[-1]


def test_records_are_kept_out_of_a_directory_that_crio_reads_whole(host: Path) -> None:
    with pytest.raises(OcigpuError, match="CRI-O reads every file") as caught:
        configure(host, "crio", drop_in="/etc/crio/drop-ins/gpus.conf")
    assert caught.value.code == "OCIGPU-ENG-2"


def test_an_entry_in_the_main_file_stays_there_when_containerd_is_updated(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(host, PATHS["containerd"], CONTAINERD)
    configure(host, "containerd")
    monkeypatch.setattr(module, "program_version", lambda _root, _engine: (2, 2))
    assert not configure(host, "containerd").changed


def test_a_directory_that_services_do_not_search_is_noted(host: Path) -> None:
    (host / "opt/bin").mkdir(parents=True)
    put(host, "/usr/bin/dockerd", "", 0o755)
    assert configure(host, "docker", gpus_hook=True, hook_directory="/opt/bin").notes == (
        "dockerd must have /opt/bin on its PATH",
    )
