import pytest
from handmade_host import TRIPLET, VERSION, HostTree, cache_bytes, elf_bytes

from ocigpu.gpus.nvidia.discover import SearchPaths, read_host_facts
from ocigpu.gpus.nvidia.libraries import (
    ARCHITECTURES,
    REQUIRED,
    TABLE,
    find_libraries,
    find_nvml,
    library_versions,
    missing_libraries,
    native_machine,
    read_libraries,
    split_name,
)
from ocigpu.gpus.tree import Tree

MACHINE = native_machine()
TRIPLET32 = ARCHITECTURES[MACHINE].triplet32


def names(host: HostTree, version: str = VERSION) -> list[str]:
    tree = Tree(str(host.root))
    paths, _ = find_libraries(tree, "/etc/ld.so.cache", version, MACHINE)
    return [library.name for library in read_libraries(tree, paths, version, MACHINE)[0]]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("libcuda.so.550.163.01", ("libcuda", "550.163.01")),
        ("libcuda.so.1", ("libcuda", "1")),
        ("libcuda.so", ("libcuda", "")),
        ("libnvidia-pkcs11-openssl3.so.550.163.01", ("libnvidia-pkcs11-openssl3", "550.163.01")),
        ("libother", ("libother", "")),
    ],
)
def test_names_split_at_so(name: str, expected: tuple[str, str]) -> None:
    assert split_name(name) == expected


def test_video_brings_the_compute_libraries_and_display_those_of_graphics() -> None:
    assert TABLE["libcuda"][1] == ("compute", "video")
    assert TABLE["libGLX_nvidia"][1] == ("graphics", "display")
    assert set(TABLE["libnvidia-gpucomp"][1]) == {"compute", "video", "graphics", "display"}
    assert TABLE["libnvidia-ml"][1] == ("utility",)


def test_order_is_by_width_then_by_table(host: HostTree) -> None:
    host.library(f"libGLX_nvidia.so.{VERSION}", "libGLX_nvidia.so.0")
    host.library(f"libcuda.so.{VERSION}", "libcuda.so.1", f"/usr/lib/{TRIPLET32}", bits=32)
    host.library(f"libcuda.so.{VERSION}", "libcuda.so.1")
    host.library(f"libnvidia-encode.so.{VERSION}", "libnvidia-encode.so.1")
    host.library(f"libnvidia-ml.so.{VERSION}", "libnvidia-ml.so.1")
    host.write_cache(extra=50)
    tree = Tree(str(host.root))
    paths, note = find_libraries(tree, "/etc/ld.so.cache", VERSION, MACHINE)
    found, notes = read_libraries(tree, paths, VERSION, MACHINE)
    assert (note, notes) == ("", [])
    assert [(library.name.split(".")[0], library.bits) for library in found] == [
        ("libnvidia-ml", 64),
        ("libcuda", 64),
        ("libnvidia-encode", 64),
        ("libGLX_nvidia", 64),
        ("libcuda", 32),
    ]
    assert found[1].soname == "libcuda.so.1"
    assert found[1].host_path == f"{host.root}/usr/lib/{TRIPLET}/libcuda.so.{VERSION}"


def test_only_the_exact_version_counts(host: HostTree) -> None:
    host.driver()
    for version in ("1550.163.01", "550.163.0", "550.163.011", "535.54.03"):
        host.library(f"libcuda.so.{version}", f"libcuda.so.{version}")
    host.write_cache()
    assert [name for name in names(host) if name.startswith("libcuda")] == [f"libcuda.so.{VERSION}"]


def test_libraries_with_versions_of_their_own_are_taken(host: HostTree) -> None:
    host.driver()
    host.library("libnvidia-egl-gbm.so.1.1.1", "libnvidia-egl-gbm.so.1")
    host.library("libnvidia-nvvm70.so.4")
    host.write_cache()
    assert {"libnvidia-egl-gbm.so.1.1.1", "libnvidia-nvvm70.so.4"} <= set(names(host))


@pytest.mark.parametrize("name", ["libnvidia-present", "libnvidia-vksc-core"])
def test_libraries_of_drivers_since_575_come_with_graphics(host: HostTree, name: str) -> None:
    """nvidia_layers.json names the first; the log of nvidia-container-toolkit issue 1982 (driver 610) has both."""
    host.driver()
    host.library(f"{name}.so.{VERSION}")
    host.write_cache()
    assert f"{name}.so.{VERSION}" in names(host)
    assert TABLE[name][1] == ("graphics", "display")


