"""The byte-level BPE tokenizer of the demo model, and rendering of its chat template.

Digits are single tokens, so that the model can learn sums. Special tokens, tags and template come
from afd_demo/tokenizer.py, so that training and serving agree.
"""

import json
from collections.abc import Iterable
from pathlib import Path

import jinja2
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from afd_demo.tokenizer import BOS, CHAT_TEMPLATE, MARKUP, TURN_END, TURN_START
from training.calls import Message


def train(texts: Iterable[str], vocab: int) -> Tokenizer:
    """Returns a tokenizer of `vocab` tokens. BOS (between documents) is 0, TURN_END (EOS) is 2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - len(MARKUP),
        special_tokens=[BOS, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in MARKUP])
    return tokenizer


def write(tokenizer: Tokenizer, directory: Path, *, context: int) -> None:
    """Writes tokenizer.json, tokenizer_config.json and generation_config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": TURN_END,
        "pad_token": BOS,
        "model_max_length": context,
        "chat_template": CHAT_TEMPLATE,
    }
    bos, eos = tokenizer.token_to_id(BOS), tokenizer.token_to_id(TURN_END)
    generation = {
        "bos_token_id": bos,
        "eos_token_id": [eos, bos],
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.9,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")


class ChatRenderer:
    """Renders conversations exactly as serving does (with Transformers' jinja settings)."""

    def __init__(self) -> None:
        environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        self._template = environment.from_string(CHAT_TEMPLATE)

    def __call__(
        self,
        messages: tuple[Message, ...],
        tools: tuple[dict[str, object], ...] = (),
        *,
        add_generation_prompt: bool = False,
    ) -> str:
        return self._template.render(
            messages=list(messages),
            tools=list(tools) or None,
            add_generation_prompt=add_generation_prompt,
        )
