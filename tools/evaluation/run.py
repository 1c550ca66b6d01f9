"""One engine evaluated against the full one."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from pop_engine.configs.errors import UsageError
from pop_engine.configs.manifest import Manifest
from pop_engine.tools.evaluation.builds import full_engine
from pop_engine.tools.evaluation.data import Document, EncodeOptions, EvalData, encode_examples, read_examples
from pop_engine.tools.evaluation.likelihood import group_size
from pop_engine.tools.evaluation.measure import Workload, document_scores, run_full, run_pop
from pop_engine.tools.evaluation.options import EvalOptions
from pop_engine.tools.evaluation.pair import check_pair
from pop_engine.tools.evaluation.progress import show_progress
from pop_engine.tools.evaluation.result import EvalResult, EvalSetting, describe_engine, is_within
from pop_engine.tools.evaluation.scores import losses_by_position, summarize
from pop_engine.tools.evaluation.text import EvalText
from pop_engine.tools.machine import describe_machine
from pop_engine.tools.worker_process import WorkerProcess


def evaluate(options: EvalOptions) -> EvalResult:
    """Load both engines, each in a process of its own that stands still while the other works, and compare them.

    Everything that a file can get wrong is found before the first engine is loaded.
    """
    assert options.against is not None, "checked with the options"
    engine = Path(options.subject)
    pop = Manifest.load(engine)
    require_weights(options.subject, pop)
    text, data = EvalText(engine, pop.tokenizer), read_examples(options.data, options.limit)
    documents = encode(options, data, text, pop)
    with full_engine(options.against, pop) as full_path, TemporaryDirectory(prefix="pop-eval-") as folder:
        full = Manifest.load(full_path)
        require_weights(str(full_path), full)
        check_pair(options.subject, pop, options.against, full)
        encode(options, data, text, full)
        workload = make_workload(documents, options, pop, full)
        with start_worker(full_path, options) as full_worker:
            full_run = run_full(full_worker, workload, Path(folder))
            with start_worker(engine, options) as pop_worker:
                pop_run = run_pop(pop_worker, full_worker, full_run, "POP")
            found = document_scores(full_run, pop_run, text)
    scores = summarize(found)
    return EvalResult(
        machine=describe_machine(),
        setting=make_setting(options, data),
        pop=describe_engine(options.subject, pop, pop_worker.peak_memory_bytes),
        full=describe_engine(options.against, full, full_worker.peak_memory_bytes),
        scores=scores,
        within_max_loss=is_within(scores.benefit, options.max_loss),
        positions=losses_by_position(full_run.scores, pop_run.scores, full_run.none_scores),
        documents=found,
    )


def encode(options: EvalOptions, data: EvalData, text: EvalText, engine: Manifest) -> tuple[Document, ...]:
    """The documents in tokens, which the engine must be able to hold."""
    limits = EncodeOptions(options.context_len, options.max_tokens, engine.limits.max_seq_len, options.chat)
    return tuple(encode_examples(data, text, limits))


def make_workload(documents: tuple[Document, ...], options: EvalOptions, *engines: Manifest) -> Workload:
    """The documents, in groups that every engine has slots for."""
    slots = min(engine.limits.max_batch_size for engine in engines)
    return Workload(documents, options.max_tokens, group_size(slots), engines[0].dims.vocab_size)


def make_setting(options: EvalOptions, data: EvalData) -> EvalSetting:
    """What stands beside the scores."""
    return EvalSetting(
        data=data.name,
        data_sha256=data.sha256,
        num_documents=len(data.examples),
        context_len=options.context_len,
        max_tokens=options.max_tokens,
        chat=options.chat,
        max_loss_percent=options.max_loss,
        threads=options.threads,
    )


def require_weights(name: str, manifest: Manifest) -> None:
    """Raise UsageError for graphs alone, or for a target that this machine has no session for."""
    if manifest.weights is None:
        raise UsageError(f"{name}: built without weights, so there is nothing to evaluate; build it with them")


@contextmanager
def start_worker(path: Path, options: EvalOptions) -> Iterator[WorkerProcess]:
    """A worker process that has loaded the engine and stands still."""
    show_progress(f"loading {path}")
    threads = [] if options.threads is None else ["--threads", str(options.threads)]
    command = [sys.executable, "-m", "pop_engine.tools.evaluation.worker", str(path), *threads]
    with WorkerProcess(command, str(path)) as worker:
        yield worker
