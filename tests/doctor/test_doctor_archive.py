"""The support archive: planted secrets are not in it, everything else is, and it says what it left out."""

import json
import stat
import tarfile
from pathlib import Path

import pytest
from doctor.conftest import Broken
from support.fixtures import Run

from ocigpu.core.errors import UsageError
from ocigpu.doctor.archive import REMOVED, Redactor, open_new

SECRET = "hunter2SECRETvalue"
DAEMON = {
    "proxies": {
        "http-proxy": f"http://user:{SECRET}@proxy.example.com:3128",
        "https-proxy": f"http://user:{SECRET}/with@at@proxy.example.com:3128",
    },
    "log-opts": {"splunk-token": SECRET, "splunk-url": "https://example.com", "labels": f"x{SECRET}"},
    "registry-mirrors": [f"https://key:{SECRET}@mirror.example.com/v2?token={SECRET}&page=1"],
    "runtimes": {"ocigpu": {"path": "/usr/bin/ocigpu-runtime", "env": [f"PRIVATE={SECRET}"]}},
    "auths": {"registry.example.com": {"auth": SECRET, "identitytoken": SECRET}},
    "exec-opts": ["native.cgroupdriver=cgroupfs"],
    "labels": [f"API_KEY={SECRET}", f"password: {SECRET}"],
}
CONTAINERD = f"""\
version = 2
[plugins."io.containerd.grpc.v1.cri".registry.configs."registry.example.com".auth]
username = "user"
password = "{SECRET}"
[plugins."io.containerd.grpc.v1.cri".registry.mirrors."docker.io".header]
Authorization = ["Bearer {SECRET}"]
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.ocigpu.options]
BinaryName = "/usr/bin/ocigpu-runtime"
[stream_processors.one]
env = ["DECRYPTION={SECRET}"]
"""
LOG = f"""\
nvidia: connect to https://user:{SECRET}@example.com/path failed
ocigpu: environment HF_TOKEN={SECRET} DB_PASSWORD='{SECRET}'
nvidia: Authorization: Basic {SECRET}
ocigpu: header x-registry-auth: {SECRET}
NVRM: GPU at 0000:3b:00.0 is fine, token={SECRET}
nvidia-modeset: password is "{SECRET}" no more
"""
CMDLINE = (
    f"BOOT_IMAGE=/boot/vmlinuz quiet luks.passphrase={SECRET} nvidia-drm.modeset=1"
    f" netroot=iscsi:user:{SECRET}@192.0.2.7::3260::iqn.2026-01.com.example:disk"
    f" netroot=iscsi:user:{SECRET}:back:{SECRET}@192.0.2.7:::: rd.luks.pin={SECRET} wifi.psk={SECRET}\n"
)


@pytest.fixture
def archive(broken: Broken, run: Run, tmp_path: Path) -> dict[str, str]:
    """The files of an archive of a host with a secret in every place."""
    root = broken("stale-cdi")
    (root / "etc/docker/daemon.json").write_text(json.dumps(DAEMON))
    (root / "etc/containerd").mkdir()
    (root / "etc/containerd/config.toml").write_text(CONTAINERD)
    (root / "usr/bin/containerd").write_text("")
    (root / "usr/bin/containerd").chmod(0o755)
    (root / "etc/containers/containers.conf.d").mkdir(parents=True)
    (root / "etc/containers/containers.conf.d/bad.conf").write_text(f'password = "{SECRET}\n')
    with (root / "var/log/kern.log").open("a") as file:
        file.write(LOG)
    (root / "proc/cmdline").write_text(CMDLINE)
    (root / "etc/ocigpu").mkdir()
    (root / "etc/ocigpu/config.toml").write_text('[runtime]\nlog = "/var/log/ocigpu.log"\n')
    (root / "var/log/ocigpu.log").write_text(f'{{"msg": "args", "env": "SECRET_KEY={SECRET}"}}\n')
    path = tmp_path / "support.tar.gz"
    code, out, err = run("doctor", "--root", root, "--archive", path)
    assert (code, err) == (4, "")
    assert f"wrote {path}" in out
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with tarfile.open(path) as tar:
        found = {}
        for member in tar.getmembers():
            file = tar.extractfile(member)
            assert file is not None
            found[member.name.removeprefix("ocigpu-doctor/")] = file.read().decode()
    return found


