"""Model names, and what the library says about the files it serves."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.constants import LlamaFileType

from headrace.engine.errors import InvalidRequest, ModelFileError, ModelUnusable
from headrace.engine.library import Library, Model, Name, format_parameter_count

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write a tiny model with the gguf package; rows is the size of its one block's tensor."""

    def write_model(
        name: str = "tiny.gguf",
        rows: int = 4,
        template: str | None = None,
        file_type: int | None = None,
        keys: dict[str, Any] | None = None,
    ) -> Path:
        path = tmp_path / name
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_name("Tiny")
        writer.add_block_count(1)
        writer.add_context_length(2048)
        writer.add_embedding_length(32)
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(["a", "b"])
        for key, value in (keys or {}).items():
            writer.add_uint32(key, value)
        if template is not None:
            writer.add_chat_template(template)
        if file_type is not None:
            writer.add_file_type(file_type)
        writer.add_tensor("output_norm.weight", np.zeros(8, dtype=np.float32))
        blocks = np.zeros((rows, 18), dtype=np.uint8)
        writer.add_tensor("blk.0.w", blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write_model


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("m", "m:latest"),
        ("m:7b", "m:7b"),
        ("  m:7b\n", "m:7b"),
        ("user/m", "user/m:latest"),
        ("library/m", "m:latest"),
        ("registry.ollama.ai/library/m:x", "m:x"),
        ("registry.ollama.ai/user/m:x", "user/m:x"),
        ("hf.co/user/m:Q4_K_M", "hf.co/user/m:Q4_K_M"),
        ("localhost:5000/user/m", "localhost:5000/user/m:latest"),
        ("Llama-3.2_x:1b-Q4", "Llama-3.2_x:1b-Q4"),
        ("_m:_t", "_m:_t"),
        ("m" * 80 + ":" + "t" * 80, "m" * 80 + ":" + "t" * 80),
        ("h" * 350 + "/n/m", "h" * 350 + "/n/m:latest"),
    ],
)
def test_name_is_shown_without_the_default_host_and_namespace(text: str, shown: str) -> None:
    assert str(Name.parse(text)) == shown


def test_name_that_is_shown_parses_to_itself() -> None:
    name = Name.parse("host:80/User/Model:Tag")
    assert Name.parse(str(name)) == name == Name("host:80", "User", "Model", "Tag")


@pytest.mark.parametrize(
    "text",
    [
        "", " ", ":", "m:", ":t", "/m", "n/", "h//m", "a/b/c/d", "m:t:u", ".m", "-m", "m m", "m:-t",
        "é", "n.s/m", "n:1/m", "../../evil", "http://h/n/m", "m\x00", "m\nn", "m@sha256:00",
        "n/m:a/b", "m" * 81, "m:" + "t" * 81, "n" * 81 + "/m", "h" * 351 + "/n/m",
    ],
)  # fmt: skip
def test_malformed_name_is_an_invalid_request(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^invalid model name$"):
        Name.parse(text)


@pytest.mark.parametrize(
    ("file_name", "shown"),
    [
        ("SmolLM2-135M.Q4_1.gguf", "SmolLM2-135M.Q4_1:latest"),
        ("x.GGUF", "x:latest"),
        ("x-00001-of-00003.gguf", "x:latest"),
        ("my model (v1):é.gguf", "my-model--v1---:latest"),
        ("-.x.gguf", "x:latest"),
        ("sha256-0.5b", "sha256-0.5b:latest"),
        ("m" * 90 + ".gguf", "m" * 80 + ":latest"),
    ],
)
def test_model_is_named_after_its_file(file_name: str, shown: str) -> None:
    name = Name.of_file(Path("/models") / file_name)
    assert str(name) == shown
    assert Name.parse(shown) == name


def test_file_name_without_a_usable_character_is_refused() -> None:
    with pytest.raises(ModelUnusable, match="no model name can be made"):
        Name.of_file(Path("/models/---.gguf"))


@pytest.mark.parametrize(
    ("n", "shown"),
    [
        (999, "999"),
        (1_000, "1K"),
        (12_345, "12K"),
        (270_000_000, "270M"),
        (134_515_008, "134.52M"),
        (7_000_000_000, "7B"),
        (3_212_749_888, "3.2B"),
    ],
)
def test_parameter_count_is_shown_as_ollama_does(n: int, shown: str) -> None:
    assert format_parameter_count(n) == shown


def test_model_is_described_from_its_header(write: Write) -> None:
    path = write(file_type=LlamaFileType.MOSTLY_Q4_K_M, template="{{ messages }}")
    model = Model.open(path)
    assert (str(model.name), model.path) == ("tiny:latest", path)
    assert model.size_bytes == path.stat().st_size
    assert (model.details.family, model.details.families) == ("llama", ("llama",))
    assert (model.details.parameter_size, model.details.quantization_level) == ("136", "Q4_K_M")
    assert model.template == "{{ messages }}"
    assert [(t.name, t.type_name, t.shape) for t in model.tensors] == [
        ("output_norm.weight", "F32", (8,)),
        ("blk.0.w", "Q4_0", (32, 4)),
    ]


def test_modification_time_has_the_local_offset(write: Write) -> None:
    path = write()
    os.utime(path, (1_700_000_000, 1_700_000_000))
    modified_at = Model.open(path).modified_at
    assert modified_at == datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)
    assert modified_at.utcoffset() == datetime.fromtimestamp(1_700_000_000).astimezone().utcoffset()


