"""`pop-eval`: what POP does to the answers on a user's own prompts, and how much sooner they begin."""

import sys
from collections.abc import Sequence

from pop_engine.configs.errors import exit_with_message
from pop_engine.configs.whole_file import write_json, write_whole
from pop_engine.tools.evaluation.options import EvalOptions, parse_options


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Exit code 1 where --max-loss is given and not kept."""
    return exit_with_message("pop-eval", lambda: _run(parse_options(argv)))


def _run(options: EvalOptions) -> int:
    # The tokenizer and the report's library take a while to import: not for --help.
    if options.ablations is not None:
        return _run_ablations(options)
    if options.sweep is not None:
        return _run_sweep(options)
    from pop_engine.tools.evaluation.report import result_page
    from pop_engine.tools.evaluation.run import evaluate
    from pop_engine.tools.evaluation.table import format_result

    result = evaluate(options)
    _write_files(options, result, result_page(result))
    print(format_result(result))
    return 1 if result.within_max_loss is False else 0


def _run_sweep(options: EvalOptions) -> int:
    from pop_engine.tools.evaluation.report import sweep_page
    from pop_engine.tools.evaluation.sweep import sweep
    from pop_engine.tools.evaluation.table import format_sweep

    swept = sweep(options)
    _write_files(options, swept, sweep_page(swept))
    print(format_sweep(swept))
    return 1 if swept.setting.max_loss_percent is not None and swept.longest is None else 0


def _run_ablations(options: EvalOptions) -> int:
    from pop_engine.tools.ablations.report import ablation_page
    from pop_engine.tools.ablations.run import run_ablations
    from pop_engine.tools.ablations.table import format_ablations

    result = run_ablations(options)
    _write_files(options, result, ablation_page(result))
    print(format_ablations(result))
    return 0


def _write_files(options: EvalOptions, result: object, page: str) -> None:
    if options.json_file is not None:
        write_json(options.json_file, result)
    if options.html_file is not None:
        write_whole(options.html_file, page.encode())


if __name__ == "__main__":
    sys.exit(main())