def test_no_planted_secret_is_in_the_archive(archive: dict[str, str]) -> None:
    for name, text in archive.items():
        assert SECRET not in text, name


def test_what_helps_is_in_the_archive(archive: dict[str, str]) -> None:
    assert {"README.txt", "report.json", "facts.json", "settings.json", "versions.json", "kernel.json"} <= set(archive)
    docker = json.loads(archive["engines/etc_docker_daemon.json.json"])
    assert docker["runtimes"]["ocigpu"]["path"] == "/usr/bin/ocigpu-runtime"
    assert docker["runtimes"]["ocigpu"]["env"] == [f"PRIVATE={REMOVED}"]
    assert docker["exec-opts"] == ["native.cgroupdriver=cgroupfs"]
    assert docker["proxies"]["http-proxy"] == f"http://{REMOVED}@proxy.example.com:3128"
    assert docker["registry-mirrors"][0].startswith(f"https://{REMOVED}@mirror.example.com/")
    assert "/usr/bin/ocigpu-runtime" in archive["engines/etc_containerd_config.toml.json"]
    assert json.loads(archive["facts.json"])["driver_version"]
    assert json.loads(archive["versions.json"])["engines"]["docker"] == "28.5.1"
    assert "nvidia-drm.modeset=1" in archive["kernel.json"]
    assert "NVRM: GPU at 0000:3b:00.0 is fine" in archive["logs/kernel.txt"]
    spec = json.loads(archive["cdi/var_run_cdi_nvidia.yaml.json"])
    assert f"NVIDIA_VISIBLE_DEVICES={REMOVED}" in spec["containerEdits"]["env"]
    report = json.loads(archive["report.json"])
    assert any(item["name"] == "cdi-stale" and item["severity"] == "error" for item in report["findings"])


def test_what_was_left_out_is_listed(archive: dict[str, str]) -> None:
    lines = archive["left-out.txt"].splitlines()
    assert any("etc_docker_daemon.json.json.proxies.http-proxy" in line for line in lines)
    assert any("logs/kernel.txt" in line for line in lines)
    assert any(line.startswith("not there: engines/etc_containers_containers.conf.d_bad.conf") for line in lines)