def test_libraries_that_belong_to_nobody_are_left_alone(host: HostTree) -> None:
    host.driver()
    host.library(f"libnvidia-gtk3.so.{VERSION}")
    host.library("libcudart.so.12")
    host.write_cache()
    assert not [name for name in names(host) if "gtk" in name or "cudart" in name]


@pytest.mark.parametrize(
    "directory",
    ["/usr/lib/nvidia-550", "/usr/local/glibc/usr/lib", f"/lib/{TRIPLET}", "/lib64"],
)
def test_without_a_cache_directories_of_older_systems_are_searched(host: HostTree, directory: str) -> None:
    host.library(f"libcuda.so.{VERSION}", "libcuda.so.1", directory)
    host.library(f"libnvidia-ml.so.{VERSION}", "libnvidia-ml.so.1", directory)
    assert names(host) == [f"libnvidia-ml.so.{VERSION}", f"libcuda.so.{VERSION}"]


def test_a_stale_cache_does_not_hide_the_new_libraries(host: HostTree) -> None:
    host.driver("535.54.03")
    host.library(f"libcuda.so.{VERSION}", f"libcuda.so.{VERSION}", cached=False)
    host.library(f"libnvidia-ml.so.{VERSION}", f"libnvidia-ml.so.{VERSION}", cached=False)
    assert names(host) == [f"libnvidia-ml.so.{VERSION}", f"libcuda.so.{VERSION}"]


def test_a_cache_with_the_32_bit_library_alone_does_not_hide_the_other(host: HostTree) -> None:
    """Where libcuda.so.1 leads nowhere, ldconfig leaves the 64-bit library out."""
    host.library(f"libnvidia-ml.so.{VERSION}", "libnvidia-ml.so.1")
    host.library(f"libcuda.so.{VERSION}", "libcuda.so.1", f"/usr/lib/{TRIPLET32}", bits=32)
    host.write_cache()
    host.library(f"libcuda.so.{VERSION}", "libcuda.so.1")
    tree = Tree(str(host.root))
    paths, _ = find_libraries(tree, "/etc/ld.so.cache", VERSION, MACHINE)
    found, _ = read_libraries(tree, paths, VERSION, MACHINE)
    assert [library.bits for library in found if library.soname == "libcuda.so.1"] == [64, 32]
    assert missing_libraries(paths, VERSION, tree, MACHINE) == []


def test_a_broken_cache_is_noted_and_directories_are_searched(host: HostTree) -> None:
    host.driver()
    host.write("/etc/ld.so.cache", b"glibc-ld.so.cache1.1\xff\xff\xff\xff" + bytes(64))
    paths, note = find_libraries(Tree(str(host.root)), "/etc/ld.so.cache", VERSION, MACHINE)
    assert VERSION in library_versions(paths)
    assert note == f"{host.root}/etc/ld.so.cache: claims 4294967295 entries in 88 bytes; directories are searched"


def test_store_links_are_followed_inside_the_tree(host: HostTree) -> None:
    store = "/nix/store/abc-nvidia-x11/lib"
    host.library(f"libcuda.so.{VERSION}", "libcuda.so.1", store)
    host.library(f"libnvidia-ml.so.{VERSION}", "libnvidia-ml.so.1", store)
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        host.link(f"/run/opengl-driver/lib/{name}", f"{store}/{name}")
    assert names(host) == [f"libnvidia-ml.so.{VERSION}", f"libcuda.so.{VERSION}"]


def test_the_vdpau_library_is_found_beside_libcuda(host: HostTree) -> None:
    host.driver()
    directory = f"/usr/lib/{TRIPLET}/vdpau"
    host.library(f"libvdpau_nvidia.so.{VERSION}", "libvdpau_nvidia.so.1", directory, cached=False)
    assert f"libvdpau_nvidia.so.{VERSION}" in names(host)


