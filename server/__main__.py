"""Runs the command line as `python -m headrace.server`."""

from __future__ import annotations

import sys

from headrace.server.cli import main

sys.exit(main())
