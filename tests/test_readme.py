"""The README's Python example runs as it is printed."""

import re
from pathlib import Path

import pytest

from engine_kit import EngineKit, TinyModels

README = Path(__file__).parents[1] / "README.md"


def test_python_example(
    build_engine: EngineKit,
    tiny: TinyModels,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    engine = build_engine.directory(tiny.checkpoint(), tail_layers=1, max_seq_len=128)
    (tmp_path / "engine").symlink_to(engine)
    monkeypatch.chdir(tmp_path)
    exec(compile(example, str(README), "exec"), {})
    assert "ms to the first token" in capsys.readouterr().out
