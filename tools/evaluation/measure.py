"""An evaluation's work: the full engine answers and scores, POP is compared with it, and both are timed in turns."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pop_engine.configs.errors import UsageError
from pop_engine.tools.evaluation.data import Document
from pop_engine.tools.evaluation.message import (
    AnswerScore,
    Case,
    GenerateReply,
    GenerateRequest,
    GreedyAnswer,
    ScoreReply,
    ScoreRequest,
    TtftReply,
    TtftRequest,
)
from pop_engine.tools.evaluation.progress import with_progress
from pop_engine.tools.evaluation.scores import DocumentScore, mean_nll
from pop_engine.tools.evaluation.text import EvalText
from pop_engine.tools.table import format_bytes
from pop_engine.tools.worker_process import AnyReply

_LOGIT_BYTES = 4


class Worker(Protocol):
    """One engine in a process of its own. WorkerProcess is the real one."""

    peak_memory_bytes: int

    def ask_for(self, request: object, reply_type: type[AnyReply]) -> AnyReply:
        """Run a request."""
        ...


@dataclass(frozen=True)
class Workload:
    """What both engines run: the documents, how long greedy answers get, and how many cases go together."""

    documents: tuple[Document, ...]
    max_tokens: int
    group: int
    vocab_size: int


@dataclass(frozen=True)
class FullRun:
    """What the full model says and thinks of it. `logits` are files, one for each group of cases."""

    workload: Workload
    cases: tuple[Case, ...]
    answers: tuple[GreedyAnswer, ...]
    scores: tuple[AnswerScore, ...]
    none_scores: tuple[AnswerScore, ...]
    logits: tuple[Path, ...]


@dataclass(frozen=True)
class PopRun:
    """The same answers scored by POP, its own greedy answers, and milliseconds of (full, POP) for each prompt."""

    answers: tuple[GreedyAnswer, ...]
    scores: tuple[AnswerScore, ...]
    ttft_ms: tuple[tuple[float, float], ...]


def run_full(worker: Worker, workload: Workload, folder: Path) -> FullRun:
    """Answer, then score the answers with and without their prompts; logits go to `folder`."""
    prompts = [document.prompt for document in workload.documents]
    answers = _generate(worker, prompts, workload, "full engine answers")
    cases = [
        Case(document.prompt, document.answer or answer.token_ids)
        for document, answer in zip(workload.documents, answers, strict=True)
    ]
    _check_disk(sum(len(case.answer) for case in cases) * workload.vocab_size * _LOGIT_BYTES, folder)
    groups = _groups(cases, workload.group)
    paths = [folder / f"logits{index}.npy" for index in range(len(groups))]
    requests = [
        ScoreRequest(group, write_logits=str(path)) for group, path in zip(groups, paths, strict=True)
    ]  # fmt: skip
    scores = _score(worker, requests, "full engine scores")
    without = [
        Case(document.without_context, case.answer)
        for document, case in zip(workload.documents, cases, strict=True)
    ]  # fmt: skip
    none_requests = [ScoreRequest(group) for group in _groups(without, workload.group)]
    none_scores = _score(worker, none_requests, "full engine scores without context")
    return FullRun(workload, tuple(cases), answers, scores, none_scores, tuple(paths))


def run_pop(worker: Worker, full_worker: Worker, full: FullRun, title: str) -> PopRun:
    """Answer, score against the full run's logits, and time both engines' first tokens in turns."""
    workload = full.workload
    prompts = [case.prompt for case in full.cases]
    answers = _generate(worker, prompts, workload, f"{title} answers")
    requests = [
        ScoreRequest(group, read_logits=str(path))
        for group, path in zip(_groups(full.cases, workload.group), full.logits, strict=True)
    ]
    scores = _score(worker, requests, f"{title} scores")
    return PopRun(answers, scores, time_in_turns(full_worker, worker, prompts, f"{title} first tokens"))


def time_in_turns(
    full: Worker, pop: Worker, prompts: Sequence[tuple[int, ...]], title: str
) -> tuple[tuple[float, float], ...]:
    """Milliseconds to the first token of (full, POP) for every prompt. A round on the first one warms up.

    Each goes first for every other prompt, so that a drift of the machine's speed favours neither.
    """
    workers = (full, pop)
    times = []
    for round_idx, prompt in enumerate(with_progress([prompts[0], *prompts], title)):
        found = [0.0, 0.0]
        for side in (0, 1) if round_idx % 2 else (1, 0):
            found[side] = workers[side].ask_for(TtftRequest(prompt), TtftReply).ttft_ms
        times.append((found[0], found[1]))
    return tuple(times[1:])


def document_scores(full: FullRun, pop: PopRun, text: EvalText) -> tuple[DocumentScore, ...]:
    """Everything about each document."""
    return tuple(_document_score(full, pop, index, text) for index in range(len(full.cases)))


def _document_score(full: FullRun, pop: PopRun, index: int, text: EvalText) -> DocumentScore:
    case, document, score = full.cases[index], full.workload.documents[index], pop.scores[index]
    said, said_by_pop = full.answers[index], pop.answers[index]
    return DocumentScore(
        line=document.line,
        num_prompt_tokens=len(case.prompt),
        num_answer_tokens=len(case.answer),
        nll_full=mean_nll(full.scores[index]),
        nll_pop=mean_nll(score),
        nll_none=mean_nll(full.none_scores[index]),
        kl=sum(score.kl) / len(score.kl),
        top1_agreement=sum(score.same_top1) / len(score.same_top1),
        first_token_agrees=score.same_top1[0],
        greedy_matches=said.token_ids == said_by_pop.token_ids,
        num_equal_tokens=num_equal_tokens(said.token_ids, said_by_pop.token_ids),
        ttft_full_ms=pop.ttft_ms[index][0],
        ttft_pop_ms=pop.ttft_ms[index][1],
        prompt=document.prompt_text,
        reference=text.decode(list(case.answer)),
        answer_full=said.text,
        answer_pop=said_by_pop.text,
    )


def num_equal_tokens(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two answers begin with that are the same."""
    pairs = zip(first, second, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _generate(
    worker: Worker, prompts: Sequence[tuple[int, ...]], workload: Workload, title: str
) -> tuple[GreedyAnswer, ...]:
    answers: list[GreedyAnswer] = []
    for start in with_progress(range(0, len(prompts), workload.group), title):
        group = tuple(prompts[start : start + workload.group])
        answers += worker.ask_for(GenerateRequest(group, workload.max_tokens), GenerateReply).answers
    return tuple(answers)


def _score(worker: Worker, requests: Sequence[ScoreRequest], title: str) -> tuple[AnswerScore, ...]:
    scores: list[AnswerScore] = []
    for request in with_progress(requests, title):
        scores += worker.ask_for(request, ScoreReply).scores
    return tuple(scores)


def _groups(cases: Sequence[Case], size: int) -> list[tuple[Case, ...]]:
    return [tuple(cases[start : start + size]) for start in range(0, len(cases), size)]


def _check_disk(num_bytes: int, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise UsageError(
            f"{folder}: {format_bytes(free)} free, but the logits of all answers take {format_bytes(num_bytes)}; "
            "give a smaller --limit or --max-tokens, or set TMPDIR to a larger disk"
        )
