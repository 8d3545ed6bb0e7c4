"""What the README says about settings is what the program has."""

from __future__ import annotations

from pathlib import Path

from headrace.config.settings import markdown_table

README = Path(__file__).parents[2] / "README.md"


def test_readme_holds_the_table_of_settings() -> None:
    assert markdown_table() in README.read_text()