def test_a_file_that_only_has_the_name_is_noted_and_passed_over(host: HostTree) -> None:
    host.driver()
    host.library(f"libnvidia-cfg.so.{VERSION}", "libnvidia-cfg.so.1").write_text("not a library")
    host.library(f"libnvidia-opencl.so.{VERSION}", "libnvidia-opencl.so.1").write_bytes(elf_bytes("libevil.so.1"))
    host.write_cache()
    tree = Tree(str(host.root))
    paths, _ = find_libraries(tree, "/etc/ld.so.cache", VERSION, MACHINE)
    found, notes = read_libraries(tree, paths, VERSION, MACHINE)
    assert not [item for item in found if "cfg" in item.name or "opencl" in item.name]
    assert len(notes) == 2


def test_one_file_for_each_name_and_width(host: HostTree) -> None:
    host.driver()
    host.library(f"libcuda.so.{VERSION}", "libcuda.so.1", "/usr/lib64")
    host.write_cache()
    found = [name for name in names(host) if name.startswith("libcuda")]
    assert found == [f"libcuda.so.{VERSION}"]


def test_cached_paths_of_other_programs_are_not_looked_at(host: HostTree, monkeypatch: pytest.MonkeyPatch) -> None:
    host.driver()
    host.write_cache(extra=500)
    tree = Tree(str(host.root))
    looked_at = []
    resolve = tree.resolve
    monkeypatch.setattr(tree, "resolve", lambda path: looked_at.append(path) or resolve(path))
    find_libraries(tree, "/etc/ld.so.cache", VERSION, MACHINE)
    assert len(looked_at) < 10


def test_versions_are_those_of_the_indispensable_libraries() -> None:
    paths = ["/a/libcuda.so.535.1.2", "/a/libnvidia-ml.so.550.1.2", "/a/libcuda.so.1", "/a/libnvidia-cfg.so.9.9"]
    assert library_versions(paths) == ["535.1.2", "550.1.2"]


def test_nvml_is_the_native_library_of_the_version(host: HostTree) -> None:
    host.library(f"libnvidia-ml.so.{VERSION}", "libnvidia-ml.so.1", f"/usr/lib/{TRIPLET32}", bits=32)
    path = host.library(f"libnvidia-ml.so.{VERSION}", "libnvidia-ml.so.1")
    host.write_cache()
    tree = Tree(str(host.root))
    paths, _ = find_libraries(tree, "/etc/ld.so.cache", VERSION, MACHINE)
    assert tree.host(find_nvml(paths, VERSION, tree, MACHINE)) == str(path)
    assert find_nvml(paths, "535.54.03", tree, MACHINE) == ""


def test_an_unknown_machine_has_no_libraries(host: HostTree) -> None:
    host.driver()
    paths, note = find_libraries(Tree(str(host.root)), "/etc/ld.so.cache", VERSION, "riscv64")
    assert (paths, note) == ([], "no table of library directories for riscv64")


def test_a_relative_path_in_the_cache_is_not_followed(host: HostTree) -> None:
    host.write("/etc/ld.so.cache", cache_bytes([("libcuda.so.1", "libcuda.so.1", host.flags[0])]))
    paths, _ = find_libraries(Tree(str(host.root)), "/etc/ld.so.cache", VERSION, MACHINE)
    assert paths == []


def test_named_directories_replace_the_cache_and_all_usual_directories(host: HostTree) -> None:
    host.driver()
    chosen = [host.library(f"{name}.so.{VERSION}", f"{name}.so.1", "/opt/driver", cached=False) for name in REQUIRED]
    facts = read_host_facts(host.settings, SearchPaths(libraries=(str(host.root / "opt/driver"), "/missing")))
    assert sorted(library.host_path for library in facts.libraries) == sorted(map(str, chosen))


def test_a_relative_directory_is_one_of_the_real_root(host: HostTree) -> None:
    facts = read_host_facts(host.driver().settings, SearchPaths(libraries=("opt/driver", "/missing")))
    assert facts.libraries == ()


def test_named_directories_of_configuration_replace_etc_and_share(host: HostTree) -> None:
    host.driver()
    name = "glvnd/egl_vendor.d/10_nvidia.json"
    host.write(f"/usr/share/{name}", "{}")
    chosen = host.write(f"/opt/share/{name}", "{}")
    facts = read_host_facts(host.settings, SearchPaths(configs=(str(host.root / "opt/share"),)))
    found = [(item.host_path, item.container_path) for item in facts.configs]
    assert found == [(str(chosen), f"/usr/share/{name}")]
