"""Read and check the header of a GGUF file.

In: a path. Out: a Header (metadata and tensor table), or a ModelFileError that names the fault. The
rules are those of ggml's own reader (ggml/src/gguf.cpp), so both parsers agree on what is a model.
Does not know tensor data, placement, or what a model is called.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from struct import Struct
from types import MappingProxyType
from typing import Any, BinaryIO

from gguf.constants import (
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    MODEL_ARCH_NAMES,
    GGUFType,
    GGUFValueType,
)

from headrace.engine.errors import ModelFileError, ModelUnusable
from headrace.engine.gguf_source import U64, Source

# ggml.h: GGML_MAX_DIMS, GGML_MAX_NAME with its NUL; llama-hparams.h: LLAMA_MAX_LAYERS.
_MAX_DIMS = 4
_MAX_NAME_BYTES = 63
_MAX_BLOCKS = 512
# The least that one of them takes in the file: lengths, ids, a one-byte key, a one-byte value.
_MIN_KEY_BYTES = 8 + 1 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 4 + 8

_PREAMBLE = Struct("<4sIQQ")
_U32, _U32_U64 = Struct("<I"), Struct("<IQ")
# GGUFValueType in order; 8 is a string, 9 an array.
_SCALARS = {i: Struct("<" + code) for i, code in enumerate("BbHhIif?--Qqd") if code != "-"}

# Type id → name, elements per block, bytes per block.
_TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    int(type_id): (type_id.name, *sizes) for type_id, sizes in GGML_QUANT_SIZES.items()
}
# llama-cpp-python 0.3.36 reads it, gguf 0.19 has no name for it: ggml-common.h, block_q2_0.
_TENSOR_TYPES.setdefault(42, ("Q2_0", 64, 2 + 16))
# ggml.h: "support has been removed".
_REMOVED_TENSOR_TYPES = {
    4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8",
    36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8",
}  # fmt: skip

# llama-cpp-python 0.3.36 runs these, gguf 0.19 doesn't list them: llama-arch.cpp. Left out: speech
# models, and drafts that run only beside another model (eagle3, dflash, gemma4-assistant).
ARCHITECTURES = frozenset(MODEL_ARCH_NAMES.values()) | {
    "bailingmoe3", "cohere2moe", "deepseek32", "deepseek4", "dots3note", "glm5-next",
    "granite_swa", "graniteswitch", "hrm_text", "hy_v3", "hy_v4", "kimi-k3", "laguna", "maple",
    "mellum", "minimax-01", "minimax-m3", "muse-glimmer", "nanbeige", "qwen4exp", "spark2_5",
    "talkie",
}  # fmt: skip
_BLOCK_TENSOR = re.compile(r"(?:^|\.)blk\.([0-9]+)\.")  # also enc.blk.0.… and dec.blk.0.…
_NOT_A_GGUF = (
    (b"version https://git-lfs", "is a git-lfs pointer, download the real file (git lfs pull)"),
    (b"<", "is a web page, the download needs a login or another address"),
    (b"PK\x03\x04", "is a zip archive"),
)


@dataclass(frozen=True, slots=True)
class Array:
    """An array of the metadata, kept as it lies in the file; strings with their lengths."""

    type_id: int
    n_elements: int
    raw: bytes = field(repr=False)

    def values(self) -> list[Any]:
        """Decode all elements; a large vocabulary takes some 50 ms."""
        if self.type_id != GGUFValueType.STRING:
            return [value for (value,) in _SCALARS[self.type_id].iter_unpack(self.raw)]
        values, end = [], 0
        for _ in range(self.n_elements):
            start = end + U64.size
            end = start + U64.unpack_from(self.raw, end)[0]
            values.append(self.raw[start:end].decode(errors="replace"))
        return values


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor's place; shape in GGUF order, the row first, offset_bytes from the file's start."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    type_id: int
    offset_bytes: int
    n_bytes: int
    n_elements: int
    file_index: int = 0


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of a model, as it was when its header was read."""

    path: Path
    n_bytes: int
    mtime_ns: int
    inode: int
    header_sha256: bytes = field(repr=False)

    def is_current(self) -> bool:
        """Return whether the path still leads to the file that was read, unchanged."""
        try:
            status = self.path.stat()
        except OSError:
            return False
        now = status.st_size, status.st_mtime_ns, status.st_ino
        return now == (self.n_bytes, self.mtime_ns, self.inode)


