"""What the tensors of a model are for: which must stay in memory, and which can be streamed.

In: a model's header. Out: a TensorTable. Knows the names that llama.cpp gives tensors and the order
in which its graphs use them, and nothing of memory sizes or plans.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from headrace.engine.gguf import Array, Header, Tensor

# llama-arch.cpp. Shared experts (_shexp) and all biases and scales belong to the trunk.
_FFN = re.compile(r"blk\.([0-9]+)\.ffn_(gate_up|gate|up|down)(_exps)?\.weight")
BLOCK = re.compile(r"blk\.([0-9]+)\.")
_BESIDE_EXPERTS = re.compile(
    r"blk\.[0-9]+\.(ffn_gate_inp|exp_probs_b|ffn_(gate_up|gate|up|down)_exps)(\.|$)"
)
# In the order in which a graph uses them: llama-graph.cpp, build_ffn and build_moe_ffn.
_ORDER = {"gate_up": 0, "gate": 0, "up": 1, "down": 2}


@dataclass(frozen=True, slots=True)
class FfnTensor:
    """A weight of a feed-forward block that is used by one matrix product."""

    tensor: Tensor
    block: int
    kind: str


@dataclass(frozen=True, slots=True)
class ExpertBlock:
    """The tensors of one block's routed experts, in the order of use."""

    block: int
    n_experts: int
    parts: tuple[Tensor, ...]

    @property
    def shape(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Type and shape of each part; blocks of the same shape can share records."""
        return tuple((part.type_id, part.shape) for part in self.parts)

    @property
    def slice_bytes(self) -> tuple[int, ...]:
        """Bytes of one expert in each part."""
        return tuple(part.n_bytes // self.n_experts for part in self.parts)


@dataclass(frozen=True, slots=True)
class TensorTable:
    """The tensors of a model by role."""

    trunk: tuple[Tensor, ...]
    """What every token uses, but for dense: embeddings, attention, norms, routers, biases."""
    dense: tuple[FfnTensor, ...]
    """The weights of dense feed-forward blocks, in the order of use."""
    experts: tuple[ExpertBlock, ...]
    n_used: int
    """Experts that one token uses in a block; 0 without experts."""
    n_blocks: int

    @property
    def pools(self) -> tuple[tuple[ExpertBlock, ...], ...]:
        """The blocks with experts by shape: those of one pool can share records."""
        pools: dict[object, list[ExpertBlock]] = {}
        for block in self.experts:
            pools.setdefault(block.shape, []).append(block)
        return tuple(tuple(pool) for pool in pools.values())

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them."""
        parts = (part for block in self.experts for part in block.parts)
        return (*self.trunk, *(item.tensor for item in self.dense), *parts)

    @property
    def trunk_bytes(self) -> int:
        return sum(tensor.n_bytes for tensor in self.trunk)

    @property
    def dense_bytes(self) -> int:
        return sum(item.tensor.n_bytes for item in self.dense)

    @property
    def expert_bytes(self) -> int:
        return sum(part.n_bytes for block in self.experts for part in block.parts)


def read_tensors(header: Header) -> TensorTable:
    """Return the roles of header's tensors."""
    trunk: list[Tensor] = []
    dense: list[FfnTensor] = []
    experts: dict[int, list[tuple[int, Tensor]]] = {}
    for tensor in header.tensors:
        match = _FFN.fullmatch(tensor.name)
        if match is None:
            trunk.append(tensor)
            continue
        block, kind, is_experts = int(match[1]), match[2], match[3] is not None
        if not is_experts and len(tensor.shape) == 2:
            dense.append(FfnTensor(tensor, block, kind))
        elif is_experts and len(tensor.shape) == 3:
            experts.setdefault(block, []).append((_ORDER[kind], tensor))
        else:
            trunk.append(tensor)
    dense.sort(key=lambda item: (item.block, _ORDER[item.kind]))
    blocks = tuple(
        ExpertBlock(block, parts[0][1].shape[2], tuple(tensor for _, tensor in sorted(
            parts, key=lambda part: part[0]
        )))
        for block, parts in sorted(experts.items())
    )  # fmt: skip
    # Each has a norm in the trunk, at least.
    n_blocks = len({match[1] for tensor in trunk if (match := BLOCK.match(tensor.name))})
    n_used = _n_used(header) if blocks else 0
    return TensorTable(tuple(trunk), tuple(dense), blocks, n_used, n_blocks)


def name_patterns(tensors: Iterable[Tensor]) -> tuple[str, ...]:
    """Return regular expressions for the names of tensors of blocks.

    One for each kind of tensor: llama.cpp tries all on each name.
    """
    blocks: dict[str, list[str]] = {}
    for tensor in tensors:
        _, block, kind = tensor.name.split(".", 2)
        blocks.setdefault(kind, []).append(block)
    return tuple(
        rf"^blk\.({'|'.join(numbers)})\.{re.escape(kind)}$" for kind, numbers in blocks.items()
    )


def is_beside_experts(tensor: Tensor) -> bool:
    """Tell whether a tensor of the trunk is a router's or a bias of routed experts."""
    return _BESIDE_EXPERTS.match(tensor.name) is not None


def _n_used(header: Header) -> int:
    """Return the experts that a token uses, the most of all blocks."""
    value = header.metadata.get(f"{header.architecture}.expert_used_count")
    if isinstance(value, Array):
        return max((int(v) for v in value.values()), default=1)
    return value if isinstance(value, int) else 1
