"""A model's tokenizer: text to ids and back, its special tokens, its chat template."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tokenizers

from kvarn.core.errors import InvalidRequest, ModelError
from kvarn.text.bytes import TokenBytes
from kvarn.text.chat import ChatTemplate, Message
from kvarn.text.stream import TextStream, text_of


@dataclass(frozen=True)
class TokenizerSettings:
    """What a model states beside its vocabulary.

    bos_id: token that starts a text, if `add_bos`. end_ids: tokens that end an answer. chat_templates: by name;
    'default' is the usual one. tokens: bos_token, eos_token ... as chat templates name them.
    """

    bos_id: int | None = None
    add_bos: bool = False
    eos_id: int | None = None
    add_eos: bool = False
    end_ids: frozenset[int] = frozenset()
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    tokens: Mapping[str, str] = field(default_factory=dict)


class Tokenizer:
    """Encodes and decodes as the model was trained. Thread-safe; holds no state between calls."""

    def __init__(self, backend: tokenizers.Tokenizer, settings: TokenizerSettings) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend, self.settings = backend, settings
        self.token_bytes = TokenBytes(backend)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self._templates = {n: ChatTemplate(source, settings.tokens) for n, source in settings.chat_templates.items()}

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary, added ones included; the model's embedding may have more rows."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_id(self) -> int | None:
        return self.settings.bos_id

    @property
    def end_ids(self) -> frozenset[int]:
        """Ids that end an answer: end of text, end of turn."""
        return self.settings.end_ids

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    def to_json(self) -> str:
        """The vocabulary and its rules as the text of a tokenizer.json."""
        return self._backend.to_str()

    def token_id(self, token: str) -> int | None:
        """Id of a token by its spelling in the vocabulary."""
        return self._backend.token_to_id(token)

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Ids of `text`; special tokens written out in it count as such. add_special: begin (and end) as the model
        does; off for text that a chat template made, which writes them itself. Raises InvalidRequest: not Unicode."""
        try:
            ids = self._backend.encode(text, add_special_tokens=False).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequest("the prompt is not valid Unicode text: it holds lone surrogates") from error
        if not add_special:
            return ids
        head = [self.settings.bos_id] if self.settings.add_bos and self.settings.bos_id is not None else []
        tail = [self.settings.eos_id] if self.settings.add_eos and self.settings.eos_id is not None else []
        return head + ids + tail

    def decode(self, token_ids: Iterable[int], *, skip_special: bool = True, continuing: bool = False) -> str:
        """Text of the ids. continuing: they follow earlier text, so a sentencepiece token's leading space stays."""
        text = text_of(self.token_bytes, token_ids, self.special_ids if skip_special else ())
        return text[1:] if self.token_bytes.strips_space and not continuing and text.startswith(" ") else text

    def stream(self, stops: Sequence[str] = (), *, skip_special: bool = True) -> TextStream:
        """A stream for one answer's ids; joined, its pieces are `decode(..., continuing=True)`, cut at a stop."""
        return TextStream(self.token_bytes, self.special_ids if skip_special else (), stops)

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **more: Any,
    ) -> str:
        """The prompt's text for a conversation; encode it with add_special=False. Raises ModelError without a template,
        InvalidRequest for messages that it refuses."""
        if not self._templates:
            raise ModelError("the model has no chat template", fixes=("use --raw", "send a plain prompt"))
        wanted = "tool_use" if tools and "tool_use" in self._templates else "default"
        template = self._templates.get(wanted) or next(iter(self._templates.values()))
        return template.render(messages, add_generation_prompt=add_generation_prompt, tools=tools, **more)

    def encode_chat(self, messages: Sequence[Message], **more: Any) -> list[int]:
        """Ids of a conversation's prompt."""
        return self.encode(self.apply_chat_template(messages, **more), add_special=False)
