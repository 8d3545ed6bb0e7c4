"""The models that are served: their names, and what is said about them before they are loaded.

In: paths of GGUF files, and names as clients write them. Out: Model values. Reads headers only;
does not know which models are loaded, nor HTTP.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from gguf.constants import LlamaFileType

from headrace.engine.errors import InvalidRequest, ModelUnusable
from headrace.engine.gguf import Array, Header, Tensor, check_runnable, read_model
from headrace.engine.template import (
    JinjaTemplate,
    template_supports_thinking,
    template_supports_tools,
)

DEFAULT_HOST = "registry.ollama.ai"
DEFAULT_NAMESPACE = "library"
DEFAULT_TAG = "latest"

_MAX_PART_CHARS = 80
_HOST = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,349}")
_NAMESPACE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,79}")
_PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,79}")
_SPLIT_SUFFIX = re.compile(r"-[0-9]{5}-of-[0-9]{5}$")


@dataclass(frozen=True, slots=True)
class Name:
    """A model's full name; str() is what clients see, without the default host and namespace."""

    host: str
    namespace: str
    model: str
    tag: str

    @classmethod
    def parse(cls, text: str) -> Name:
        """Parse [host/][namespace/]model[:tag].

        Raises:
            InvalidRequest: a part is empty, too long, or has a character that it may not have.
        """
        path, colon, tag = text.strip().rpartition(":")
        if not colon or "/" in tag:  # no colon, or the one of a host's port
            path, tag = path + colon + tag, DEFAULT_TAG
        *above, model = path.rsplit("/", 2)
        namespace = above.pop() if above else DEFAULT_NAMESPACE
        host = above.pop() if above else DEFAULT_HOST
        parts = ((_HOST, host), (_NAMESPACE, namespace), (_PART, model), (_PART, tag))
        if not all(pattern.fullmatch(part) for pattern, part in parts):
            raise InvalidRequest("invalid model name")
        return cls(host, namespace, model, tag)

    @classmethod
    def of_file(cls, path: Path) -> Name:
        """Return the name that a file's model is served under, from the file's name.

        Characters that no name has become "-"; what is over 80 characters is cut off.
        """
        stem = path.stem if path.suffix.lower() == ".gguf" else path.name
        stem = re.sub(r"[^A-Za-z0-9_.-]", "-", _SPLIT_SUFFIX.sub("", stem))
        model = stem.lstrip(".-")[:_MAX_PART_CHARS]
        if not model:
            raise ModelUnusable(f"{path}: no model name can be made from the file's name")
        return cls(DEFAULT_HOST, DEFAULT_NAMESPACE, model, DEFAULT_TAG)

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What two names are compared by: case does not matter."""
        return self.host.lower(), self.namespace.lower(), self.model.lower(), self.tag.lower()

    def __str__(self) -> str:
        host, namespace, _, _ = self.key
        shown = f"{self.model}:{self.tag}"
        if host != DEFAULT_HOST:
            return f"{self.host}/{self.namespace}/{shown}"
        return shown if namespace == DEFAULT_NAMESPACE else f"{self.namespace}/{shown}"


@dataclass(frozen=True, slots=True)
class Details:
    """What a model is, in the words that /api/tags uses."""

    family: str
    families: tuple[str, ...]
    parameter_size: str
    quantization_level: str


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """A model that can be loaded.

    digest is the SHA-256 of the template and of each file's header, size, mtime and inode: a hash
    of all the content would read 40 GB at the start. It is stable and changes with any of them.
    """

    name: Name
    header: Header = field(repr=False)
    size_bytes: int
    digest: str
    modified_at: datetime
    details: Details
    template: str
    """The chat template, or "" if there is none."""
    capabilities: tuple[str, ...]

    @classmethod
    def open(cls, path: Path, template: str | None = None) -> Model:
        """Read the header of the model at path and describe it, under the name of its file.

        template replaces the one in the file, None leaves it.

        Raises:
            ModelFileError: a file of the model can't be read or is not valid.
            ModelUnusable: it holds something else than a language model that can be run.
        """
        header = read_model(path)
        check_runnable(header)
        if template is None:
            template = header.chat_template or ""
        modified_s = max(file.mtime_ns for file in header.files) / 1e9
        return cls(
            name=Name.of_file(path),
            header=header,
            size_bytes=sum(file.n_bytes for file in header.files),
            digest=_digest(header, template),
            modified_at=datetime.fromtimestamp(modified_s).astimezone(),
            details=Details(
                family=header.architecture,
                families=(header.architecture,),
                parameter_size=format_parameter_count(header.parameter_count),
                quantization_level=_quantization_level(header),
            ),
            template=template,
            capabilities=_capabilities(header, template),
        )

    @property
    def path(self) -> Path:
        """The file that llama.cpp opens: the only one, or the first part."""
        return self.header.path

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.header.tensors

    def model_info(self, is_verbose: bool) -> dict[str, Any]:
        """Return the metadata as /api/show gives it: arrays are None unless is_verbose."""
        info: dict[str, Any] = {}
        for key, value in self.header.metadata.items():
            if key in ("general.name", "tokenizer.chat_template"):
                continue
            if isinstance(value, Array):
                info[key] = value.values() if is_verbose else None
            else:
                info[key] = value
        info["general.parameter_count"] = self.header.parameter_count
        return info

    def is_current(self) -> bool:
        """Return whether the model's files are still the ones whose headers were read."""
        return all(file.is_current() for file in self.header.files)


