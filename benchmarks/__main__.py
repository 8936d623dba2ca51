"""``python -m benchmarks``: run the cases, print the table, write the figures."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import FrameType

from benchmarks import machine, report
from benchmarks.arena import Arena
from benchmarks.cases import CASES, Case
from benchmarks.measure import CaseResult, measure
from benchmarks.subscribers import Native, Options, Pgsub, Subscriber


def main() -> int:
    """Run it.

    :return: exit status: 1 if a case failed.
    """
    arguments = _parser().parse_args()
    signal.signal(signal.SIGTERM, _terminated)  # so that servers and launcher end with us
    options = Options(arguments.streaming, arguments.binary)
    cases = [case for case in CASES if not arguments.only or case.name in arguments.only]
    facts = machine.facts()
    results = run(cases, options, quick=arguments.quick, rounds=arguments.rounds)
    report.show(facts, results)
    if arguments.json:
        report.write(arguments.json, report.document(facts, options, results))
    return int(any(result.failure for result in results))


def run(cases: Sequence[Case], options: Options, *, quick: bool, rounds: int) -> list[CaseResult]:
    """Every case once a round; who is first changes from case to case and from round to round."""
    results = []
    with Arena() as arena, closing(Native(arena, options)) as native, closing(Pgsub(arena, options)) as pgsub:
        sides: list[Subscriber] = [native, pgsub]
        for number in range(rounds):
            for position, case in enumerate(cases):
                print(f"{case.name} ...", file=sys.stderr, flush=True)
                order = sides if (number + position) % 2 == 0 else sides[::-1]
                result = measure(arena, case, case.quick if quick else case.full, order)
                if result.failure:
                    pgsub.restart()
                results.append(result)
    return results


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure pgsub and the server's own subscriber side by side, between the same two servers.",
    )
    names = [case.name for case in CASES]
    parser.add_argument("--quick", action="store_true", help="small sizes: a few minutes in all")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=names, help=f"of {', '.join(names)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures, with the facts of the machine")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="repeat, in alternating order")
    parser.add_argument("--binary", action="store_true", help="values in binary format, on both sides")
    parser.add_argument("--streaming", choices=("off", "on", "parallel"), default="parallel", help="on both sides")
    return parser


def _terminated(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