def test_full_precision_file_type_is_named_by_its_type(write: Write) -> None:
    path = write(file_type=LlamaFileType.ALL_F32)
    assert Model.open(path).details.quantization_level == "F32"


@pytest.mark.parametrize("file_type", [None, 4, 999, LlamaFileType.GUESSED])
def test_without_a_known_file_type_the_type_of_most_weights_is_named(
    write: Write, file_type: int | None
) -> None:
    assert Model.open(write(file_type=file_type)).details.quantization_level == "Q4_0"


@pytest.mark.parametrize(
    ("template", "capabilities"),
    [
        (None, ("completion",)),
        ("{{ messages }}", ("completion",)),
        ("{% if tools %}", ("completion", "tools")),
        ("{% if message.tool_calls %}", ("completion", "tools")),
        ("<think>{{ x }}</think>", ("completion", "thinking")),
        ("{{ content.split('</think>')[-1] }}", ("completion", "thinking")),
        ("{{ reasoning_content }} {{ content.split('</think>')[-1] }}", ("completion",)),
        ("{{ tools }}<think>{{ reasoning_content }}</think>", ("completion", "tools", "thinking")),
        ("<think>", ("completion",)),
    ],
)
def test_capabilities_follow_the_template(
    write: Write, template: str | None, capabilities: tuple[str, ...]
) -> None:
    assert Model.open(write(template=template)).capabilities == capabilities


def test_model_with_a_pooling_type_embeds_and_does_not_complete(write: Write) -> None:
    path = write(keys={"llama.pooling_type": 1}, template="{{ tools }}")
    assert Model.open(path).capabilities == ("embedding",)


def test_model_info_leaves_out_name_template_and_arrays(write: Write) -> None:
    info = Model.open(write(template="{{ messages }}")).model_info(is_verbose=False)
    assert info == {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.context_length": 2048,
        "llama.embedding_length": 32,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": None,
        "general.parameter_count": 136,
    }


def test_verbose_model_info_has_arrays(write: Write) -> None:
    info = Model.open(write()).model_info(is_verbose=True)
    assert info["tokenizer.ggml.tokens"] == ["a", "b"]


def test_digest_is_stable_until_the_file_changes(write: Write) -> None:
    path = write()
    digest = Model.open(path).digest
    assert len(bytes.fromhex(digest)) == 32
    assert Model.open(path).digest == digest
    with path.open("r+b") as file:  # a tensor's byte: the header stays the same
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1_000_000))
    assert Model.open(path).digest != digest


def test_models_are_listed_newest_first(write: Write) -> None:
    paths = [write("old.gguf"), write("new.gguf"), write("middle.gguf")]
    for path, mtime in zip(paths, (1000, 3000, 2000), strict=True):
        os.utime(path, (mtime, mtime))
    names = [model.name.model for model in Library(paths).models]
    assert names == ["new", "middle", "old"]


def test_model_is_found_by_any_spelling_of_its_name(write: Write) -> None:
    library = Library([write("Tiny.gguf")])
    [model] = library.models
    for text in ("Tiny", "tiny:LATEST", "library/tiny", "REGISTRY.ollama.ai/library/tiny:latest"):
        assert library.find(text) is model


def test_model_that_is_not_served_is_not_found(write: Write) -> None:
    library = Library([write()])
    assert library.find("other") is None
    assert library.find("tiny:7b") is None


def test_malformed_name_is_not_looked_up(write: Write) -> None:
    with pytest.raises(InvalidRequest):
        Library([write()]).find("../tiny")


def test_two_files_with_one_name_are_refused(write: Write) -> None:
    paths = [write("Tiny.gguf"), write("tiny.gguf")]
    with pytest.raises(ModelUnusable, match=r"Tiny\.gguf and .*tiny\.gguf would both be served"):
        Library(paths)


def test_file_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"none\.gguf"):
        Library([tmp_path / "none.gguf"])


def test_refresh_keeps_a_model_whose_file_is_unchanged(write: Write) -> None:
    library = Library([write()])
    [model] = library.models
    assert library.refresh(model.name) is model


def test_refresh_reads_a_replaced_file(write: Write) -> None:
    library = Library([write()])
    [model] = library.models
    write(rows=8)
    assert not model.is_current()
    replaced = library.refresh(model.name)
    assert replaced.details.parameter_size == "264"
    assert replaced.digest != model.digest
    assert library.find("tiny") is replaced


def test_deleted_model_stays_listed_and_is_found_again(write: Write) -> None:
    path = write()
    library = Library([path])
    [model] = library.models
    path.unlink()
    with pytest.raises(ModelFileError, match="no such file"):
        library.refresh(model.name)
    assert library.models == [model]
    write()
    assert library.refresh(model.name).is_current()


def test_split_model_is_served_as_one(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "big.gguf", "llama", split_max_tensors=1)
    writer.add_block_count(1)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a"])
    for i in range(2):
        writer.add_tensor(f"blk.{i}.w", np.zeros(8, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    parts = sorted(tmp_path.glob("big-*"))
    model = Model.open(parts[0])
    assert str(model.name) == "big:latest"
    assert model.size_bytes == sum(part.stat().st_size for part in parts)
    parts[1].unlink()
    assert not model.is_current()