@dataclass(frozen=True, slots=True, eq=False)
class Header:
    """What a GGUF file says before its tensor data; metadata values are scalars, str and Array.

    A split model has the tensors of all its files; the other values are the first file's.
    """

    path: Path
    version: int
    metadata: Mapping[str, Any] = field(repr=False)
    tensors: tuple[Tensor, ...] = field(repr=False)
    alignment: int
    data_offset: int
    files: tuple[SourceFile, ...]
    table_offset: int = 0  # where the tensor table starts

    def get_int(self, key: str, default: int) -> int:
        """Return the metadata value of key, or default if it is missing or no integer."""
        value = self.metadata.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else default

    def get_str(self, key: str, default: str) -> str:
        """Return the metadata value of key, or default if it is missing or no string."""
        value = self.metadata.get(key)
        return value if isinstance(value, str) else default

    @property
    def architecture(self) -> str:
        return self.get_str("general.architecture", "")

    @property
    def context_length(self) -> int:
        """The context the model was trained for; 0 if the file does not say."""
        return self.get_int(f"{self.architecture}.context_length", 0)

    @property
    def embedding_length(self) -> int:
        return self.get_int(f"{self.architecture}.embedding_length", 0)

    @property
    def block_count(self) -> int:
        return self.get_int(f"{self.architecture}.block_count", 0)

    @property
    def parameter_count(self) -> int:
        return sum(tensor.n_elements for tensor in self.tensors)

    @property
    def chat_template(self) -> str | None:
        """The Jinja template, or None; an empty one is kept."""
        template = self.metadata.get("tokenizer.chat_template")
        return template if isinstance(template, str) else None

    @property
    def has_vocabulary(self) -> bool:
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        if not isinstance(tokens, Array) or tokens.type_id != GGUFValueType.STRING:
            return False
        # "none" is llama.cpp's word for a model that is fed vectors only.
        return tokens.n_elements > 0 and self.get_str("tokenizer.ggml.model", "none") != "none"


Opener = Callable[[Path], BinaryIO]


def _open(path: Path) -> BinaryIO:
    return path.open("rb")


def read_header(path: Path, opener: Opener = _open) -> Header:
    """Read the header of one file, whether or not it is a part of a split model.

    Raises:
        ModelFileError: the file can't be read, or is not a complete and valid GGUF file.
    """
    try:
        # Asked before open: opening a named pipe would block. A file that is replaced in between
        # is noticed later, its status is not the one noted here.
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            kind = "a directory" if stat.S_ISDIR(status.st_mode) else "not a regular file"
            raise ModelFileError(f"{path}: is {kind}, expected a GGUF file")
        with opener(path) as file:
            return _read_file(path, file, status)
    except OSError as error:
        raise ModelFileError(f"{path}: can't be read: {str(error.strerror).lower()}") from error


def read_model(path: Path, opener: Opener = _open) -> Header:
    """Read the header of the model at path; of a split model, path is the first of its files.

    Raises:
        ModelFileError: a file can't be read, is not valid, or does not belong to the others.
    """
    first = read_header(path, opener)
    n_parts = first.get_int("split.count", 1)
    if n_parts <= 1:
        return first
    part = first.get_int("split.no", 0)
    what = f"is part {part + 1} of {n_parts} of a split model"
    suffix = f"-{part + 1:05d}-of-{n_parts:05d}.gguf"
    if not path.name.endswith(suffix):
        raise ModelFileError(f"{path}: {what}, its name must end with {suffix}")
    stem = path.name.removesuffix(suffix)
    if part != 0:
        raise ModelFileError(f"{path}: {what}, give {stem}-00001-of-{n_parts:05d}.gguf")
    headers = [first]
    for i in range(1, n_parts):
        try:
            part_path = path.with_name(f"{stem}-{i + 1:05d}-of-{n_parts:05d}.gguf")
            header = read_header(part_path, opener)
        except ModelFileError as error:
            raise ModelFileError(f"{error} (part {i + 1} of {n_parts} of {path})") from error
        if (found := header.get_int("split.no", -1)) != i:
            raise ModelFileError(f"{header.path}: has split.no {found}, expected {i}")
        headers.append(header)
    return _merge(headers)


