"""Text out of plain, HTML, compressed and R files."""

import gzip
import zlib
from pathlib import Path

from pop_engine.tools.text_files import read_text


def test_paragraphs_of_a_page_are_divided_and_its_code_is_left_out(tmp_path: Path) -> None:
    page = tmp_path / "page.html.gz"
    source = "<head><title>No</title></head><p>One &amp;\ntwo <b>three</b>.</p><pre>x = 1</pre><li>Four.</li>"
    page.write_bytes(gzip.compress(source.encode()))
    assert [" ".join(part.split()) for part in read_text(page).split("\n\n") if part.strip()] == [
        "One & two three.",
        "Four.",
    ]


def test_strings_of_an_r_database_are_lines(tmp_path: Path) -> None:
    """As R writes them: the object's length, then a zlib stream with CHARSXPs (R Internals, 1.8)."""
    strings = [b"It is a truth", b"", "caf\u00e9".encode()]
    packed = b"".join(b"\x00\x04\x00\x09" + len(text).to_bytes(4, "big") + text for text in strings)
    database = tmp_path / "data.rdb"
    stream = zlib.compress(b"X\n\x00\x00" + packed)
    database.write_bytes(2 * (len(packed).to_bytes(4, "big") + stream))
    assert read_text(database).split("\n") == 2 * ["It is a truth", "", "caf\u00e9", ""]


def test_other_formats_have_no_text(tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    assert read_text(tmp_path / "picture.png") == ""
