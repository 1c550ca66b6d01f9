"""Messages of a conversation: their form, and the images and videos in them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypedDict

from pop_engine.configs.errors import UsageError
from pop_engine.runtime.images.loading import ImageSource
from pop_engine.runtime.images.video import Video


class TextPart(TypedDict):
    """A piece of a message's text."""

    type: Literal["text"]
    text: str


class ImagePart(TypedDict):
    """An image: a path, a data URL, or a file's bytes."""

    type: Literal["image"]
    image: ImageSource


class ImageUrl(TypedDict):
    """Where an image of an `image_url` part is."""

    url: str


class ImageUrlPart(TypedDict):
    """An image in the form of OpenAI's API: a data URL, or a path."""

    type: Literal["image_url"]
    image_url: ImageUrl


class VideoPart(TypedDict):
    """A video: a file, or a folder of frames."""

    type: Literal["video"]
    video: str | Path | Video


# What a part of each type holds under its type's name, and how messages name it.
_EXPECTED: dict[object, tuple[tuple[type, ...], str]] = {
    "text": ((str,), "a string"),
    "image": ((str, Path, bytes), "a path, a data: URL or a file's bytes"),
    "image_url": ((str,), "a url with a data: URL or a path"),
    "video": ((str, Path, Video), "the path of a file or of a folder of frames"),
}

ContentPart = TextPart | ImagePart | ImageUrlPart | VideoPart


class ChatMessage(TypedDict):
    """One turn of a conversation. Roles are the template's: usually system, user, assistant."""

    role: str
    content: str | Sequence[ContentPart]


@dataclass(frozen=True)
class Conversation:
    """Checked messages: what a chat template is shown, and what stands behind its placeholders, in order."""

    shown: list[dict[str, object]]
    images: tuple[ImageSource, ...]
    videos: tuple[Video, ...]

    @property
    def is_text(self) -> bool:
        """Whether every message is a plain string."""
        return all(isinstance(message["content"], str) for message in self.shown)


def read_messages(messages: Sequence[ChatMessage]) -> Conversation:
    """Check messages and take their images out. Raises UsageError naming the message and the part that is wrong."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise UsageError(f"messages: expected a list of role and content pairs, found {type(messages).__name__}")
    if not messages:
        raise UsageError("messages: the list is empty; expected at least one, like role 'user' and your question")
    conversation = Conversation([], (), ())
    for position, message in enumerate(messages):
        conversation = _with_message(conversation, f"messages[{position}]", message)
    return conversation


def with_media(
    messages: Sequence[ChatMessage], images: Sequence[ImageSource], videos: Sequence[Video]
) -> list[ChatMessage]:
    """The same messages with these images and videos before the text of the last one, as Hugging Face's examples."""
    if not messages or not (images or videos):
        return list(messages)
    last = messages[-1]
    content = last["content"]
    parts: list[ContentPart] = [{"type": "image", "image": image} for image in images]
    parts += [{"type": "video", "video": video} for video in videos]
    parts += [{"type": "text", "text": content}] if isinstance(content, str) else content
    return [*messages[:-1], {"role": last["role"], "content": parts}]


def _with_message(conversation: Conversation, name: str, message: object) -> Conversation:
    role, content = _role_and_content(name, message)
    if isinstance(content, str):
        shown: dict[str, object] = {"role": role, "content": content}
        return replace(conversation, shown=[*conversation.shown, shown])
    if not isinstance(content, list | tuple):
        raise UsageError(f"{name}: 'content' is {type(content).__name__}; expected a string, or a list of parts")
    parts = [_read_part(f"{name}: content[{position}]", part) for position, part in enumerate(content)]
    return Conversation(
        [*conversation.shown, {"role": role, "content": [shown for shown, _ in parts]}],
        (*conversation.images, *(source for _, source in parts if isinstance(source, str | Path | bytes))),
        (*conversation.videos, *(source for _, source in parts if isinstance(source, Video))),
    )


def _role_and_content(name: str, message: object) -> tuple[str, object]:
    if not isinstance(message, Mapping):
        raise UsageError(f"{name}: expected a mapping with role and content, found {type(message).__name__}")
    for key in ("role", "content"):
        if key not in message:
            raise UsageError(f"{name}: has no {key!r}; expected role and content")
    for key in message:
        # Dropping what we cannot honour (tool_calls …) would silently change the prompt.
        if key not in ChatMessage.__annotations__:
            raise UsageError(f"{name}: unknown key {key!r}; expected role and content only")
    if not isinstance(message["role"], str):
        raise UsageError(f"{name}: 'role' is {type(message['role']).__name__}; expected a string")
    return message["role"], message["content"]


def _read_part(name: str, part: object) -> tuple[dict[str, str], ImageSource | Video | None]:
    """What the template is shown of a part, and its image or video."""
    if not isinstance(part, Mapping):
        raise UsageError(f"{name}: expected a mapping with a type, found {type(part).__name__}")
    kind = part.get("type")
    if kind not in _EXPECTED:
        raise UsageError(f"{name}: type is {kind!r}; expected text, image, image_url or video")
    found = part.get(kind)
    if kind == "image_url" and isinstance(found, Mapping):
        found = found.get("url")
    types, expected = _EXPECTED[kind]
    if not isinstance(found, types):
        raise UsageError(f"{name}: {kind!r} is {type(found).__name__}; expected {expected}")
    if kind == "text":
        return {"type": "text", "text": str(found)}, None
    if kind == "video":
        return {"type": "video"}, found if isinstance(found, Video) else Video(str(found))
    return {"type": "image"}, found if isinstance(found, bytes | Path) else str(found)