def test_a_file_that_exists_is_not_replaced(broken: Broken, run: Run, tmp_path: Path) -> None:
    path = tmp_path / "mine"
    path.write_text("mine")
    code, _, err = run("doctor", "--root", broken(), "--archive", path)
    assert code == 2
    assert "File exists" in err
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("plain text of /usr/lib/libcuda.so.1", "plain text of /usr/lib/libcuda.so.1"),
        ("http://example.com/a@b", f"http://{REMOVED}@b"),
        ("mail to user@example.com", "mail to user@example.com"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIx.abc", REMOVED),
        ("ghp_abcdefghijklmnop0123 used", f"{REMOVED} used"),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----", REMOVED),
        ("NVIDIA_VISIBLE_DEVICES=all", f"NVIDIA_VISIBLE_DEVICES={REMOVED}"),
        ("proxy user:pw@proxy.example.com:3128", f"proxy {REMOVED}@proxy.example.com:3128"),
        ("docker login -u me -p pw registry", f"docker login -u {REMOVED} -p {REMOVED} registry"),
        ("ocigpu --password pw --all", f"ocigpu --password {REMOVED} --all"),
        ("the token is abc", f"the token is {REMOVED}"),
        ('"env": ["a=b", "DB_PW=c"]', f'"env": {REMOVED}'),
        ('"env": ["a=b", "DB_PASSWORD=c"]', f'"env": {REMOVED}'),
        ('"env": ["a=b", "COOKIE=c"], "x": 1', f'"env": {REMOVED}, "x": 1'),
        ("runc exec --env my_var=abc", f"runc exec --env my_var={REMOVED}"),
        ("Cookie: a=b; c=d", f"Cookie: {REMOVED}"),
        ("https://hooks.example.com/services/T0/B0/abc", f"https://hooks.example.com/{REMOVED}"),
        ("encryption_key=abc", f"encryption_key={REMOVED}"),
        ("npm_abcdefghijkl", REMOVED),
        ("netroot=iscsi:user:pw@192.0.2.7::3260::iqn.x", f"netroot=iscsi:{REMOVED}@192.0.2.7::3260::iqn.x"),
        ("netroot=iscsi:user:p/w@x:back:p@192.0.2.7::", f"netroot=iscsi:{REMOVED}@192.0.2.7::"),
        ("netroot=iscsi:192.0.2.7::3260::iqn.x", "netroot=iscsi:192.0.2.7::3260::iqn.x"),
        ("mount nbd:user:pw@192.0.2.7", f"mount {REMOVED}@192.0.2.7"),
        ("psk=abc wpa_psk=abc wifi-sec.psk: abc", f"psk={REMOVED} wpa_psk={REMOVED} wifi-sec.psk: {REMOVED}"),
        ("pin=1234 tpm2-pin=1234 user_pin: 1234", f"pin={REMOVED} tpm2-pin={REMOVED} user_pin: {REMOVED}"),
        ("wep-key0=abc", f"wep-key0={REMOVED}"),
        ("mysql -uroot -phunter2 db", f"mysql -uroot -p{REMOVED} db"),
        ("-phunter2", f"-p{REMOVED}"),
        ('["mysql", "-phunter2"]', f'["mysql", "-p{REMOVED}"]'),
        ("curl -uuser:pw example.com", f"curl -u{REMOVED} example.com"),
        ("mysql -p'hunter2 too' -p\"x\" db", f"mysql -p{REMOVED} -p{REMOVED} db"),
        ("curl --user me:pw --proxy-user=me:pw x", f"curl --user {REMOVED} --proxy-user={REMOVED} x"),
        ("runc --user 1000 --user root", "runc --user 1000 --user root"),
        (
            "-----BEGIN PGP PRIVATE KEY BLOCK-----\nabc\n-----END PGP PRIVATE KEY BLOCK-----\nx",
            f"{REMOVED}\nx",
        ),
        ("mount -o user=me%abc,ro", f"mount -o user=me%{REMOVED},ro"),
        ("smbclient -U me%abc //host/x", f"smbclient -U me%{REMOVED} //host/x"),
        ("root:$6$salt$abc:19000:0:", f"root:{REMOVED}:19000:0:"),
        ("nvme connect -S DHHC-1:00:abc:", f"nvme connect -S DHHC-1:{REMOVED}"),
        ("https://example.com/api/webhooks/1/abc", f"https://example.com/api/webhooks/{REMOVED}"),
        ("inst.sshpw=abc rootpw=abc", f"inst.sshpw={REMOVED} rootpw={REMOVED}"),
        ("rootpw abc", f"rootpw {REMOVED}"),
        ("tool --pass abc --db-pass abc", f"tool --pass {REMOVED} --db-pass {REMOVED}"),
        ("the secret key is abc", f"the secret key is {REMOVED}"),
        ("otp=123 --otp 123 cred:abc", f"otp={REMOVED} --otp {REMOVED} cred:{REMOVED}"),
        ('[Service]\nEnvironment="my=abc" b=c\nType=notify', f"[Service]\nEnvironment={REMOVED}\nType=notify"),
        ("-e my=abc", f"-e my={REMOVED}"),
        ("bindpw=abc db_pw: abc", f"bindpw={REMOVED} db_pw: {REMOVED}"),
        ("rootpw --iscrypted abc", f"rootpw {REMOVED}"),
        ("password_pbkdf2 root grub.pbkdf2.sha512.1.AB", f"password_pbkdf2 {REMOVED}"),
        ("hash grub.pbkdf2.sha512.1.AB", f"hash {REMOVED}"),
        ("ipmitool -H bmc -U admin -P abc sel", f"ipmitool -H bmc -U admin -P {REMOVED} sel"),
        ("kubeadm join --certificate-key abc", f"kubeadm join --certificate-key {REMOVED}"),
        ("snmpget --community abc community=abc", f"snmpget --community {REMOVED} community={REMOVED}"),
        (".dockerconfigjson: abc", f".dockerconfigjson: {REMOVED}"),
        ("https://example.com/?code=abc&page=1", f"https://example.com/?code={REMOVED}&page=1"),
        ("https://x.webhook.example.com/webhookb2/abc", f"https://x.webhook.example.com/webhookb2/{REMOVED}"),
        ("https://api.telegram.org/bot1:abc/send", f"https://api.telegram.org/bot{REMOVED}"),
        ("spinning=1 mapping: 2 pinned=3", "spinning=1 mapping: 2 pinned=3"),
        ("registry.example.com:5000/image@sha256:abc", "registry.example.com:5000/image@sha256:abc"),
        ("ls --preserve /a-path/of-p7", "ls --preserve /a-path/of-p7"),
        ("NVRM: loading Kernel Module  550.163.01", "NVRM: loading Kernel Module  550.163.01"),
        ("[Fri] pid 12:34:56 user@example.com", "[Fri] pid 12:34:56 user@example.com"),
        ("nvidia-modprobe -u -c 0", "nvidia-modprobe -u -c 0"),
        ("driver 550.163.01, device 195:0", "driver 550.163.01, device 195:0"),
        ("a" * 1_000_000 + "\nshort", "[line of 1000000 characters removed]\nshort"),
    ],
)
def test_text_keeps_what_is_no_secret(text: str, wanted: str) -> None:
    assert Redactor().text(text, "here") == wanted


