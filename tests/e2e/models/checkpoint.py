"""A tiny checkpoint as a maker writes it: configuration, tokenizer of bytes, processor."""

from __future__ import annotations

import json
from base64 import b64encode
from pathlib import Path
from typing import Any

from mistral_common.tokens.tokenizers.base import SpecialTokens
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig, PreTrainedTokenizerFast

CHAT = "{% for m in messages %}{{ m.content }}{% endfor %}"


class Checkpoint:
    def __init__(self, directory: Path, kind: str) -> None:
        """`kind` is the architecture, as vLLM names it."""
        self.directory, self.kind = directory, kind
        self.tokenizer: PreTrainedTokenizerFast

    def tokens(self, *more: str, **named: str) -> PreTrainedTokenizerFast:
        """Write a tokenizer of bytes with these special tokens.

        Those of `named` become its attributes, as `image_token`. Ids begin with bos, eos, pad.
        """
        special = [*dict.fromkeys(("<s>", "</s>", "<pad>", "<unk>", *more, *named.values()))]
        bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
        ids = {token: at for at, token in enumerate([*special, *bytes_])}
        tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(each, special=True) for each in special])
        standard = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
        standard |= {"unk_token": "<unk>"}
        self.tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, extra_special_tokens=named, **standard
        )
        self.tokenizer.chat_template = CHAT
        self.tokenizer.save_pretrained(self.directory)
        return self.tokenizer

    def tekken(self, **media: dict[str, Any]) -> int:
        """Write a tokenizer of bytes in Mistral's format, and how it takes images or audio.

        Returns how many tokens it has.
        """
        special = [
            {"rank": at, "token_str": each.value, "is_control": True}
            for at, each in enumerate(SpecialTokens)
        ]
        vocabulary = [
            {"rank": byte, "token_bytes": b64encode(bytes([byte])).decode(), "token_str": None}
            for byte in range(256)
        ]
        sizes = {"num_vocab_tokens": 256, "default_vocab_size": 320}
        config = {"pattern": ".", "version": "v13", "default_num_special_tokens": 64, **sizes}
        self.json("tekken", vocab=vocabulary, special_tokens=special, config=config, **media)
        return sizes["default_vocab_size"]

    def id(self, token: str) -> int:
        found = self.tokenizer.convert_tokens_to_ids(token)
        assert found != self.tokenizer.unk_token_id, f"the tokenizer has no {token}"
        return found

    def ids(self, **named: str) -> dict[str, int]:
        """The ids of tokens, as most configurations name them."""
        return {f"{name}_id": self.id(token) for name, token in named.items()}

    def config(self, config: Any) -> None:
        config.architectures = [self.kind]
        config.save_pretrained(self.directory)

    def json(self, name: str, **content: Any) -> None:
        """Write a file of settings."""
        (self.directory / f"{name}.json").write_text(json.dumps(content))

    def read(self, name: str) -> dict[str, Any]:
        """Settings that were written."""
        return json.loads((self.directory / f"{name}.json").read_text())

    def unknown_config(self, model_type: str, **fields: Any) -> None:
        """A configuration of a type that transformers has not, as its repository's code would."""

        class Config(PreTrainedConfig):
            def __init__(self, **given: Any) -> None:
                for name, value in given.items():
                    if isinstance(value, dict) and name.endswith("_config"):
                        is_known = value["model_type"] in CONFIG_MAPPING
                        of = AutoConfig.for_model if is_known else PreTrainedConfig
                        given[name] = of(**value)
                super().__init__(**given)

        Config.model_type = model_type
        AutoConfig.register(model_type, Config)
        self.config(Config(**fields))
