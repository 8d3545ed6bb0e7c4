"""The GGUF header reader: what it reads, and what it says about files that are damaged."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGUFValueType as ValueType
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.errors import ModelFileError, ModelUnusable
from headrace.engine.gguf import (
    ARCHITECTURES,
    Array,
    check_runnable,
    read_header,
    read_model,
)

F32, Q4_0 = 0, 2
ALIGNMENT = 32


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str, type_id: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", type_id) + value


def string(key: str, value: str | bytes) -> bytes:
    return entry(key, ValueType.STRING, text(value))


def u32(key: str, value: int) -> bytes:
    return entry(key, ValueType.UINT32, struct.pack("<I", value))


def array(key: str, type_id: int, n_elements: int, raw: bytes) -> bytes:
    return entry(key, ValueType.ARRAY, struct.pack("<IQ", type_id, n_elements) + raw)


def tensor(name: str, shape: tuple[int, ...], type_id: int = F32, offset: int = 0) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dims + struct.pack("<IQ", type_id, offset)


def file_bytes(
    keys: Sequence[bytes] = (), tensors: Sequence[bytes] = (), data: bytes = b"", **preamble: int
) -> bytes:
    """Return a GGUF file; preamble may give another version, n_tensors or n_keys."""
    told = {"version": 3, "n_tensors": len(tensors), "n_keys": len(keys), **preamble}
    header = b"GGUF" + struct.pack("<IQQ", told["version"], told["n_tensors"], told["n_keys"])
    header += b"".join(keys) + b"".join(tensors)
    return header + bytes(-len(header) % ALIGNMENT) + data


MODEL_KEYS = [
    string("general.architecture", "llama"),
    u32("llama.block_count", 2),
    u32("llama.context_length", 2048),
    u32("llama.embedding_length", 8),
    string("tokenizer.ggml.model", "gpt2"),
    array("tokenizer.ggml.tokens", ValueType.STRING, 3, text("a") + text("é") + text(b"\xff")),
    array("tokenizer.ggml.token_type", ValueType.INT32, 3, struct.pack("<3i", 1, 1, -6)),
    string("tokenizer.chat_template", "{{ messages }}"),
]
MODEL_TENSORS = [
    tensor("token_embd.weight", (8, 3)),
    tensor("blk.0.w", (32, 2), Q4_0, offset=96),
    tensor("blk.1.w", (32, 2), Q4_0, offset=160),
]
MODEL = file_bytes(MODEL_KEYS, MODEL_TENSORS, bytes(196))


def with_keys(*keys: bytes, but: str = "") -> list[bytes]:
    """Return keys and the model's, except the one called but."""
    return [*keys, *(item for item in MODEL_KEYS if not but or not item.startswith(text(but)))]


