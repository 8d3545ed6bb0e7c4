"""Sizes and reasons are read from the lines that llama.cpp's log has, and from no others."""

from __future__ import annotations

import pytest

from headrace.engine.llama_log import ContextBytes, LlamaLog

KV = (
    "llama_kv_cache: size =   90.00 MiB (  4096 cells,  30 layers, 13/1 seqs),"
    " K (f16):   45.00 MiB, V (f16):   45.00 MiB"
)
RECURRENT = (
    "llama_memory_recurrent: size =    1.50 MiB (     6 cells,  24 layers,  6 seqs  0 rs_seq),"
    " R (f32):    0.50 MiB, S (f32):    1.00 MiB, P (f32):    0.00 MiB"
)
COMPRESSED = (
    "llama_dsv4_comp_state: csa ratio = 4, state = 8 x 1, streams = 1, rs_seq = 0, layers = 3,"
    " size =    0.25 MiB"
)
COMPUTE = "sched_reserve:        CPU compute buffer size =    17.79 MiB"
OUTPUT = "llama_context:        CPU  output buffer size =     2.44 MiB"
OTHERS = (
    "llama_kv_cache:        CPU KV buffer size =    90.00 MiB",
    "load_tensors:   CPU_Mapped model buffer size =    94.31 MiB",
    "print_info: file size   = 94.31 MiB (5.88 BPW)",
    "~llama_context:        CPU compute buffer size is  17.7901 MiB, matches expectation of"
    "  17.7901 MiB",
)
MIB = 2**20
ROUNDING = round(0.005 * MIB)


def heard(*lines: str) -> LlamaLog:
    log = LlamaLog()
    for line in lines:
        log.hear(2, line)
    return log


def test_sizes_are_the_sums_of_their_lines_rounded_up() -> None:
    gpu = "sched_reserve:      CUDA0 compute buffer size =   100.00 MiB"
    log = heard(*OTHERS, OUTPUT, KV, RECURRENT, COMPRESSED, COMPUTE, gpu)
    found = log.context_bytes()
    assert found is not None
    assert found.memory_bytes == pytest.approx(91.75 * MIB + 3 * ROUNDING, abs=3)
    assert found.compute_bytes == pytest.approx(117.79 * MIB + 2 * ROUNDING, abs=2)
    assert found.output_bytes == pytest.approx(2.44 * MIB + ROUNDING, abs=1)
    assert found.n_bytes == found.memory_bytes + found.compute_bytes + found.output_bytes


@pytest.mark.parametrize("missing", [KV, COMPUTE, OUTPUT])
def test_sizes_are_not_known_unless_all_were_said(missing: str) -> None:
    lines = [line for line in (*OTHERS, KV, COMPUTE, OUTPUT) if line != missing]
    assert heard(*lines).context_bytes() is None


@pytest.mark.parametrize("line", [KV, COMPUTE, OUTPUT])
def test_other_words_are_not_taken_for_a_size(line: str) -> None:
    lines = [said.replace("MiB", "MB") if said == line else said for said in (KV, COMPUTE, OUTPUT)]
    assert heard(*lines).context_bytes() is None


def test_what_was_said_of_the_call_before_is_forgotten() -> None:
    log = heard(KV, COMPUTE, OUTPUT)
    log.hear(4, "error loading model: no such thing")
    log.begin()
    assert log.context_bytes() is None
    assert log.reason("unknown") == "unknown"
    for line in (KV, COMPUTE, OUTPUT):
        log.hear(2, line)
    assert isinstance(log.context_bytes(), ContextBytes)


def test_reason_is_the_first_error_without_its_function_and_is_told_once() -> None:
    log = heard("llama_model_load: all is well")
    log.hear(4, "llama_model_load: error loading model: missing tensor 'output_norm.weight'")
    log.hear(4, "llama_model_load_from_file_impl: failed to load model")
    assert log.reason("unknown") == "error loading model: missing tensor 'output_norm.weight'"
    assert log.reason("unknown") == "unknown"
