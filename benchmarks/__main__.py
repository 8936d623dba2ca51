"""``python -m benchmarks``: run the cases, print the tables, write the figures."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from benchmarks import machine, reconcile, report, scaling, startup
from benchmarks.arena import Arena
from benchmarks.cases import CASES, Case
from benchmarks.measure import CaseResult, measure
from benchmarks.subscribers import Native, Options, Pgsub, Subscriber

_FORMATS = {"text": (False,), "binary": (True,), "both": (False, True)}


def main() -> int:
    """Run it.

    :return: exit status: 1 if a case failed.
    """
    parser = _parser()
    arguments = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGINT):  # so that servers and launcher end with us, also in the background
        signal.signal(number, signal.default_int_handler)
    facts = machine.facts()
    if arguments.plot:
        wanted = arguments.only or scaling.CASES
        if unknown := set(wanted) - set(scaling.CASES):
            parser.error(f"--plot: {', '.join(sorted(unknown))}: choose from {', '.join(scaling.CASES)}")
        options = Options(arguments.streaming, apply_workers=arguments.apply_workers)
        return scaling.main(facts, arguments.plot, options, wanted, quick=arguments.quick)
    if arguments.reconcile:
        return reconcile.main(facts, quick=arguments.quick)
    if arguments.start:
        return startup.main(facts, rounds=arguments.rounds)
    names = arguments.only or [case.name for case in CASES if case.default]
    cases = [case for case in CASES if case.name in names]
    options = Options(arguments.streaming, apply_workers=arguments.apply_workers)
    how = {"quick": arguments.quick, "rounds": arguments.rounds, "tls": arguments.tls}
    results: list[CaseResult] = []
    code = 0
    try:
        for result in run(cases, arguments.format, options, **how):
            results.append(result)
    except KeyboardInterrupt:
        print("Interrupted: these are the cases that had ended.")
        code = 128 + signal.SIGINT
    if arguments.quick:
        print("Small sizes: goals and ceilings are meant for the full ones.")
    report.show(facts, results)
    if arguments.json:
        report.write(arguments.json, report.document(facts, results))
    return code or int(any(result.failure for result in results))


def run(
    cases: Sequence[Case], formats: str, given: Options, *, quick: bool, rounds: int, tls: bool = False
) -> Iterator[CaseResult]:
    """Every case once a round and format; who is first changes from one to the next and from round to round."""
    with (
        Arena(tls=tls) as arena,
        closing(Native(arena)) as native,
        closing(Pgsub(arena, "one_jvm", one_jvm=True)) as one_jvm,
        closing(Pgsub(arena, "one_session", one_session=True)) as one_session,
        closing(Pgsub(arena)) as pgsub,
    ):
        every: dict[str, Subscriber] = {side.name: side for side in (native, one_jvm, one_session)}
        for number in range(rounds):
            for position, (case, options) in enumerate(_measurements(cases, formats, given)):
                print(f"{case.name} ({'binary' if options.binary else 'text'}) ...", file=sys.stderr, flush=True)
                sides: list[Subscriber] = [*(every[name] for name in (*case.beside, case.baseline)), pgsub]
                order = sides if (number + position) % 2 == 0 else sides[::-1]
                if case.master and not number:  # executors start and compile when they are given something first
                    measure(arena, case, case.quick, options, order)
                result = measure(arena, case, case.quick if quick else case.full, options, order)
                result.round = number
                if result.failure:
                    pgsub.restart()
                    one_jvm.restart()
                    one_session.restart()
                yield result


def _measurements(cases: Sequence[Case], formats: str, given: Options) -> Iterator[tuple[Case, Options]]:
    for case in cases:
        wanted = (False,) if formats == "both" and not case.both_formats else _FORMATS[formats]
        for binary in wanted:
            yield case, replace(given, binary=binary)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure pgsub and the server's own subscriber side by side, between the same two servers.",
    )
    names = [case.name for case in CASES]
    extra = [case.name for case in CASES if not case.default]
    parser.add_argument("--quick", action="store_true", help="small sizes: a few minutes in all")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        choices=names,
        help=f"of {', '.join(names)}; without it all but {', '.join(extra)}",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures, with the facts of the machine")
    parser.add_argument("--rounds", type=int, default=1, metavar="N", help="repeat, in alternating order")
    parser.add_argument(
        "--format",
        choices=tuple(_FORMATS),
        default="both",
        help="of values, on both sides; both: text everywhere, and binary too for backlogs (default)",
    )
    parser.add_argument(
        "--tls", action="store_true", help="encrypt all connections; PGSUB_PG_BIN names a server built with TLS"
    )
    parser.add_argument(
        "--apply-workers", metavar="N|auto", help="of pgsub, in cases that do not say how many; its default without it"
    )
    parser.add_argument("--streaming", choices=("off", "on", "parallel"), default="parallel", help="on both sides")
    parser.add_argument(
        "--reconcile",
        action="store_true",
        help="instead of the cases: verify and adopt beside the copy of the same rows, and what a copy that was lost"
        " sends again",
    )
    parser.add_argument(
        "--start", action="store_true", help="instead of the cases: the start of pgsub, and which step takes how long"
    )
    parser.add_argument(
        "--plot",
        type=Path,
        nargs="?",
        const=Path(__file__).parent,
        metavar="FOLDER",
        help=f"instead of the cases: cost per change from ten thousand to ten million changes (--only of"
        f" {', '.join(scaling.CASES)}), as cost-per-change.svg and .json (default folder: benchmarks)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
