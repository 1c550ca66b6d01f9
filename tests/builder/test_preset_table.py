import subprocess
import sys

import pytest

from pop_engine.builder.checkpoint.preset import list_presets, load_preset
from pop_engine.builder.cli import main
from pop_engine.builder.preset_table import preset_table

PIPED = [sys.executable, "-m", "pop_engine.builder.cli", "--list"]


def rows() -> list[list[str]]:
    return [line.split() for line in preset_table().splitlines()]


def test_a_line_for_every_preset() -> None:
    heading, *presets = rows()
    assert heading == ["preset", "model", "layers", "tail", "parameters", "images"]
    assert sorted(row[0] for row in presets) == list(list_presets())
    assert all(row[1] == load_preset(row[0]).hub_id for row in presets)


@pytest.mark.parametrize(
    "row",
    [
        ["llama-3.1-8b", "meta-llama/Llama-3.1-8B-Instruct", "32", "10", "8.03B", "no"],
        ["llama-3.3-70b", "meta-llama/Llama-3.3-70B-Instruct", "80", "26", "70.55B", "no"],
        ["smollm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct", "30", "10", "135M", "no"],
        # Not 1000M.
        ["gemma-3-1b", "google/gemma-3-1b-it", "26", "8", "1.00B", "no"],
        ["qwen3-vl-8b", "Qwen/Qwen3-VL-8B-Instruct", "36", "12", "8.77B", "yes"],
        ["gemma-3-12b", "google/gemma-3-12b-it", "48", "16", "12.19B", "yes"],
    ],
)
def test_row(row: list[str]) -> None:
    assert row in rows()


def test_columns_line_up_and_families_go_by_size() -> None:
    lines = preset_table().splitlines()
    assert all(line == line.rstrip() for line in lines)
    ends = {line.index("B" if "B " in line else "M ") for line in lines[1:] if "no" in line.split()[-1]}
    assert ends
    names = [line.split()[0] for line in lines]
    sizes = ["qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-32b"]
    assert [name for name in names if name in sizes] == sizes


def test_command_needs_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--list"])
    assert ended.value.code == 0
    assert capsys.readouterr() == (preset_table(), "")


def test_in_a_pipe_whose_reader_has_gone() -> None:
    with subprocess.Popen(PIPED, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        assert command.stderr is not None
        command.stdout.close()
        assert command.stderr.read() == ""
    assert command.returncode == 0
