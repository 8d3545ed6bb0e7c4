"""Profiles as files: the key that names them, and files that can't be used."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from headrace.engine.disk import locate
from headrace.engine.errors import ModelFileError
from headrace.engine.hardware import this_machine
from headrace.engine.profile import (
    CPU_REPACK,
    DiskPoint,
    DiskProfile,
    GpuDevice,
    KernelSpeed,
    Profile,
)
from headrace.engine.profile_cache import (
    Facts,
    keep_profile,
    profile_path,
    read_facts,
    read_measured,
    read_profile,
)

POINT = DiskPoint(1 << 20, 8, 1.25e9)
PROFILE = Profile(
    key="0123456789abcdef",
    n_threads=2,
    memory_bytes_per_s=4e10,
    attention_flops=3e10,
    kernels=(
        KernelSpeed("Q4_0", 2e10, 1.8e11, 9e10),
        KernelSpeed("Q4_0", 4e10, 2.8e11, 1e11, CPU_REPACK),
    ),
    gpus=(GpuDevice("CUDA0", "NVIDIA H200", 150 << 30, 149 << 30, 4e12, is_integrated=False),),
    disks=(DiskProfile("254:0", True, (POINT,), (POINT, POINT)),),
)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "headrace"


def test_profile_that_is_kept_is_read_again(cache: Path) -> None:
    keep_profile(PROFILE)
    assert read_profile(PROFILE.key) == PROFILE
    assert [path.name for path in cache.iterdir()] == ["profile-0123456789abcdef.json"]


def test_unknown_machine_has_no_profile_and_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert read_profile("0" * 16) is None
    assert not caplog.messages


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[]", b'{"version": 1}', b"null"])
def test_file_that_can_t_be_read_is_said_once(
    data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    keep_profile(PROFILE)
    path = profile_path(PROFILE.key)
    path.write_bytes(data)
    assert read_profile(PROFILE.key) is None
    [message] = caplog.messages
    assert message.startswith(f"{path}: can't be used, measuring again: ")


@pytest.mark.parametrize(("field", "value"), [("version", 0), ("key", "f" * 16)])
def test_file_of_another_version_or_machine_is_said_once(
    field: str, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    keep_profile(PROFILE)
    path = profile_path(PROFILE.key)
    content = json.loads(path.read_bytes())
    (content if field == "version" else content["profile"])[field] = value
    path.write_text(json.dumps(content))
    assert read_profile(PROFILE.key) is None
    [message] = caplog.messages
    assert f"expected version 2 of {PROFILE.key}" in message
    assert str(value) in message


FACTS = Facts(
    cpu="model name: AMD EPYC", topology="2 CPUs", n_threads=2, memory_bytes=24 << 30,
    kernel="Linux 6.1.0", llama_cpp="0.3.36 1 2 3", headrace="0.1.0",
)  # fmt: skip


@pytest.mark.parametrize("name", Facts.__struct_fields__)
def test_key_changes_with_every_fact(name: str) -> None:
    value = getattr(FACTS, name)
    changed = value + 1 if isinstance(value, int) else value + "1"
    assert msgspec.structs.replace(FACTS, **{name: changed}).key != FACTS.key


def test_key_stays_while_the_machine_does() -> None:
    topology = this_machine()
    facts = read_facts(topology, 2)
    assert all(getattr(facts, name) for name in Facts.__struct_fields__)
    assert read_facts(topology, 2).key == facts.key
    assert read_facts(topology, 1).key != facts.key


def test_what_was_measured_is_a_profile_with_kernels_and_the_disk_of_the_file(
    tmp_path: Path,
) -> None:
    topology = this_machine()
    path = tmp_path / "model"
    path.touch()
    disk = msgspec.structs.replace(PROFILE.disks[0], device=locate(path)[0])
    profile = msgspec.structs.replace(PROFILE, key=read_facts(topology, 2).key, disks=(disk,))
    assert read_measured(topology, 2, path) is None
    keep_profile(profile)
    assert read_measured(topology, 2, path) == (profile, disk)
    assert read_measured(topology, 1, path) is None
    for lacking in ({"disks": ()}, {"kernels": ()}):
        keep_profile(msgspec.structs.replace(profile, **lacking))
        assert read_measured(topology, 2, path) is None
    with pytest.raises(ModelFileError, match="no such file"):
        read_measured(topology, 2, tmp_path / "other")


def test_kernels_and_disks_are_found_by_name() -> None:
    assert PROFILE.kernel("Q4_0") == PROFILE.kernels[0]
    assert PROFILE.kernel("Q4_0", CPU_REPACK) == PROFILE.kernels[1]
    assert PROFILE.kernel("Q4_0", "CUDA0") is None
    assert PROFILE.kernel("Q8_0") is None
    assert PROFILE.disk("254:0") == PROFILE.disks[0]
    assert PROFILE.disk("8:0") is None
