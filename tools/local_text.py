"""Collect English prose into a .jsonl, for calibration and evaluation without a network.

    python -m pop_engine.tools.local_text -o documents.jsonl                  # from Debian packages, not installed
    python -m pop_engine.tools.local_text -o documents.jsonl --folder notes/  # from what lies here

By default the text comes from Debian packages of several kinds: novels, politics, a dictionary of slang, history,
handbooks and manuals. No kind has more than its share of documents, a long text is divided into several, and the
order is shuffled. Only paragraphs of running text are taken: no code, tables or lists.
"""

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from pop_engine.configs.errors import EngineError, UsageError, exit_with_message
from pop_engine.tools.text_files import read_text

DEFAULT_PACKAGES = (
    "anarchism",
    "debian-handbook",
    "debian-history",
    "git-doc",
    "jargon-text",
    "postgresql-doc-15",
    "r-cran-janeaustenr",
    "sqlite3-doc",
)
_MIN_PARAGRAPH = 150
_MIN_DOCUMENT = 3000
# A context of 1,024 tokens and what follows it are some 5,000 characters.
_MAX_DOCUMENT = 12_000
# Of the characters of running English, this share are letters, spaces and common punctuation.
_MIN_PROSE_SHARE = 0.96
_PROSE = re.compile(r"[A-Za-z ,.;:'\"!?()-]")
# Every second or third word of English is one of these; other languages have few of them.
_COMMON_WORDS = frozenset(
    "a an and are as be by for from in is it of on or that the this to was which with you".split()  # noqa: SIM905
)
_MIN_COMMON_SHARE = 0.2
_ENDS = (".", ":", ")", "!", "?", '"')
_ASCII_QUOTES = str.maketrans({"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u00a0": " "})


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    return exit_with_message("local_text", lambda: _run(_parser().parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="local_text", description="Collect English prose into a .jsonl.")
    add = parser.add_argument
    add("-o", "--out", required=True, type=Path, help="file to write")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--package", action="append", metavar="NAME", help="Debian packages (default: eight of them)")
    source.add_argument("--folder", action="append", type=Path, help="folders to look in")
    add("--per-source", type=int, default=40, metavar="N", help="documents of a package or folder (default: 40)")
    add("--seed", type=int, default=0, metavar="N", help="of the choice and the order")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    generator = random.Random(arguments.seed)
    chosen: dict[str, str] = {}
    for documents in _sources(arguments):
        generator.shuffle(documents)
        chosen |= dict(documents[: arguments.per_source])
    if not chosen:
        raise UsageError("no English prose was found; give --folder or --package")
    lines = [json.dumps({"origin": origin, "text": text}) for text, origin in chosen.items()]
    generator.shuffle(lines)
    arguments.out.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    print(f"{len(lines)} documents in {arguments.out}")
    return 0


def _sources(arguments: argparse.Namespace) -> Iterator[list[tuple[str, str]]]:
    """Each source's documents, as text and origin."""
    if arguments.folder:
        for folder in arguments.folder:
            yield list(documents_of(folder, str(folder)))
        return
    for package in arguments.package or DEFAULT_PACKAGES:
        with tempfile.TemporaryDirectory() as folder:
            name = _unpack(package, Path(folder))
            yield list(documents_of(Path(folder), name))


def documents_of(folder: Path, name: str) -> Iterator[tuple[str, str]]:
    """Documents of the files below a folder, in the order of their names, each with its origin."""
    begun: set[str] = set()
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()):
        for part, document in enumerate(divide(extract_prose(read_text(path)))):
            # Copies of one text, and translations that begin alike, count once.
            if document[:200] not in begun:
                begun.add(document[:200])
                yield document, f"{name}/{path.relative_to(folder)}#{part}"


def extract_prose(text: str) -> str:
    """The paragraphs of a text that are running English, joined by blank lines."""
    paragraphs = (" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text.translate(_ASCII_QUOTES)))
    return "\n\n".join(paragraph for paragraph in paragraphs if _is_prose(paragraph))


def divide(prose: str) -> list[str]:
    """Whole paragraphs up to a document's length, one document after another; what is too short is left out."""
    documents, length = [[""]], 0
    for paragraph in prose.split("\n\n"):
        if length + len(paragraph) > _MAX_DOCUMENT:
            documents.append([])
            length = 0
        documents[-1].append(paragraph)
        length += len(paragraph)
    joined = ("\n\n".join(filter(None, document)) for document in documents)
    return [document for document in joined if len(document) >= _MIN_DOCUMENT]


def _is_prose(paragraph: str) -> bool:
    if len(paragraph) < _MIN_PARAGRAPH or not paragraph.endswith(_ENDS):
        return False
    words = paragraph.lower().split()
    if sum(word in _COMMON_WORDS for word in words) < _MIN_COMMON_SHARE * len(words):
        return False
    return len(_PROSE.findall(paragraph)) >= _MIN_PROSE_SHARE * len(paragraph)


def _unpack(package: str, folder: Path) -> str:
    """Download a Debian package, unpack it and return its name with its version. Raises EngineError."""
    try:
        subprocess.run(["apt-get", "download", package], cwd=folder, check=True, capture_output=True)
        (archive,) = folder.glob("*.deb")
        subprocess.run(["dpkg-deb", "-x", archive.name, "."], cwd=folder, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise EngineError(f"--package {package}: cannot be downloaded with apt-get ({error}); give --folder") from error
    archive.unlink()
    return archive.stem.rpartition("_")[0]


if __name__ == "__main__":
    sys.exit(main())
