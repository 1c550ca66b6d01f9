"""What a user asks for on the command line: a prompt, how to wrap it, how to sample."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pop_engine.configs.errors import UsageError
from pop_engine.runtime.engine import Engine
from pop_engine.runtime.images.video import Video
from pop_engine.runtime.messages import ChatMessage
from pop_engine.runtime.sampling import SamplingParams


@dataclass(frozen=True)
class Request:
    """One prompt. With `chat` it is the user's message where the model has a chat template, images and videos first."""

    prompt: str
    system: str | None
    params: SamplingParams
    chat: bool = True
    images: tuple[str, ...] = ()
    videos: tuple[Video, ...] = ()

    def encode(self, engine: Engine) -> Sequence[int]:
        """Token ids. Raises UsageError for a system message that nothing can carry, and for images as the engine."""
        if not (self.chat and engine.has_chat_template):
            if self.system is not None:
                why = "--no-chat is given" if not self.chat else "the model has no chat template"
                raise UsageError(f"--system {self.system!r}: {why}; put the text into the prompt instead")
            return engine.encode_images(self.prompt, self.images, self.videos)
        messages: list[ChatMessage] = [{"role": "user", "content": self.prompt}]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        return engine.encode_chat(messages, self.images, self.videos)


def sampling_params(arguments: argparse.Namespace) -> SamplingParams:
    """The sampling flags, checked."""
    return SamplingParams(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        min_p=arguments.min_p,
        repetition_penalty=arguments.repetition_penalty,
        seed=arguments.seed,
        stop=tuple(arguments.stop),
        logprobs=arguments.logprobs,
        ignore_eos=arguments.ignore_eos,
    )


def read_prompt(name: str) -> str:
    """The text of a prompt file, or of stdin for `-`. Raises UsageError where it is missing, empty or not UTF-8."""
    shown = "stdin" if name == "-" else name
    try:
        content = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise UsageError(f"{shown}: cannot be read ({error.strerror}); give a text file, or - for stdin") from error
    text = decode_utf8(content, shown)
    if not text.strip():
        raise UsageError(f"{shown}: empty prompt; expected some text")
    return text


def decode_utf8(content: bytes, shown: str) -> str:
    """Decode a file's bytes. Raises UsageError with the place of the first byte that is not UTF-8."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{shown}: byte {error.start} (0x{content[error.start]:02x}) is not UTF-8; save the file as UTF-8"
        ) from error