def check_runnable(header: Header) -> None:
    """Check that header describes a language model that llama.cpp can be trusted to load.

    Raises:
        ModelUnusable: it does not; the message says why.
    """
    path, architecture = header.path, header.architecture
    kind = GGUFType.MMPROJ if architecture == "clip" else header.get_str("general.type", "")
    if kind in (GGUFType.ADAPTER, GGUFType.IMATRIX, GGUFType.MMPROJ):
        raise ModelUnusable(f"{path}: is of type {kind}, expected a language model")
    if architecture not in ARCHITECTURES:
        found = repr(architecture) if architecture else "missing"
        raise ModelUnusable(f"{path}: general.architecture is {found}, not known to this engine")
    if not header.has_vocabulary:
        raise ModelUnusable(f"{path}: has no vocabulary (tokenizer.ggml.model and .tokens)")
    for tensor in header.tensors:
        if tensor.name.startswith(("v.", "mm.")):
            raise ModelUnusable(f"{path}: has vision tensors ({tensor.name!r}), expected text only")
    _check_blocks(header)


def _check_blocks(header: Header) -> None:
    """Check block_count, which llama.cpp asserts to be in range: it would abort the process."""
    key = f"{header.architecture}.block_count"
    if not 1 <= header.block_count <= _MAX_BLOCKS:
        raise ModelUnusable(
            f"{header.path}: {key} is {header.metadata.get(key)}, expected 1 to {_MAX_BLOCKS}"
        )
    matches = (_BLOCK_TENSOR.search(tensor.name) for tensor in header.tensors)
    n_present = 1 + max((int(match[1]) for match in matches if match), default=-1)
    # Layers for multi-token prediction are counted, come last, and are often left out of the file.
    n_optional = header.get_int(f"{header.architecture}.nextn_predict_layers", 0)
    if max(header.block_count - n_optional, 1) > n_present:
        raise ModelUnusable(
            f"{header.path}: {key} is {header.block_count}, the file has {n_present} blocks"
        )


def _merge(headers: list[Header]) -> Header:
    """Return the header of a split model, from its files' headers in order."""
    first = headers[0]
    tensors: dict[str, Tensor] = {}
    for i, header in enumerate(headers):
        for tensor in header.tensors:
            if tensor.name in tensors:
                raise ModelFileError(f"{header.path}: has tensor {tensor.name!r} of another part")
            tensors[tensor.name] = replace(tensor, file_index=i)
    announced = first.get_int("split.tensors.count", -1)
    if announced != len(tensors):
        raise ModelFileError(
            f"{first.path}: split.tensors.count is {announced}, the parts have {len(tensors)}"
        )
    files = tuple(header.files[0] for header in headers)
    return replace(first, tensors=tuple(tensors.values()), files=files)


def _read_file(path: Path, file: BinaryIO, status: os.stat_result) -> Header:
    source = Source(path, file, status.st_size)
    version, n_tensors, n_keys = _read_preamble(source)
    metadata = _read_metadata(source, n_keys)
    table_offset = source.position
    alignment = metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
    if alignment == 0 or alignment & (alignment - 1):
        raise source.error(f"general.alignment is {alignment}, expected a power of two")
    entries = _read_tensors(source, n_tensors)
    data_offset = _padded(source.position, alignment)
    tensors = tuple(_place(source, entries, data_offset, alignment))
    read = SourceFile(path, status.st_size, status.st_mtime_ns, status.st_ino, source.digest())
    return Header(path, version, metadata, tensors, alignment, data_offset, (read,), table_offset)


def _read_preamble(source: Source) -> tuple[int, int, int]:
    """Return version, number of tensors and number of keys; say what else the file may be."""
    if source.n_bytes == 0:
        raise source.error("is empty, expected a GGUF file")
    start = source.take(min(source.n_bytes, 64))
    source.position = 0
    if not start.startswith(b"GGUF"):
        for prefix, text in _NOT_A_GGUF:
            if start.lstrip().startswith(prefix):
                raise source.error(f"{text}; expected a GGUF file")
        raise source.error(f"starts with {start[:4]!r}, expected {b'GGUF'!r}")
    _, version, n_tensors, n_keys = source.unpack(_PREAMBLE)
    if version and version & 0xFFFF == 0:  # a small number with its bytes swapped
        raise source.error("byte order not supported: is big-endian, expected little-endian")
    if version not in (2, 3):
        raise source.error(f"has GGUF version {version}, expected 2 or 3")
    source.check_room(n_keys, _MIN_KEY_BYTES, "metadata keys")
    source.check_room(n_tensors, _MIN_TENSOR_BYTES, "tensors")
    return version, n_tensors, n_keys


