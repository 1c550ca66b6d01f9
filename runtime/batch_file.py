"""`--batch FILE.jsonl`: one request a line."""

from dataclasses import fields, replace
from pathlib import Path

import msgspec

from pop_engine.configs.errors import UsageError
from pop_engine.runtime.requests import Request, decode_utf8
from pop_engine.runtime.sampling import SamplingParams

_SAMPLING_FIELDS = frozenset(field.name for field in fields(SamplingParams))


def read_batch(path: Path, params: SamplingParams, system: str | None, *, chat: bool) -> list[Request]:
    """Requests from lines such as {"prompt": "…", "max_tokens": 50}; a line's own settings override the flags.

    Raises UsageError naming the line that is wrong.
    """
    try:
        content = decode_utf8(path.read_bytes(), f"--batch {path}")
    except OSError as error:
        raise UsageError(f"--batch {path}: cannot be read ({error.strerror})") from error
    lines = [(number, line) for number, line in enumerate(content.splitlines(), 1) if line.strip()]
    if not lines:
        raise UsageError(f'--batch {path}: empty; expected lines such as {{"prompt": "…"}}')
    defaults = Request("", system, params, chat)
    return [_parse_line(line, f"--batch {path}, line {number}", defaults) for number, line in lines]


def _parse_line(line: str, origin: str, defaults: Request) -> Request:
    try:
        given = msgspec.json.decode(line, type=dict[str, object])
    except msgspec.MsgspecError as error:
        raise UsageError(f"{origin}: not a JSON object ({error})") from error
    unknown = given.keys() - _SAMPLING_FIELDS - {"prompt", "system", "images"}
    if unknown:
        expected = ", ".join(["prompt", "system", "images", *sorted(_SAMPLING_FIELDS)])
        raise UsageError(f"{origin}: unknown key {min(unknown)!r}; expected some of {expected}")
    prompt, system = given.pop("prompt", None), given.pop("system", defaults.system)
    if not isinstance(prompt, str) or not prompt.strip():
        raise UsageError(f"{origin}: expected a non-empty text as prompt, found {prompt!r}")
    if system is not None and not isinstance(system, str):
        raise UsageError(f"{origin}: expected a text as system, found {system!r}")
    images = given.pop("images", [])
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise UsageError(f"{origin}: expected a list of paths or data: URLs as images, found {images!r}")
    return Request(prompt, system, _override(defaults.params, given, origin), defaults.chat, tuple(images))


def _override(params: SamplingParams, given: dict[str, object], origin: str) -> SamplingParams:
    settings = {field.name: getattr(params, field.name) for field in fields(params)} | given
    try:
        return replace(params, **msgspec.to_builtins(msgspec.convert(settings, SamplingParams, strict=True)))
    except msgspec.ValidationError as error:
        raise UsageError(f"{origin}: {error}") from error
    except UsageError as error:
        raise UsageError(f"{origin}: {error}") from error
