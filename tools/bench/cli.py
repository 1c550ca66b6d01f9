"""pop-bench: first token, later tokens, throughput and memory of an engine, beside the full engine and others.

Everyone takes turns in one run, each in a process of its own that stands still while another works.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace

from pop_engine.configs.errors import exit_with_message
from pop_engine.configs.manifest import Manifest
from pop_engine.tools.bench.entrants import open_participants
from pop_engine.tools.bench.measure import measure
from pop_engine.tools.bench.options import BenchOptions, parse_options
from pop_engine.tools.bench.pair import check_batch_sizes, check_pair, fitting_input_lens
from pop_engine.tools.bench.plot import ttft_svg
from pop_engine.tools.bench.rates import measure_rates
from pop_engine.tools.bench.report import format_run
from pop_engine.tools.bench.result import BenchResult


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    return exit_with_message("pop-bench", lambda: bench(parse_options(argv)))


def bench(options: BenchOptions) -> int:
    """Load everyone, measure, print, and write the files."""
    pop = Manifest.load(options.engine)
    full = None if options.against is None else Manifest.load(options.against)
    check_batch_sizes(options, options.engine, pop)
    if options.against is not None and full is not None:
        check_pair(options.engine, pop, options.against, full)
        check_batch_sizes(options, options.against, full)
    input_lens = fitting_input_lens(options, pop)
    earlier = BenchResult(())
    if options.append and options.json_file is not None and options.json_file.exists():
        earlier = BenchResult.load(options.json_file)
    if options.measure_rates:
        options = replace(options, rates=measure_rates(options.threads))
    with open_participants(options, pop, full) as participants:
        run = measure(options, pop, input_lens, participants)
    print(format_run(run), flush=True)
    if options.json_file is not None:
        BenchResult((*earlier.runs, run)).save(options.json_file)
    if options.plot is not None:
        options.plot.write_text(ttft_svg(run), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
