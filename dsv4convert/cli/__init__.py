"""The command line. Only this package prints or exits.

Data goes to stdout, everything else to stderr. Exit statuses are those of `errors.Exit`; every command
documents them in its help.
"""

from __future__ import annotations

from dsv4convert.cli.bench import bench_serve
from dsv4convert.cli.commands import main
from dsv4convert.cli.probe import probe
from dsv4convert.cli.report import report
from dsv4convert.cli.serve import keygen, preflight, serve
from dsv4convert.cli.smoke import smoke
from dsv4convert.cli.synth import synth

for _command in (synth, probe, report, preflight, serve, keygen, smoke, bench_serve):
    main.add_command(_command)

__all__ = ["main"]
