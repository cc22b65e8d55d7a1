"""The model of letters served by a process of its own: `letters_process.py GRACE_SECONDS [held | stuck | broken]`.

held: the answers wait for ever; stuck: loading does; broken: loading fails.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from support.models.scripted_model import Letters, ScriptedGenerator
from trainshed.cli.console import PlainReporter, print_error
from trainshed.errors import InputError, TrainshedError
from trainshed.reporting import Reporter
from trainshed.serve.http.server import ServerSettings, serve_http
from trainshed.serve.http.server_state import ServedModel


def main(grace: str, how: str = "") -> int:
    def load(reporter: Reporter) -> ServedModel:
        generator = ScriptedGenerator()
        with reporter.task("reading weights", total=10, unit="B") as task:
            task.advance(4)
            while how == "stuck":
                time.sleep(0.01)
        if how == "broken":
            raise InputError("these are not weights", hint="write the folder of a checkpoint")
        if how == "held":
            generator.hold.clear()
        return ServedModel("letters", generator, Letters())

    try:
        return serve_http(load, ServerSettings(port=0, grace_seconds=float(grace)), PlainReporter())
    except TrainshedError as error:
        print_error(error)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
