"""An engine directory, loaded: prompts in, text out."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pop_engine.configs.errors import UsageError
from pop_engine.configs.manifest import MANIFEST_NAME, Manifest
from pop_engine.runtime import generation
from pop_engine.runtime.images.loading import ImageSource
from pop_engine.runtime.images.video import Video
from pop_engine.runtime.images.vision import Vision
from pop_engine.runtime.kv_cache import Slots
from pop_engine.runtime.messages import ChatMessage
from pop_engine.runtime.prompt_encoder import PromptEncoder
from pop_engine.runtime.prompt_rows import PromptRows
from pop_engine.runtime.sampling import SamplingParams
from pop_engine.runtime.scheduler import Event, Scheduler
from pop_engine.runtime.sequence import Generation, Piece
from pop_engine.runtime.sequence import Sequence as GeneratedSequence
from pop_engine.runtime.sessions.registry import open_session
from pop_engine.runtime.sessions.session import Session
from pop_engine.runtime.tokenizer import Tokenizer
from pop_engine.runtime.weights import check_graphs, weights_directory

Prompt = str | Sequence[int]
GREEDY = SamplingParams()


class Engine:
    """Runs prompts over a fixed number of slots. A context manager; one thread at a time.

    `generate`, `stream` and `chat` take a slot for as long as they run. `allocate_slot`, `prefill`, `decode_step`
    and `free_slot` are the level below, for schedulers and servers.
    """

    def __init__(
        self, manifest: Manifest, session: Session, tokenizer: Tokenizer | None, vision: Vision | None = None
    ) -> None:
        self.manifest = manifest
        self._session: Session | None = session
        self._tokenizer = tokenizer
        self._vision = vision
        self._encoder = PromptEncoder(tokenizer, vision)
        self._slots = Slots(manifest.limits.max_batch_size, manifest.limits.max_seq_len)

    @classmethod
    def load(cls, path: str | Path, *, threads: int | None = None, manifest_name: str = MANIFEST_NAME) -> "Engine":
        """Load an engine directory. `threads` defaults to the cores this process may use.

        Raises UsageError where the path is no engine that can run, EngineError where it is damaged or was built for
        something that is not here.
        """
        if threads is not None and threads < 1:
            raise UsageError(f"threads {threads}: expected a whole number of at least 1, or none for all cores")
        directory = Path(path)
        manifest = Manifest.load(directory, manifest_name)
        weights = weights_directory(directory, manifest)
        check_graphs(directory, manifest)
        record = manifest.tokenizer
        tokenizer = None if record is None else Tokenizer.load(directory, record)
        vision = None if manifest.vision is None else Vision(directory, weights, manifest, threads)
        return cls(manifest, open_session(directory, weights, manifest, threads), tokenizer, vision)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Free weights and cache. The engine cannot be used after it."""
        if self._session is not None:
            self._session.close()
            self._session = None
        if self._vision is not None:
            self._vision.close()

    # The level that most programs use.

    def generate(
        self, prompt: Prompt, params: SamplingParams = GREEDY, *, images: Sequence[ImageSource] = ()
    ) -> Generation:
        """Complete a text, or token ids. Raises UsageError where the prompt is empty or does not fit.

        A text holds the model's placeholder for each image, token ids one or all of its tokens.
        """
        return self._finish(self._stream(self._encoder.encode(prompt, images), params))

    def chat(
        self,
        messages: Sequence[ChatMessage],
        params: SamplingParams = GREEDY,
        *,
        images: Sequence[ImageSource] = (),
    ) -> Generation:
        """Answer a conversation. Raises UsageError where the model has no chat template.

        Images and videos are parts of messages; those given apart come first in the last message.
        """
        return self._finish(self._stream(self.encode_chat(messages, images), params))

    def stream(
        self, prompt: Prompt, params: SamplingParams = GREEDY, *, images: Sequence[ImageSource] = ()
    ) -> Iterator[Piece]:
        """Complete a text piece by piece. Joined, the pieces are what `generate` returns."""
        return (event.piece for event in self._stream(self._encoder.encode(prompt, images), params))

    def stream_chat(
        self,
        messages: Sequence[ChatMessage],
        params: SamplingParams = GREEDY,
        *,
        images: Sequence[ImageSource] = (),
    ) -> Iterator[Piece]:
        """Answer a conversation piece by piece."""
        return (event.piece for event in self._stream(self.encode_chat(messages, images), params))

    def run_batch(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> Iterator[Event]:
        """Complete many prompts at once, continuously batched over the slots; events come as they happen."""
        scheduler = Scheduler(self)
        for index, (token_ids, own_params) in enumerate(zip(prompts, params, strict=True)):
            scheduler.add(index, self._sequence(token_ids, own_params))
        return scheduler.run()

    # Text and token ids.

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a text with the special tokens its model expects; ids are checked and passed on."""
        return list(self._encoder.encode(prompt))

    def encode_images(
        self, prompt: Prompt, images: Sequence[ImageSource] = (), videos: Sequence[Video] = ()
    ) -> Sequence[int]:
        """The same with images and videos, read and checked: token ids that know which of them are images."""
        return self._encoder.encode(prompt, images, videos)

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        images: Sequence[ImageSource] = (),
        videos: Sequence[Video] = (),
    ) -> Sequence[int]:
        """Token ids of a conversation, up to where the answer begins. Images, then videos begin the last message."""
        return self._encoder.encode_chat(messages, images, videos)

    def image_features(self, image: ImageSource) -> NDArray[np.float32]:
        """What stands at an image's tokens, [num_tokens, hidden_size]. Raises UsageError where it cannot be read."""
        vision = self._encoder.require_vision()
        return vision.features(vision.read([image])[0]).embeds

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat` can be used."""
        return self._tokenizer is not None and self._tokenizer.has_chat_template

    # The level below: slots.

    @property
    def num_free_slots(self) -> int:
        """How many sequences more can be held at once."""
        return self._slots.num_free

    def allocate_slot(self) -> int:
        """Take an empty slot. Raises UsageError where all are taken."""
        return self._slots.allocate()

    def free_slot(self, slot: int) -> None:
        """Give a slot back."""
        self._slots.free(slot)

    def prefill(self, slot: int, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Run a prompt, or more of a conversation, into a slot; returns the logits [vocab_size] of its last token.

        Images come in token ids that `encode_images` or `encode_chat` has made.
        """
        self._check_token_ids(token_ids)
        manifest = self.manifest
        prompt = PromptRows(token_ids, self._vision, self._slots.next_position(slot))
        return generation.prefill(
            self._open(),
            self._slots,
            slot,
            prompt,
            manifest.boundary,
            manifest.boundary_window,
            manifest.limits.max_prefill_len,
        )

    def decode_step(self, slots: Sequence[int], token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Run one new token in each of these slots; returns logits [len(slots), vocab_size]."""
        if len(slots) != len(token_ids) or len(set(slots)) != len(slots):
            raise UsageError(
                f"decode_step: slots {list(slots)} and {len(token_ids)} tokens; give each slot once, with one token"
            )
        self._check_token_ids(token_ids)
        return generation.decode_step(self._open(), self._slots, slots, token_ids)

    def _stream(self, token_ids: Sequence[int], params: SamplingParams) -> Iterator[Event]:
        scheduler = Scheduler(self)
        scheduler.add(0, self._sequence(token_ids, params))
        return scheduler.run()

    @staticmethod
    def _finish(events: Iterator[Event]) -> Generation:
        *_, last = events
        assert last.result is not None
        return last.result

    def _sequence(self, token_ids: Sequence[int], params: SamplingParams) -> GeneratedSequence:
        self._check_token_ids(token_ids)
        max_seq_len = self.manifest.limits.max_seq_len
        if len(token_ids) > max_seq_len:
            raise UsageError(
                f"prompt of {len(token_ids)} tokens: the engine holds max_seq_len {max_seq_len}; "
                "shorten it, or build with a higher --max-seq-len"
            )
        if params.stop and self._tokenizer is None:
            raise UsageError("stop: the engine has no tokenizer, so it produces no text to stop at")
        return GeneratedSequence(token_ids, params, self._tokenizer, max_seq_len)

    def _check_token_ids(self, token_ids: Sequence[int]) -> None:
        vocab_size = self.manifest.dims.vocab_size
        if not len(token_ids):
            raise UsageError("prompt: empty; expected at least one token")
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise UsageError(f"token id {token_id}: expected 0 to {vocab_size - 1}, the model's vocabulary")

    def _open(self) -> Session:
        if self._session is None:
            raise UsageError("the engine is closed; load it again")
        return self._session
