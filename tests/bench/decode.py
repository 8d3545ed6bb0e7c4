"""Decode of the engine alone against a bare llama_decode loop, one and eight sequences.

Same process, same weights, same threads, runs interleaved. Timed: decode steps only; prompts and
loading are outside. The ratio wanted is 0.95.
"""

from __future__ import annotations

from bare_loop import BareLoop
from reporting import report, smollm2

from headrace.engine import hardware, llama
from headrace.engine.engine import Engine
from headrace.engine.messages import Done, Event, Generate, Load, SamplingParams
from headrace.engine.plan import ContextPlan

N_TOKENS = 128
N_RUNS = 7
PROMPT = "<|im_start|>user\nTell me about the sea.<|im_end|>\n<|im_start|>assistant\n"


def main() -> None:
    path = smollm2()
    n_threads = hardware.this_machine().default_threads
    llama.start_backend()
    model = llama.Model(path)
    tokens = model.vocab.tokenize(PROMPT, parses_control=True)
    load = Load(
        path=str(path),
        name="bench",
        n_ctx=1024,
        n_slots=8,
        n_batch=512,
        n_threads=n_threads,
        n_threads_batch=n_threads,
    )
    events: list[Event] = []
    engine = Engine(model, load, lambda n: ContextPlan(n, n * 8, 0), events.extend)
    for n_sequences in (1, 8):
        bare = BareLoop(model.pointer, n_sequences, n_ctx=1024, n_threads=n_threads)
        speeds: dict[str, list[float]] = {"engine": [], "bare": []}
        for _ in range(N_RUNS):
            bare.clear()
            _, seconds = bare.run([tokens] * n_sequences, N_TOKENS)
            speeds["bare"].append(n_sequences * (N_TOKENS - 1) / seconds)
            speeds["engine"].append(run_engine(engine, events, tokens, n_sequences))
        bare.close()
        ratios = [e / b for e, b in zip(speeds["engine"], speeds["bare"], strict=True)]
        for name, values in speeds.items():
            report(f"decode, {n_sequences} sequences, {name}", values, "tokens/s")
        report(f"decode, {n_sequences} sequences, engine / bare", ratios, "ratio", wanted=0.95)


def run_engine(engine: Engine, events: list[Event], tokens: list[int], n_sequences: int) -> float:
    """Return the decode tokens/s of n_sequences equal requests."""
    events.clear()
    for uid in range(n_sequences):
        request = Generate(
            uid=uid, prompt=(), sampling=SamplingParams(temperature=0), n_predict=N_TOKENS
        )
        engine.submit(request, list(tokens))
    while sum(isinstance(event, Done) for event in events) < n_sequences:
        engine.turn()
    done = [event.timings for event in events if isinstance(event, Done)]
    n_decoded = sum(timings.n_generated - 1 for timings in done)
    return n_decoded / max(timings.decode_ns for timings in done) * 1e9


if __name__ == "__main__":
    main()
