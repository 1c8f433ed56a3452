"""The command ``shoal``: `command.py` reads the command line, everything else serves one of its words.

``shoal bench`` goes one way round: `target.py` (what to step) → `configuration.py` (which ways to step it) →
`measure.py`, with `loops.py` for the stepping itself (numbers) → `report.py`, `document.py` and `plot.py` (a table, a
JSON document, a chart). The command line uses the public classes only. No module here loads torch or Gymnasium when it
is imported: ``shoal --help`` answers at once.
"""

from shoal.cli.command import main

__all__ = ["main"]
