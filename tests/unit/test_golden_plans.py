"""Plans and forecasts of published models are those of the checked-in table."""

from __future__ import annotations

from pathlib import Path

import golden_plans

GOLDEN = Path(__file__).parent / "golden" / "plans.md"


def test_plans_and_forecasts_of_published_models_are_as_checked() -> None:
    # What to do after a change that was meant stands in golden_plans.py.
    assert list(golden_plans.rows()) == GOLDEN.read_text().splitlines()