Write = Callable[[bytes], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(content: bytes) -> Path:
        path = tmp_path / "m.gguf"
        path.write_bytes(content)
        return path

    return write_file


def test_header_has_the_values_of_the_file(write: Write) -> None:
    header = read_header(write(MODEL))
    assert (header.version, header.alignment) == (3, ALIGNMENT)
    assert header.architecture == "llama"
    assert header.block_count == 2
    assert header.context_length == 2048
    assert header.embedding_length == 8
    assert header.parameter_count == 24 + 64 + 64
    assert header.chat_template == "{{ messages }}"
    assert header.has_vocabulary


def test_arrays_are_decoded_when_asked_for(write: Write) -> None:
    metadata = read_header(write(MODEL)).metadata
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    assert isinstance(tokens, Array)
    assert tokens.n_elements == 3
    assert tokens.values() == ["a", "é", "\ufffd"]
    assert types.values() == [1, 1, -6]


def test_tensor_has_its_place_in_the_file(write: Write) -> None:
    header = read_header(write(MODEL))
    last = header.tensors[-1]
    assert (last.name, last.type_name, last.shape) == ("blk.1.w", "Q4_0", (32, 2))
    assert (last.n_elements, last.n_bytes, last.file_index) == (64, 36, 0)
    assert last.offset_bytes == header.data_offset + 160
    assert last.offset_bytes + last.n_bytes == len(MODEL)


SCALARS: dict[str, int | float | str] = {
    "uint8": 255, "int8": -128, "uint16": 65535, "int16": -32768, "uint32": 2**32 - 1,
    "int32": -(2**31), "uint64": 2**64 - 1, "int64": -(2**63), "float32": 0.1, "float64": 0.1,
    "bool": True, "string": "naïve",
}  # fmt: skip


def write_with_package(path: Path, **split: int) -> None:
    """Write a model with a value of every type, with the gguf package."""
    writer = gguf.GGUFWriter(path, "llama", **split)
    for kind, value in SCALARS.items():
        getattr(writer, f"add_{kind}")(f"t.{kind}", value)
    writer.add_array("t.floats", [0.5, 1.5])
    writer.add_array("t.bools", [True, False])
    writer.add_array("t.strings", ["", "x", "日本"])
    writer.add_tensor("a", np.zeros((3, 5), dtype=np.float32))
    blocks = np.zeros((2, 18), dtype=np.uint8)
    writer.add_tensor("b", blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.add_tensor("c", np.zeros(7, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_header_agrees_with_the_reader_of_the_gguf_package(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_with_package(path)
    header, other = read_header(path), gguf.GGUFReader(path)
    ours = {k: v.values() if isinstance(v, Array) else v for k, v in header.metadata.items()}
    assert ours == {k: f.contents() for k, f in other.fields.items() if not k.startswith("GGUF.")}
    assert [(t.name, t.shape, t.type_id, t.offset_bytes, t.n_bytes) for t in header.tensors] == [
        (t.name, tuple(t.shape.tolist()), int(t.tensor_type), t.data_offset, t.n_bytes)
        for t in other.tensors
    ]
    assert header.data_offset == other.data_offset


def test_values_of_another_type_than_expected_count_as_missing(write: Write) -> None:
    odd = [
        string("general.architecture", "llama"),
        string("llama.context_length", "long"),
        array("llama.block_count", ValueType.UINT32, 1, struct.pack("<I", 2)),
        entry("llama.embedding_length", ValueType.BOOL, b"\x01"),
        u32("tokenizer.chat_template", 1),
        u32("tokenizer.ggml.model", 1),
        string("tokenizer.ggml.tokens", "a"),
    ]
    header = read_header(write(file_bytes(odd)))
    assert (header.context_length, header.block_count, header.embedding_length) == (0, 0, 0)
    assert header.chat_template is None
    assert not header.has_vocabulary


def test_bytes_that_are_not_utf8_are_replaced_and_the_rest_is_kept(write: Write) -> None:
    keys = [string("general.name", b"\xff\xfeA"), *MODEL_KEYS]
    header = read_header(write(file_bytes(keys, MODEL_TENSORS, bytes(196))))
    assert header.metadata["general.name"] == "\ufffd\ufffdA"
    assert header.chat_template == "{{ messages }}"


def test_alignment_of_the_file_is_followed(write: Write) -> None:
    keys = [u32("general.alignment", 64)]
    content = file_bytes(keys, [tensor("a", (1,)), tensor("b", (1,), offset=64)])
    header = read_header(write(content + bytes(-len(content) % 64 + 68)))
    assert header.data_offset % 64 == 0
    assert header.tensors[1].offset_bytes == header.data_offset + 64


def test_version_2_is_read_as_version_3(write: Write) -> None:
    content = file_bytes(MODEL_KEYS, MODEL_TENSORS, bytes(196), version=2)
    assert read_header(write(content)).version == 2


def test_bytes_after_the_last_tensor_are_allowed(write: Write) -> None:
    assert len(read_header(write(MODEL + b"junk" * 100)).tensors) == 3


def test_only_the_header_of_a_large_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    rows = 1 << 30
    with path.open("wb") as file:
        file.write(file_bytes(MODEL_KEYS, [tensor("blk.1.w", (32, rows))]))
        file.truncate(file.tell() + 32 * rows * 4)  # sparse: 128 GiB that would take minutes
    assert read_header(path).tensors[0].n_bytes == 32 * rows * 4


NO_MODEL = {
    "empty": (b"", "is empty"),
    "git-lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "git-lfs"),
    "web page": (b"\n<!DOCTYPE html><html></html>", "web page"),
    "zip": (b"PK\x03\x04" + MODEL[4:], "zip archive"),
    "other magic": (b"ggml" + MODEL[4:], r"starts with b'ggml', expected b'GGUF'"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian, expected little-endian"),
    "version 0": (file_bytes(version=0), "version 0, expected 2 or 3"),
    "version 1": (file_bytes(version=1), "version 1, expected 2 or 3"),
    "version 4": (file_bytes(version=4), "version 4, expected 2 or 3"),
    "preamble only in part": (MODEL[:20], "the preamble ends at byte 24, the file at 20"),
}


def keyed(*keys: bytes) -> bytes:
    return file_bytes(list(keys))


ALIGN = "general.alignment"
U64_MAX = struct.pack("<Q", 2**64 - 1)
DAMAGED_METADATA = {
    "2^63 keys": (file_bytes(MODEL_KEYS, n_keys=2**63), f"announces {2**63} metadata keys"),
    "2^63 tensors": (file_bytes(MODEL_KEYS, n_tensors=2**63), f"announces {2**63} tensors"),
    "a key too many": (file_bytes(MODEL_KEYS, n_keys=9), "key 9 of 9 ends at byte 419"),
    "endless key": (keyed(U64_MAX + bytes(9)), f"key 1 of 1 ends at byte {2**64 + 31}"),
    "empty key": (keyed(u32("", 1), u32("b", 1)), "metadata key 1 of 2 is empty"),
    "key twice": (keyed(u32("a", 1), u32("a", 2)), "has the metadata key 'a' twice"),
    "string of 1 GiB": (keyed(entry("a", 8, struct.pack("<Q", 1 << 30))), "at byte 1073741869"),
    "unknown value type": (keyed(entry("a", 13, bytes(8))), "type 13, expected 0 to 12"),
    "unknown element type": (keyed(array("a", 13, 1, bytes(8))), "'a' is an array of type 13"),
    "2^63 strings": (keyed(array("a", 8, 2**63, b"")), f"{2**63} strings in the value of 'a'"),
    "2^62 numbers": (keyed(array("a", 4, 2**62, b"")), f"{2**62} elements in the value of 'a'"),
    "2^63 arrays": (keyed(array("a", 9, 2**63, b"")), "value of 'a' is an array of type 9"),
    "nested arrays": (keyed(array("a", 9, 1, struct.pack("<IQ", 9, 1) * 9999)), "array of type 9"),
    "endless string": (keyed(array("a", 8, 2, text("x") + U64_MAX)), "'a' ends at byte 184467440"),
    "alignment 0": (keyed(u32(ALIGN, 0)), "alignment is 0, expected a power"),
    "alignment 3": (keyed(u32(ALIGN, 3)), "alignment is 3, expected a power"),
    "signed alignment": (keyed(entry(ALIGN, ValueType.INT32, bytes(4))), "type 5, expected 4"),
    "alignment of 1 GiB": (file_bytes([u32(ALIGN, 1 << 30)], MODEL_TENSORS), "bytes 1073741824 to"),
}


def tabled(*tensors: bytes) -> bytes:
    return file_bytes([], list(tensors), bytes(4096))


N = len(MODEL)
DAMAGED_TENSORS = {
    "name of 64 bytes": (tabled(tensor("n" * 64, (1,))), "name of 64 bytes, expected at most 63"),
    "tensor twice": (tabled(tensor("a", (1,)), tensor("a", (1,), offset=32)), "tensor 'a' twice"),
    "5 dimensions": (tabled(tensor("a", (1,) * 5)), "'a' has 5 dimensions, expected at most 4"),
    "endless dimensions": (tabled(text("a") + b"\xff" * 24), "'a' has 4294967295 dimensions"),
    "dimension 0": (tabled(tensor("a", (4, 0))), r"shape \(4, 0\), expected 1 to"),
    "2^63 elements": (tabled(tensor("a", (2**32, 2**31))), r"shape \(4294967296, 2147483648\)"),
    "2^128 elements": (tabled(tensor("a", (2**32,) * 4)), r"expected 1 to 2\^63 - 1 elements"),
    "unknown type": (tabled(tensor("a", (32,), 250)), r"type 250 \(unknown to ggml\)"),
    "removed type": (tabled(tensor("a", (32,), 31)), r"type 31 \(Q4_0_4_4, removed from"),
    "part of a block": (tabled(tensor("a", (33,), Q4_0)), "rows of 33, expected multiples of 32"),
    "not aligned": (tabled(tensor("a", (1,), offset=1)), "data offset 1, expected 0"),
    "gap": (tabled(tensor("a", (1,), offset=1 << 40)), "data offset 1099511627776, expected 0"),
    "overlap": (tabled(tensor("a", (16,)), tensor("b", (1,), offset=32)), "offset 32, expected 64"),
    "too large": (tabled(tensor("a", (2**40,))), "'a' needs bytes 64 to 4398046511168"),
    "table cut": (MODEL[: MODEL.index(b"blk.1") + 3], "tensor 3 of 3 ends at byte"),
    "data cut": (MODEL[:-1], f"'blk.1.w' needs bytes {N - 36} to {N}, the file has {N - 1}"),
}

FAULTS = {**NO_MODEL, **DAMAGED_METADATA, **DAMAGED_TENSORS}


@pytest.mark.parametrize(("content", "message"), FAULTS.values(), ids=FAULTS)
def test_damaged_file_is_refused_with_its_fault(write: Write, content: bytes, message: str) -> None:
    path = write(content)
    with pytest.raises(ModelFileError, match=message) as caught:
        read_header(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_header_of_more_than_256_mib_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(file_bytes([array("a", ValueType.UINT8, 1 << 30, b"")]))
    os.truncate(path, 2 << 30)
    with pytest.raises(ModelFileError, match=r"ends at byte 10737.*, expected at most 268435456"):
        read_header(path)


@settings(database=None, deadline=1000, max_examples=50)
@given(n_bytes=st.integers(0, len(MODEL) - 1))
def test_truncated_file_is_refused(tmp_path_factory: pytest.TempPathFactory, n_bytes: int) -> None:
    path = tmp_path_factory.getbasetemp() / "truncated.gguf"
    path.write_bytes(MODEL[:n_bytes])
    with pytest.raises(ModelFileError):
        read_header(path)


flips = st.lists(
    st.tuples(st.integers(0, len(MODEL) - 197), st.integers(1, 255)), min_size=1, max_size=8
)


@settings(database=None, deadline=1000, max_examples=150)
@given(flips=flips)
def test_file_with_flipped_bits_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, flips: list[tuple[int, int]]
) -> None:
    content = bytearray(MODEL)
    for position, mask in flips:
        content[position] ^= mask
    path = tmp_path_factory.getbasetemp() / "flipped.gguf"
    path.write_bytes(content)
    try:
        header = read_header(path)
    except ModelFileError:
        return
    assert all(t.offset_bytes + t.n_bytes <= len(content) for t in header.tensors)
    try:
        check_runnable(header)
    except ModelUnusable:
        return
    assert header.architecture in ARCHITECTURES


def test_missing_file_is_a_model_file_error(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"none\.gguf: can't be read: no such file"):
        read_header(tmp_path / "none.gguf")


def test_directory_is_a_model_file_error(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="is a directory, expected a GGUF file"):
        read_header(tmp_path)


def test_named_pipe_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelFileError, match="not a regular file"):
        read_header(tmp_path / "pipe.gguf")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_file_without_permission_is_a_model_file_error(write: Write) -> None:
    path = write(MODEL)
    path.chmod(0)
    with pytest.raises(ModelFileError, match="can't be read: permission denied"):
        read_header(path)


def test_source_file_is_current_until_it_is_replaced(write: Write) -> None:
    path = write(MODEL)
    source = read_header(path).files[0]
    assert source.is_current()
    path.unlink()
    assert not source.is_current()
    write(MODEL + b"x")
    assert not source.is_current()


def part(i: int, n_parts: int, tensors: list[bytes], n_tensors: int) -> bytes:
    keys = [
        entry("split.no", ValueType.UINT16, struct.pack("<H", i)),
        entry("split.count", ValueType.UINT16, struct.pack("<H", n_parts)),
        entry("split.tensors.count", ValueType.INT32, struct.pack("<i", n_tensors)),
    ]
    return file_bytes((MODEL_KEYS if i == 0 else []) + keys, tensors, bytes(4))


def write_parts(folder: Path, *names: str, n_tensors: int | None = None) -> Path:
    """Write a split model with one tensor of each name in a part; return the first part."""
    count = len(names) if n_tensors is None else n_tensors
    for i, name in enumerate(names):
        path = folder / f"m-{i + 1:05d}-of-{len(names):05d}.gguf"
        path.write_bytes(part(i, len(names), [tensor(name, (1,))], count))
    return folder / f"m-00001-of-{len(names):05d}.gguf"


def test_split_model_has_the_tensors_of_all_parts(tmp_path: Path) -> None:
    first = write_parts(tmp_path, "blk.0.a", "blk.1.a", "output")
    header = read_model(first)
    assert [t.name for t in header.tensors] == ["blk.0.a", "blk.1.a", "output"]
    assert [t.file_index for t in header.tensors] == [0, 1, 2]
    assert header.path == first
    assert [file.path.name[:7] for file in header.files] == ["m-00001", "m-00002", "m-00003"]
    check_runnable(header)


def test_model_that_the_gguf_package_split_is_read_whole(tmp_path: Path) -> None:
    write_with_package(tmp_path / "m.gguf", split_max_tensors=2)
    header = read_model(tmp_path / "m-00001-of-00002.gguf")
    assert [(t.name, t.file_index) for t in header.tensors] == [("a", 0), ("b", 0), ("c", 1)]


def test_split_model_without_one_of_its_parts_is_refused(tmp_path: Path) -> None:
    first = write_parts(tmp_path, "a", "b", "c")
    (tmp_path / "m-00002-of-00003.gguf").unlink()
    with pytest.raises(ModelFileError, match=r"m-00002-of-00003\.gguf: can't.*\(part 2 of 3 of"):
        read_model(first)


def test_later_part_of_a_split_model_is_refused(tmp_path: Path) -> None:
    write_parts(tmp_path, "a", "b")
    with pytest.raises(ModelFileError, match=r"is part 2 of 2 .* give m-00001-of-00002\.gguf"):
        read_model(tmp_path / "m-00002-of-00002.gguf")


def test_renamed_part_of_a_split_model_is_refused(tmp_path: Path) -> None:
    path = write_parts(tmp_path, "a", "b").rename(tmp_path / "m.gguf")
    with pytest.raises(ModelFileError, match=r"its name must end with -00001-of-00002\.gguf"):
        read_model(path)


def test_parts_in_the_wrong_order_are_refused(tmp_path: Path) -> None:
    first = write_parts(tmp_path, "a", "b", "c")
    (tmp_path / "m-00003-of-00003.gguf").replace(tmp_path / "m-00002-of-00003.gguf")
    with pytest.raises(ModelFileError, match=r"has split\.no 2, expected 1"):
        read_model(first)


def test_tensor_in_two_parts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="has tensor 'a' of another part"):
        read_model(write_parts(tmp_path, "a", "a"))


def test_parts_with_too_few_tensors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"split\.tensors\.count is 5, the parts have 2"):
        read_model(write_parts(tmp_path, "a", "b", n_tensors=5))


def test_complete_model_is_runnable(write: Write) -> None:
    check_runnable(read_header(write(MODEL)))


def test_context_length_0_is_runnable(write: Write) -> None:
    keys = with_keys(u32("llama.context_length", 0), but="llama.context_length")
    check_runnable(read_header(write(file_bytes(keys, MODEL_TENSORS, bytes(196)))))


def test_model_without_its_prediction_layers_is_runnable(write: Write) -> None:
    counts = u32("llama.block_count", 3), u32("llama.nextn_predict_layers", 1)
    keys = with_keys(*counts, but="llama.block_count")
    check_runnable(read_header(write(file_bytes(keys, MODEL_TENSORS, bytes(196)))))


ARCH, BLOCKS = "general.architecture", "llama.block_count"
TOKENS = "tokenizer.ggml.tokens"
UNUSABLE = {
    "no architecture": (with_keys(but=ARCH), "architecture is missing, not known"),
    "unknown architecture": (with_keys(string(ARCH, "nosuch"), but=ARCH), "is 'nosuch', not known"),
    "projector": (with_keys(string(ARCH, "clip"), but=ARCH), "is of type mmproj, expected a lang"),
    "adapter": (with_keys(string("general.type", "adapter")), "is of type adapter, expected"),
    "no tokenizer": (with_keys(but="tokenizer.ggml.model"), "has no vocabulary"),
    "no tokens": (with_keys(but=TOKENS), "has no vocabulary"),
    "zero tokens": (with_keys(array(TOKENS, 8, 0, b""), but=TOKENS), "has no vocabulary"),
    "no block count": (with_keys(but=BLOCKS), "block_count is None, expected 1 to 512"),
    "no blocks": (with_keys(u32(BLOCKS, 0), but=BLOCKS), "block_count is 0, expected 1 to 512"),
    "513 blocks": (with_keys(u32(BLOCKS, 513), but=BLOCKS), "is 513, expected 1 to 512"),
    "block too many": (with_keys(u32(BLOCKS, 3), but=BLOCKS), "is 3, the file has 2 blocks"),
}


@pytest.mark.parametrize(("keys", "message"), UNUSABLE.values(), ids=UNUSABLE)
def test_file_of_no_model_is_unusable(write: Write, keys: list[bytes], message: str) -> None:
    header = read_header(write(file_bytes(keys, MODEL_TENSORS, bytes(196))))
    with pytest.raises(ModelUnusable, match=message) as caught:
        check_runnable(header)
    assert str(caught.value).startswith(f"{header.path}: ")


def test_model_with_vision_tensors_is_unusable(write: Write) -> None:
    tensors = [tensor("v.patch_embd.weight", (1,))]
    header = read_header(write(file_bytes(MODEL_KEYS, tensors, bytes(4))))
    with pytest.raises(ModelUnusable, match=r"vision tensors \('v\.patch_embd\.weight'\)"):
        check_runnable(header)


def test_every_known_architecture_is_in_the_llama_cpp_that_is_installed() -> None:
    package = find_spec("llama_cpp")
    assert package is not None
    assert package.origin is not None
    [library, *_] = Path(package.origin).parent.glob("lib/libllama.*")
    content = library.read_bytes()
    assert [name for name in sorted(ARCHITECTURES) if name.encode() + b"\0" not in content] == []
