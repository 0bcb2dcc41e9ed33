"""A small byte-level BPE tokenizer and chat template for the random checkpoints.

The tokenizer is trained when a model is made, on Python's help texts (`pydoc_data.topics`), so no
corpus or foreign vocabulary is shipped. It therefore depends on the Python version that makes the
model, and is stored next to the weights.
"""

import json
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

BOS, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# Ordinary tokens, not special tokens: tool parsers read them in the decoded text.
_TAGS = ("tool_call", "tool_response", "tools")
MARKUP = tuple(token for tag in _TAGS for token in (f"<{tag}>", f"</{tag}>"))

# ChatML turns, with tools and tool calls as vLLM's "hermes" tool parser expects them. Newlines next
# to a block are explicit, because Transformers renders with trim_blocks.
CHAT_TEMPLATE = """\
{%- set ns = namespace(system='') -%}
{%- if messages and messages[0]['role'] == 'system' -%}
{%- set ns.system = messages[0]['content'] -%}
{%- endif -%}
{%- if tools -%}
<|im_start|>system
{{ ns.system }}{% if ns.system %}{{ '\\n\\n' }}{% endif -%}
You may call these functions, each described by a JSON schema:
<tools>
{%- for tool in tools -%}
{{ '\\n' }}{{ tool | tojson }}
{%- endfor -%}
{{ '\\n' }}</tools>
Answer a call with one JSON object inside tags:
<tool_call>
{"name": "function name", "arguments": {}}
</tool_call><|im_end|>
{% elif ns.system -%}
<|im_start|>system
{{ ns.system }}<|im_end|>
{% endif -%}
{%- for message in messages -%}
{%- if message['role'] == 'system' and loop.first -%}
{%- elif message['role'] == 'tool' -%}
<|im_start|>user
<tool_response>
{{ message['content'] }}
</tool_response><|im_end|>
{% else -%}
<|im_start|>{{ message['role'] }}
{{ message['content'] or '' }}
{%- for call in message['tool_calls'] or [] -%}
{%- set function = call['function'] or call -%}
{{ '\\n' }}<tool_call>
{"name": {{ function['name'] | tojson }}, "arguments": {{ function['arguments'] \
if function['arguments'] is string else function['arguments'] | tojson }}}
</tool_call>
{%- endfor -%}
<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


@cache  # trained once for all models of a process
def train(vocab: int) -> Tokenizer:
    """Returns a byte-level BPE tokenizer of at most `vocab` tokens. BOS: 0, EOS (TURN_END): 2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - len(MARKUP),
        special_tokens=[BOS, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((topics[key] for key in sorted(topics)), trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in MARKUP])
    return tokenizer


def write(directory: Path, vocab: int) -> None:
    """Writes tokenizer.json, tokenizer_config.json and generation_config.json."""
    tokenizer = train(vocab)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": TURN_END,
        "pad_token": BOS,
        "model_max_length": 4096,
        "chat_template": CHAT_TEMPLATE,
    }
    generation = {
        "bos_token_id": tokenizer.token_to_id(BOS),
        "eos_token_id": tokenizer.token_to_id(TURN_END),
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    (directory / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
