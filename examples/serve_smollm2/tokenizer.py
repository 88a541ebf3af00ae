"""The tokenizer and chat format that the GGUF metadata describe."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from .gguf_file import GGUFFile

__all__ = ["ChatTokenizer"]

_CONTROL = 3  # GGUF's token type of special tokens
_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


class ChatTokenizer:
    """Byte-level BPE with single digits, as ``tokenizer.ggml.pre = smollm`` asks for.

    Attributes
    ----------
    stop_tokens : frozenset of int
        End of a turn and end of text.
    """

    def __init__(self, file: GGUFFile) -> None:
        kind = (file["tokenizer.ggml.model"], file["tokenizer.ggml.pre"])
        if kind != ("gpt2", "smollm"):
            raise ValueError(f"tokenizer {kind} is not ('gpt2', 'smollm'), the one of SmolLM2")
        tokens = file["tokenizer.ggml.tokens"]
        merges = [tuple(merge.split(" ")) for merge in file["tokenizer.ggml.merges"]]
        vocabulary = {token: index for index, token in enumerate(tokens)}
        self._tokenizer = Tokenizer(models.BPE(vocabulary, merges))
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        self._tokenizer.decoder = decoders.ByteLevel()
        special = [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, file["tokenizer.ggml.token_type"], strict=True)
            if kind == _CONTROL
        ]
        self._tokenizer.add_special_tokens(special)
        # A text that spells a special token must not become one.
        self._tokenizer.encode_special_tokens = True
        self._start, self._end = vocabulary["<|im_start|>"], vocabulary["<|im_end|>"]
        end_of_turn = int(file["tokenizer.ggml.eos_token_id"])
        self.stop_tokens = frozenset({end_of_turn, vocabulary["<|endoftext|>"]})

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text; special tokens written out in it stay text."""
        return list(self._tokenizer.encode(text).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text, without special tokens; bytes that are not UTF-8 become U+FFFD."""
        return str(self._tokenizer.decode(list(tokens)))

    def chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """A conversation up to where the answer starts.

        Parameters
        ----------
        messages : sequence of (role, content)
            As the model's chat template: its own system prompt if the first role is another.
        """
        if not messages:
            raise ValueError("messages is empty; a conversation starts with one")
        if messages[0][0] != "system":
            messages = [("system", _SYSTEM), *messages]
        found: list[int] = []
        for role, content in messages:
            if role not in ("system", "user", "assistant"):
                raise ValueError(f"role {role!r} is none of 'system', 'user', 'assistant'")
            turn = self.encode(f"{role}\n{content}")
            found += [self._start, *turn, self._end, *self.encode("\n")]
        return [*found, self._start, *self.encode("assistant\n")]
