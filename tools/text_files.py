"""Text out of files of several formats: plain, HTML, compressed, and R's data."""

import gzip
import re
import zlib
from html.parser import HTMLParser
from pathlib import Path

_PLAIN = frozenset({".txt", ".md", ".rst"})
_HTML = frozenset({".html", ".htm"})
_BLOCKS = frozenset({"p", "div", "li", "td", "th", "dt", "dd", "blockquote", "br", "pre", "h1", "h2", "h3", "h4", "h5"})
_SILENT = frozenset({"script", "style", "head", "pre", "table"})
# A string of R's serialisation in XDR: a CHARSXP's flags, then its length (R Internals, 1.8).
_R_STRING = re.compile(rb"\x00[\x04\x02]\x00\x09(....)", re.DOTALL)


def read_text(path: Path) -> str:
    """Text of a file, paragraphs divided by blank lines; empty where its format is none of these."""
    name = path.name.removesuffix(".gz")
    suffix = Path(name).suffix
    if suffix == ".rdb":
        return _r_text(path.read_bytes())
    if suffix not in _PLAIN | _HTML:
        return ""
    content = path.read_bytes()
    if name != path.name:
        content = gzip.decompress(content)
    text = content.decode("utf-8", errors="replace")
    return _html_text(text) if suffix in _HTML else text


def _html_text(page: str) -> str:
    parser = _Paragraphs()
    parser.feed(page)
    parser.close()
    return "".join(parser.pieces)


class _Paragraphs(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []
        self._silent = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._silent += tag in _SILENT
        self._divide(tag)

    def handle_endtag(self, tag: str) -> None:
        self._silent = max(self._silent - (tag in _SILENT), 0)
        self._divide(tag)

    def handle_data(self, data: str) -> None:
        if not self._silent:
            # Lines of a page's source do not divide its paragraphs.
            self.pieces.append(" ".join(data.split("\n")))

    def _divide(self, tag: str) -> None:
        if tag in _BLOCKS:
            self.pieces.append("\n\n")


def _r_text(content: bytes) -> str:
    """Strings of an R database, one a line: for each object its length, and then its zlib stream."""
    texts: list[str] = []
    while len(content) > 4:
        stream = zlib.decompressobj()
        unpacked = stream.decompress(content[4:])
        content = stream.unused_data
        for found in _R_STRING.finditer(unpacked):
            size = int.from_bytes(found[1], "big", signed=True)
            texts.append(unpacked[found.end() : found.end() + max(size, 0)].decode("utf-8", errors="replace"))
        texts.append("")
    return "\n".join(texts)
