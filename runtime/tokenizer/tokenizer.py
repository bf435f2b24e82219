"""The tokenizer of a loaded model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers

from ...backends.contract.manifest import CHAT_TEMPLATE_NAME, TOKENIZER_NAME, Manifest, TokenizerSpec
from .byte_pairs import BytePairs
from .detokenizer import TextDecoder
from .errors import InvalidTokenError, MissingChatTemplateError, PromptTooLongError, TokenizerLoadError
from .token_bytes import BYTE_OF_CHARACTER, TokenBytes

if TYPE_CHECKING:
    from .chat_template import ChatTemplate


class Tokenizer:
    """Encodes prompts, decodes tokens and renders chats, as one package's files say. Safe to share between threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer | BytePairs,
        spec: TokenizerSpec,
        *,
        model_vocab_size: int,
        chat_template: str | None = None,
    ) -> None:
        """`model_vocab_size`: rows of the model's embedding; ids at or above it are refused."""
        self.spec = spec
        self.model_vocab_size = model_vocab_size
        self.chat_template = chat_template
        self._backend = backend
        backend.no_truncation()
        backend.no_padding()
        self.token_bytes = TokenBytes(backend)
        added = backend.get_added_tokens_decoder()
        self.added_token_ids = frozenset(added)
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        self._num_ids = max(backend.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
        self._lacking = _lacking_bytes(backend) if self.token_bytes.byte_level else b""
        self._swallows_space = any(token.lstrip or token.rstrip for token in added.values())
        self._templates: dict[str, ChatTemplate] = {}

    @classmethod
    def from_package(cls, package_dir: Path, manifest: Manifest) -> Tokenizer:
        """Read byte_pairs.bin or tokenizer.json, and chat_template.jinja, of a package.

        Raises TokenizerLoadError if they do not load.
        """
        backend = BytePairs.of_package(package_dir) or _from_file(package_dir / TOKENIZER_NAME)
        template_path = package_dir / CHAT_TEMPLATE_NAME
        template = template_path.read_text(encoding="utf-8") if template_path.is_file() else None
        vocab_size = manifest.architecture.vocab_size
        return cls(backend, manifest.tokenizer, model_vocab_size=vocab_size, chat_template=template)

    @property
    def vocab_size(self) -> int:
        """Number of ids that the tokenizer itself knows (the model's own count is `model_vocab_size`)."""
        return self._num_ids

    @property
    def longest_token_bytes(self) -> int:
        return self.spec.longest_token_bytes

    @property
    def bos_token_id(self) -> int | None:
        return self.spec.bos_token_id

    @property
    def eos_token_id(self) -> int | None:
        """The first of `eos_token_ids`."""
        return self.spec.eos_token_ids[0] if self.spec.eos_token_ids else None

    @property
    def eos_token_ids(self) -> list[int]:
        return self.spec.eos_token_ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written in it become their ids.

        `add_special_tokens` adds bos/eos as the model wants them, but never a second one beside one that `text` has
        already. Raises InvalidTokenError if the text uses a token that the model has no embedding for.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidTokenError(
                f"the text is not valid Unicode: it holds the lone surrogate U+{ord(text[error.start]):04X} "
                f"at character {error.start}"
            ) from error
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens:
            bos, eos = self.spec.bos_token_id, self.eos_token_id
            if self.spec.add_bos and ids[:2] == [bos, bos]:
                del ids[0]
            if self.spec.add_eos and ids[-2:] == [eos, eos]:
                del ids[-1]
        if ids and max(ids) >= self.model_vocab_size:
            wrong = next(i for i in ids if i >= self.model_vocab_size)
            raise InvalidTokenError(
                f"the text uses token {wrong} ({self.id_to_token(wrong)!r}), but the model only has ids below "
                f"{self.model_vocab_size}"
            )
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; invalid UTF-8 becomes U+FFFD. Raises InvalidTokenError for an unknown id."""
        decoder = TextDecoder(self, at_start=True)
        parts = [decoder.feed(i) for i in ids if not (skip_special_tokens and i in self.special_token_ids)]
        return "".join([*parts, decoder.flush()])

    def bytes_of(self, token_id: int) -> bytes:
        """Bytes that a token stands for; b"" for an id that only pads the vocabulary.

        Raises InvalidTokenError for an id that neither the model nor the tokenizer has.
        """
        self.check_token_id(token_id)
        return self.token_bytes[token_id]

    def check_token_id(self, token_id: int) -> None:
        """Raise InvalidTokenError unless the model or the tokenizer has this id."""
        limit = max(self.model_vocab_size, self._num_ids)
        if not 0 <= token_id < limit:
            raise InvalidTokenError(f"token id {token_id} is outside the vocabulary, which has ids 0 to {limit - 1}")

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token; None for an id without one."""
        return self._backend.id_to_token(token_id) if 0 <= token_id < self._num_ids else None

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def check_prompt_bytes(self, text: str, max_model_len: int) -> None:
        """Raise PromptTooLongError if `text` has too many bytes for `max_model_len` tokens, before any tokenisation.

        Never refuses a prompt of at most `max_model_len` tokens: what the tokenizer drops (bytes it has no token for,
        white space beside added tokens that swallow it) is not counted.
        """
        longest = self.spec.longest_token_bytes
        limit = max_model_len * longest
        if longest == 0 or len(text) * 4 <= limit:
            return
        data = text.encode("utf-8", "surrogatepass")
        received = len(data)
        if received > limit and self._lacking:
            received = len(data.translate(None, self._lacking))
        if received > limit and self._swallows_space:
            received -= sum(len(c.encode("utf-8", "surrogatepass")) for c in text if c.isspace())
        if received > limit:
            raise PromptTooLongError(
                f"the prompt has {received} bytes, more than the {limit} that can fit the context: "
                f"max_model_len {max_model_len} tokens x {longest} bytes of the longest token. Shorten the prompt"
            )

    def apply_chat_template(
        self,
        /,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """The conversation as the model's template writes it; encode it with add_special_tokens=False.

        `chat_template` is the name of one of the package's named templates, or a template's text, and replaces the
        default one. Raises MissingChatTemplateError without any template, ChatTemplateError where it fails.
        """
        from .chat_template import ChatTemplate  # jinja2: a sixth of the time to load a small model

        source = self._template_source(chat_template, bool(tools))
        template = self._templates.get(source)
        if template is None:
            template = self._templates[source] = ChatTemplate(source)
            while len(self._templates) > 16:  # request templates are untrusted and must not pile up
                self._templates.pop(next(iter(self._templates)))
        pad = self.spec.pad_token_id
        special = {
            "bos_token": self.spec.bos_token,
            "eos_token": self.spec.eos_token,
            "pad_token": self.id_to_token(pad) if pad is not None else None,
            "unk_token": getattr(self._backend.model, "unk_token", None),
        }
        special = {name: token for name, token in special.items() if token}  # undefined, as where a model has none
        return template.render(
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables={**special, **kwargs},
        )

    def _template_source(self, chosen: str | None, has_tools: bool) -> str:
        if chosen is not None:
            return self.spec.chat_templates.get(chosen, chosen)
        # A model with a template of its own for tool use means it for every request with tools.
        if has_tools and "tool_use" in self.spec.chat_templates:
            return self.spec.chat_templates["tool_use"]
        if self.chat_template is not None:
            return self.chat_template
        named = ", ".join(sorted(self.spec.chat_templates))
        hint = f"; it has only named ones ({named}): choose one with chat_template" if named else ""
        raise MissingChatTemplateError(
            f"this model has no chat template{hint}. Use completions instead of chat, or give one: chat_template "
            "in Python, --chat-template of the server"
        )


def _from_file(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for a missing, damaged or newer file
        raise TokenizerLoadError(f"{path}: cannot be read as a tokenizer ({error}); export the model again") from error


def _lacking_bytes(backend: tokenizers.Tokenizer | BytePairs) -> bytes:
    """Bytes without a token in a byte-level vocabulary; the library drops them from the text."""
    return bytes(byte for character, byte in BYTE_OF_CHARACTER.items() if backend.token_to_id(character) is None)
