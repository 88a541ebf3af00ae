"""The tokenizer and chat format that the GGUF metadata describe."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from .gguf_file import GGUFFile

__all__ = ["ChatTokenizer"]

_CONTROL = 3  # GGUF's token type of special tokens


class ChatTokenizer:
    """Byte-level BPE with single digits, as ``tokenizer.ggml.pre = smollm`` asks for."""

    def __init__(self, file: GGUFFile) -> None:
        kind = (file["tokenizer.ggml.model"], file["tokenizer.ggml.pre"])
        if kind != ("gpt2", "smollm"):
            raise ValueError(f"tokenizer {kind} is not the byte-level BPE of SmolLM2")
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
        self.end_of_turn = int(file["tokenizer.ggml.eos_token_id"])

    def encode(self, text: str) -> list[int]:
        """Token ids; special tokens written out in the text become single ids."""
        return list(self._tokenizer.encode(text).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text, without special tokens."""
        return str(self._tokenizer.decode(list(tokens)))

    def chat(self, system: str, user: str) -> list[int]:
        """A conversation of one question, up to where the answer starts."""
        turns = (("system", system), ("user", user))
        text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
        return self.encode(text + "<|im_start|>assistant\n")