def test_the_value_beside_a_name_that_says_it_goes() -> None:
    data = [{"name": "DB_PASSWORD", "value": "abc"}, {"name": "size", "value": "1"}, {"args": ["--user", "me:pw", "x"]}]
    wanted = [{"name": "DB_PASSWORD", "value": REMOVED}, data[1], {"args": ["--user", REMOVED, "x"]}]
    assert Redactor().data(data, "f") == wanted
    pairs = [{"key": "DB_PASSWORD", "value": "abc"}, {"Name": "token", "Value": "abc"}, {"key": "size", "value": "1"}]
    assert Redactor().data(pairs, "f") == [
        {"key": REMOVED, "value": REMOVED},
        {"Name": "token", "Value": REMOVED},
        {"key": REMOVED, "value": "1"},
    ]


@pytest.mark.parametrize(
    "name", ["env", "Env", "envs", "default_env", "conmon-env", "env_vars", "containerEnv", "environmentVariables"]
)
def test_variables_keep_their_names_however_they_are_written(name: str) -> None:
    for value, wanted in (
        (["A=abc"], [f"A={REMOVED}"]),
        ({"A": "abc"}, {"A": REMOVED}),
        ([{"name": "A", "value": "abc"}], REMOVED),
    ):
        assert Redactor().data({name: value}, "f") == {name: wanted}
    assert Redactor().data({"environment-vendors": ["a"], "env_host": False}, "f") == {
        "environment-vendors": ["a"],
        "env_host": False,
    }


def test_the_word_after_an_option_that_asks_for_a_secret_goes() -> None:
    args = ["--name", "x", "--api-key", "abc", "--token=def", "-p", "abc", "--pin", "12", "-pabc", "-P", "abc", "run"]
    assert Redactor().data({"args": args}, "f") == {
        "args": [
            *("--name", "x", "--api-key", REMOVED, f"--token={REMOVED}", "-p", REMOVED),
            *("--pin", REMOVED, f"-p{REMOVED}", "-P", REMOVED, "run"),
        ]
    }


def test_no_text_takes_long() -> None:
    for text in ("-", "a:", "env=[", "key", "password ", "user:a", "://", "x-auth-"):
        assert len(Redactor().text(text * (3900 // len(text)), "here")) < 50_000


def test_keys_decide_whatever_their_values_look_like() -> None:
    redactor = Redactor()
    data = {"a": {"clientSecret": "x"}, "list": [{"Password": "y", "name": "kept"}], "token": "", "enabled_auth": True}
    assert redactor.data(data, "f") == {
        "a": {"clientSecret": REMOVED},
        "list": [{"Password": REMOVED, "name": "kept"}],
        "token": "",
        "enabled_auth": True,
    }
    assert redactor.removed == ["f.a.clientSecret", "f.list.Password"]


@pytest.mark.parametrize(("name", "hint"), [(".", "name a file that does not exist"), ("none/a", "that you may write")])
def test_a_file_that_cannot_be_made_has_a_hint_of_its_cause(tmp_path: Path, name: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught, open_new(str(tmp_path / name), "--archive"):
        pass
    assert hint in caught.value.hint
