"""A model's chat template: messages in, the text of the prompt out."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

from pop_engine.configs.errors import UsageError
from pop_engine.runtime.messages import ChatMessage, read_messages

if TYPE_CHECKING:
    import jinja2
    from jinja2.ext import Extension

__all__ = ["ChatMessage", "ChatTemplate", "RefusedMessagesError"]


class RefusedMessagesError(Exception):
    """What a template raises, by `raise_exception`, about messages that it does not take."""


class ChatTemplate:
    """Renders as transformers' `apply_chat_template` does, in a sandbox: templates come from strangers.

    jinja2 is imported and the template compiled at the first rendering, so that plain prompts do not pay for it.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._compiled: jinja2.Template | None = None

    def render(self, messages: Sequence[ChatMessage]) -> str:
        """The conversation as text, with the opening of the assistant's next turn.

        Raises UsageError on messages of the wrong form, on ones that the template refuses, and on a broken template.
        """
        # Undefined and none are not the same to a template: transformers always passes these two as none.
        variables: dict[str, Any] = {"tools": None, "documents": None, **self._special_tokens}
        variables |= {"messages": read_messages(messages).shown, "add_generation_prompt": True}
        try:
            if self._compiled is None:
                self._compiled = _compile(self._source)
            return self._compiled.render(variables)
        except RefusedMessagesError as error:
            raise UsageError(
                f"messages: the model's chat template refuses them ({error}); "
                "change them, or give the prompt as plain text (--no-chat)"
            ) from error
        except Exception as error:  # A template is a program: any exception can come out of it.
            raise UsageError(
                f"the model's chat template fails ({type(error).__name__}: {error}); "
                "give the prompt as plain text (--no-chat), or build the engine with another template"
            ) from error


def _compile(source: str) -> "jinja2.Template":
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _generation_tag()]
    )
    environment.filters["tojson"] = _to_json
    functions: dict[str, Callable[[str], str]] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(functions)
    return environment.from_string(source)


def _generation_tag() -> "type[Extension]":
    """The `{% generation %}` block of some templates: it marks the assistant's text for training, and is just text."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class GenerationTag(Extension):
        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return GenerationTag


def _raise_exception(message: str) -> NoReturn:
    raise RefusedMessagesError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML characters, which a model has never seen.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