class Library:
    """The served models by name."""

    def __init__(self, paths: Iterable[Path], template: str | None = None) -> None:
        """Open the models at paths; template replaces those in the files, None leaves them.

        Raises:
            ModelUnusable: a file can't be served, or two files have the same name.
        """
        self._template = template
        self._models: dict[tuple[str, ...], Model] = {}
        for path in paths:
            model = Model.open(path, template)
            if (other := self._models.setdefault(model.name.key, model)) is not model:
                raise ModelUnusable(
                    f"{other.path} and {path} would both be served as {other.name}, rename one"
                )

    @property
    def models(self) -> list[Model]:
        """All models, the one modified last first."""
        return sorted(self._models.values(), key=lambda model: model.modified_at, reverse=True)

    def find(self, text: str) -> Model | None:
        """Return the model that text names, or None.

        Raises:
            InvalidRequest: text is no model name.
        """
        return self._models.get(Name.parse(text).key)

    def refresh(self, name: Name) -> Model:
        """Return the served model of that name, read anew if its files changed.

        Raises:
            ModelUnusable: the files changed and can't be used, or are gone; the model stays listed
                as it was, so that a repaired file is found by the next call.
        """
        model = self._models[name.key]
        if not model.is_current():
            model = Model.open(model.path, self._template)
            self._models[name.key] = model
        return model


def read_template(path: str) -> str | None:
    """Return the text of the chat template file at path, which replaces models' own; "" has none.

    Raises:
        ModelUnusable: the file can't be read as text, or is no template.
    """
    if not path:
        return None
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ModelUnusable(f"{path}: can't be read: {str(error.strerror).lower()}") from error
    except UnicodeDecodeError as error:
        raise ModelUnusable(f"{path}: is not UTF-8 text, expected a Jinja template") from error
    if fault := JinjaTemplate(text).fault:
        raise ModelUnusable(f"{path}: {fault}")
    return text


def format_parameter_count(n: int) -> str:
    """Return n as Ollama shows it: 7B, 3.2B, 134.52M, 270M, 12K."""
    if n >= 10**9:
        return f"{n // 10**9}B" if n % 10**9 == 0 else f"{n / 1e9:.1f}B"
    if n >= 10**6:
        return f"{n // 10**6}M" if n % 10**6 == 0 else f"{n / 1e6:.2f}M"
    return f"{n / 1e3:.0f}K" if n >= 1000 else str(n)


def _digest(header: Header, template: str) -> str:
    digest = hashlib.sha256(template.encode())
    for file in header.files:
        digest.update(file.header_sha256)
        digest.update(f"{file.n_bytes} {file.mtime_ns} {file.inode}\n".encode())
    return digest.hexdigest()


def _quantization_level(header: Header) -> str:
    """Return the file type, such as Q4_K_M; if the file names none, the type of most weights."""
    file_type = header.get_int("general.file_type", -1)
    if file_type in {int(known) for known in LlamaFileType} - {int(LlamaFileType.GUESSED)}:
        return str(LlamaFileType(file_type).name).removeprefix("MOSTLY_").removeprefix("ALL_")
    n_weights: Counter[str] = Counter()
    for tensor in header.tensors:
        n_weights[tensor.type_name] += tensor.n_elements
    return n_weights.most_common(1)[0][0]


def _capabilities(header: Header, template: str) -> tuple[str, ...]:
    """Return what the model can do, as its metadata and its Jinja template show it."""
    if f"{header.architecture}.pooling_type" in header.metadata:
        return ("embedding",)
    found = ["completion"]
    if template_supports_tools(template):
        found.append("tools")
    if template_supports_thinking(template):
        found.append("thinking")
    return tuple(found)
