"""A model's chat template: messages in, the text of the prompt out."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn, TypedDict

from pop_engine.configs.errors import UsageError

if TYPE_CHECKING:
    import jinja2
    from jinja2.ext import Extension


class ChatMessage(TypedDict):
    """One turn of a conversation. Roles are the template's: usually system, user, assistant."""

    role: str
    content: str


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
        check_messages(messages)
        # Undefined and none are not the same to a template: transformers always passes these two as none.
        variables: dict[str, Any] = {"tools": None, "documents": None, **self._special_tokens}
        variables |= {"messages": [dict(message) for message in messages], "add_generation_prompt": True}
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


def check_messages(messages: Sequence[ChatMessage]) -> None:
    """Raise UsageError unless these are messages of a role and a text each, at least one."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise UsageError(f"messages: expected a list of role and content pairs, found {type(messages).__name__}")
    if not messages:
        raise UsageError("messages: the list is empty; expected at least one, like role 'user' and your question")
    for position, message in enumerate(messages):
        _check_message(f"messages[{position}]", message)


def _check_message(name: str, message: object) -> None:
    if not isinstance(message, Mapping):
        raise UsageError(f"{name}: expected a mapping with role and content, found {type(message).__name__}")
    for key in ("role", "content"):
        if key not in message:
            raise UsageError(f"{name}: has no {key!r}; expected role and content")
        if not isinstance(message[key], str):
            raise UsageError(f"{name}: {key!r} is {type(message[key]).__name__}; expected a string")
    for key in message:
        # Dropping what we cannot honour (tool_calls …) would silently change the prompt.
        if key not in ChatMessage.__annotations__:
            raise UsageError(f"{name}: unknown key {key!r}; expected role and content only")


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