def _read_metadata(source: Source, n_keys: int) -> Mapping[str, Any]:
    metadata: dict[str, Any] = {}
    for i in range(n_keys):
        source.item = f"metadata key {i + 1} of {n_keys}"
        key = source.text()
        if not key:
            raise source.error(f"{source.item} is empty")
        shown = repr(key[:80])  # a damaged one can be a megabyte long
        if key in metadata:
            raise source.error(f"has the metadata key {shown} twice")
        source.item = f"the value of {shown}"
        type_id = source.number(_U32)
        if key == "general.alignment" and type_id != GGUFValueType.UINT32:
            raise source.error(f"general.alignment has value type {type_id}, expected 4 (u32)")
        metadata[key] = _read_value(source, type_id)
    return MappingProxyType(metadata)


def _read_value(source: Source, type_id: int) -> Any:
    if type_id == GGUFValueType.STRING:
        return source.text()
    if type_id in _SCALARS:
        return source.unpack(_SCALARS[type_id])[0]
    if type_id != GGUFValueType.ARRAY:
        raise source.error(f"{source.item} has type {type_id}, expected 0 to 12")
    type_id, n_elements = source.unpack(_U32_U64)
    if type_id == GGUFValueType.STRING:
        source.check_room(n_elements, U64.size, f"strings in {source.item}")
        return Array(type_id, n_elements, source.take_strings(n_elements))
    if type_id not in _SCALARS:  # ggml reads no arrays of arrays either
        raise source.error(f"{source.item} is an array of type {type_id}, expected scalars or text")
    item_bytes = _SCALARS[type_id].size
    source.check_room(n_elements, item_bytes, f"elements in {source.item}")
    return Array(type_id, n_elements, source.take(n_elements * item_bytes))


def _read_tensors(source: Source, n_tensors: int) -> list[Tensor]:
    """Read the tensor table; offset_bytes still counts from the start of the tensor data."""
    tensors: dict[str, Tensor] = {}
    for i in range(n_tensors):
        source.item = f"tensor {i + 1} of {n_tensors}"
        tensor = _read_tensor(source)
        if tensor.name in tensors:
            raise source.error(f"has the tensor {tensor.name!r} twice")
        tensors[tensor.name] = tensor
    return list(tensors.values())


def _read_tensor(source: Source) -> Tensor:
    n_name_bytes = source.number(U64)
    if n_name_bytes > _MAX_NAME_BYTES:
        raise source.error(
            f"{source.item} has a name of {n_name_bytes} bytes, expected at most {_MAX_NAME_BYTES}"
        )
    name = source.take(n_name_bytes).decode(errors="replace")
    source.item = f"tensor {name!r}"
    n_dims = source.number(_U32)
    if n_dims > _MAX_DIMS:
        raise source.error(f"{source.item} has {n_dims} dimensions, expected at most {_MAX_DIMS}")
    shape = tuple(source.number(U64) for _ in range(n_dims))
    type_id, offset = source.unpack(_U32_U64)
    if type_id not in _TENSOR_TYPES:
        removed = _REMOVED_TENSOR_TYPES.get(type_id)
        why = f"{removed}, removed from the format" if removed else "unknown to ggml"
        raise source.error(f"{source.item} has type {type_id} ({why})")
    type_name, block_elements, block_bytes = _TENSOR_TYPES[type_id]
    n_elements = prod(shape)
    if not 0 < n_elements < 1 << 63:
        raise source.error(f"{source.item} has shape {shape}, expected 1 to 2^63 - 1 elements")
    if (n_row_elements := shape[0] if shape else 1) % block_elements:
        raise source.error(
            f"{source.item} has rows of {n_row_elements}, expected multiples of {block_elements}"
        )
    n_bytes = n_elements // block_elements * block_bytes
    return Tensor(name, shape, type_name, type_id, offset, n_bytes, n_elements)


def _place(
    source: Source, tensors: list[Tensor], data_offset: int, alignment: int
) -> Iterator[Tensor]:
    """Yield the tensors with offset_bytes from the start of the file; check that it has them."""
    expected = 0  # ggml wants them back to back, each padded to the alignment
    for tensor in tensors:
        name, start = repr(tensor.name), data_offset + tensor.offset_bytes
        if (found := tensor.offset_bytes) != expected:
            raise source.error(f"tensor {name} has data offset {found}, expected {expected}")
        if start + tensor.n_bytes > source.n_bytes:
            raise source.error(
                f"tensor {name} needs bytes {start} to {start + tensor.n_bytes},"
                f" the file has {source.n_bytes}: truncated download?"
            )
        expected += _padded(tensor.n_bytes, alignment)
        yield replace(tensor, offset_bytes=start)


def _padded(n_bytes: int, alignment: int) -> int:
    return (n_bytes + alignment - 1) // alignment * alignment
