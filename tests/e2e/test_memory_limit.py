"""A server in a cgroup: whose limit is lowered while it answers, or that is hardly large enough."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from big_models import MOE, build_big
from cgroup import drop_cache
from serving import Server, serve, stream, text_of

from headrace.engine.system_files import cgroup_levels, read_keyed
from headrace.server.commands.memory_limit import memory_limit

pytestmark = pytest.mark.e2e

MIB = 1 << 20
# The cache of experts is most of it, as with large models.
LIMIT_MIB, BUDGET_MIB = 1700, 1300
ASK = {
    "prompt": "The tide comes in twice a day, and",
    "options": {"temperature": 0, "num_predict": 250, "num_ctx": 512},
}


@pytest.fixture(scope="module")
def moe_path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A MoE of 1.4 GB of experts; its text makes no sense."""
    path = build_big(replace(MOE, n_layer=4), tmp_path_factory.mktemp("moe"))
    yield path
    path.unlink()


def lower(group: Path, seconds: float = 30) -> None:
    """Take a quarter of what a cgroup uses from it: again and again, until the kernel can."""
    is_v2, _ = cgroup_levels(Path("/"), "memory")
    limit = group / ("memory.high" if is_v2 else "memory.limit_in_bytes")
    usage = group / ("memory.current" if is_v2 else "memory.usage_in_bytes")
    n_bytes = int(usage.read_text()) * 3 // 4
    end = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):
            limit.write_text(str(n_bytes))
            return
        assert time.monotonic() < end, "the limit still does not fit"
        time.sleep(0.2)


@contextlib.contextmanager
def limited_server(
    path: Path, log: Path, limit_mib: int = LIMIT_MIB, budget_mib: int = BUDGET_MIB
) -> Iterator[tuple[Server, Path]]:
    try:
        limit = contextlib.ExitStack()
        group = limit.enter_context(memory_limit(limit_mib * MIB))
    except OSError:
        pytest.skip("no memory cgroup can be made here")
    with limit:
        launcher = ("sh", "-c", 'echo $$ > "$0"; exec "$@"', str(group / "cgroup.procs"))
        enter_and_serve = (*launcher, *psutil.Process().cmdline()[:1], "-m", "headrace.server")
        flags = ("--memory", f"{budget_mib}MiB", "--context", "512", "--parallel", "1")
        with serve(path, log, *flags, launcher=enter_and_serve) as server:
            yield server, group


def test_a_limit_that_is_lowered_while_text_is_generated_changes_no_text(
    moe_path: Path, tmp_path: Path
) -> None:
    with limited_server(moe_path, tmp_path / "log") as (server, group):
        body = {**ASK, "model": server.names()[0]}
        undisturbed = stream(server.url, "/api/generate", body)
        lowering = threading.Thread(target=lower, args=(group,))
        engines = [engine.pid for engine in server.engines()]
        lowering.start()
        disturbed = stream(server.url, "/api/generate", body)
        lowering.join()
        assert text_of(disturbed) == text_of(undisturbed)
        assert disturbed[-1].data["done_reason"] == "length"
        again = stream(server.url, "/api/generate", body)
        time.sleep(4)  # what was done is said when it is over
        assert text_of(again) == text_of(undisturbed)
        assert [engine.pid for engine in server.engines()] == engines
        assert server.log().count("memory is short") == 1


def limit_hits(group: Path) -> int:
    """Return how often a cgroup had to give pages up before it got others."""
    is_v2, _ = cgroup_levels(Path("/"), "memory")
    if not is_v2:
        return int((group / "memory.failcnt").read_text())
    return read_keyed(group / "memory.events", "max") or 0


def test_a_model_that_only_just_fits_is_loaded_without_a_hit_of_the_limit(
    moe_path: Path, tmp_path: Path
) -> None:
    file_mib = moe_path.stat().st_size // MIB
    drop_cache(moe_path)  # pages that we have written would count for us
    with limited_server(moe_path, tmp_path / "log", file_mib + 400, file_mib + 200) as both:
        server, group = both
        answer = stream(server.url, "/api/generate", {**ASK, "model": server.names()[0]})
        assert answer[-1].data["done_reason"] == "length"
        assert "full-resident" in server.log()
        assert limit_hits(group) == 0
