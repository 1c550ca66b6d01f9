"""Prompts of every form to token ids: texts, conversations, images among them."""

from collections.abc import Sequence

from pop_engine.configs.errors import UsageError
from pop_engine.runtime.images.loading import ImageSource
from pop_engine.runtime.images.prompt import ImagePrompt
from pop_engine.runtime.images.video import Video
from pop_engine.runtime.images.vision import Vision
from pop_engine.runtime.messages import ChatMessage, read_messages, with_media
from pop_engine.runtime.tokenizer import Tokenizer


class PromptEncoder:
    """Turns prompts into token ids; with images, into an ImagePrompt. Either half may be missing in an engine."""

    def __init__(self, tokenizer: Tokenizer | None, vision: Vision | None) -> None:
        self._tokenizer = tokenizer
        self._vision = vision

    def encode(
        self, prompt: str | Sequence[int], images: Sequence[ImageSource] = (), videos: Sequence[Video] = ()
    ) -> Sequence[int]:
        """Token ids of a text with the special tokens its model expects; ids are checked and passed on.

        A text shows each image by a placeholder, token ids by one or all of its tokens. Raises UsageError where they
        do not, and for images that cannot be read or that the model does not take.
        """
        if isinstance(prompt, ImagePrompt) and not (images or videos):
            return prompt
        if not isinstance(prompt, str):
            token_ids = [int(token_id) for token_id in prompt]
            if videos:
                raise UsageError(f"video {videos[0].path}: token ids cannot show a video's times; give a text")
            if not images:
                return token_ids
            return self.require_vision().place(token_ids, self.require_vision().read(images))
        tokenizer = self._require_tokenizer()
        if self._vision is None and not (images or videos):
            return tokenizer.encode(prompt)
        vision = self.require_vision()
        text, placed = vision.expand(prompt, tokenizer.token_text, images, videos)
        return vision.place(tokenizer.encode(text), placed) if placed else tokenizer.encode(text)

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        images: Sequence[ImageSource] = (),
        videos: Sequence[Video] = (),
    ) -> Sequence[int]:
        """Token ids of a conversation, up to where the answer begins. Images, then videos begin the last message.

        Raises UsageError as `encode` does, and for messages that the model's chat template refuses.
        """
        tokenizer = self._require_tokenizer()
        # Messages of a wrong form are told before with_media looks into them.
        read_messages(messages)
        messages = with_media(messages, images, videos)
        conversation = read_messages(messages)
        if self._vision is None and conversation.is_text:
            return tokenizer.encode_chat(messages)
        vision = self.require_vision()
        text = tokenizer.render(messages)
        expanded, placed = vision.expand(text, tokenizer.token_text, conversation.images, conversation.videos)
        token_ids = tokenizer.encode_rendered(expanded)
        return vision.place(token_ids, placed) if placed else token_ids

    def _require_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise UsageError("the engine has no tokenizer: give token ids instead of text")
        return self._tokenizer

    def require_vision(self) -> Vision:
        """The engine's vision half. Raises UsageError where it has none."""
        if self._vision is None:
            raise UsageError(
                "images: this model takes text only, as plain strings; leave them out, or build a vision-language model"
            )
        return self._vision
