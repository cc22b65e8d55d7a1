"""Chat templates in the styles of well-known models, in our own words, and a small tokenizer that knows their tokens.

Each style is one text. `plain` is as models publish theirs; `marked` has `{% generation %}` around what the assistant
writes, so that transformers and trl say which tokens are learned.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from support.models.made_tokenizers import QWEN2_PATTERN, docstrings

SPECIAL = [
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|im_start|>",
    "<|im_end|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<bos>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|channel|>",
    "<|return|>",
    "<|call|>",
]


@dataclass(frozen=True)
class ChatStyle:
    """One style. In `text`, GEN and END are where the generation block begins and ends."""

    text: str
    tokens: dict[str, str] = field(default_factory=dict)
    kind: str = "byte"
    system: bool = True

    @property
    def plain(self) -> str:
        return self.text.replace("GEN", "").replace("END", "")

    @property
    def marked(self) -> str:
        return self.text.replace("GEN", "{%- generation %}").replace("END", "{%- endgeneration %}")


LLAMA3 = ChatStyle(
    """
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
    {%- if message.role == 'assistant' %}
        GEN{{- message.content | trim + '<|eot_id|>' }}END
    {%- else %}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
""",
    {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
)
CHATML = ChatStyle(
    """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        GEN{{- message.content + '<|im_end|>\\n' }}END
    {%- else %}
        {{- message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
""",
    {"eos_token": "<|im_end|>"},
)
QWEN25 = ChatStyle(
    """
{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}{%- endif %}
{%- if tools %}{{- '<|im_start|>system\\n<tools>\\n' }}{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
    {{- '</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        GEN{{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' ~ call.function.name ~ '", "arguments": ' }}
            {{- call.function.arguments | tojson ~ '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}END
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
""",
    {"eos_token": "<|im_end|>"},
)
# Thinking is written for answers after the last question only, and always for the very last message.
QWEN3 = ChatStyle(
    """
{%- set ns = namespace(last_question=0) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last_question = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set thinking = message.reasoning_content or '' %}
        {%- set content = message.content %}
        {%- if not thinking and '</think>' in content %}
            {%- set thinking = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        GEN{%- if loop.index0 > ns.last_question and (loop.last or thinking) %}
            {{- '<think>\\n' + thinking.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content.lstrip('\\n') + '<|im_end|>\\n' }}END
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
""",
    {"eos_token": "<|im_end|>"},
)
# As Mistral's third version: the system prompt stands in the last question, so that earlier questions change.
MISTRAL = ChatStyle(
    """
{%- set system = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' %}
{%- set turns = messages[1:] if messages[0].role == 'system' else messages %}
{%- set ns = namespace(last=0) %}
{%- for message in turns %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{{- bos_token }}
{%- for message in turns %}
    {%- if message.role == 'user' %}
        {{- '[INST]' + ' ' + (system if loop.index0 == ns.last else '') + message.content + '[/INST]' }}
    {%- elif message.role == 'assistant' %}
        GEN{{- ' ' + message.content | trim + eos_token }}END
    {%- endif %}
{%- endfor %}
""",
    {"bos_token": "<s>", "eos_token": "</s>"},
    kind="space",
)
GEMMA = ChatStyle(
    """
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate') }}
    {%- endif %}
    {{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
    {%- if message.role == 'assistant' %}
        GEN{{- message.content | trim + '<end_of_turn>\\n' }}END
    {%- else %}
        {{- message.content | trim + '<end_of_turn>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}
""",
    {"bos_token": "<bos>", "eos_token": "<end_of_turn>"},
    kind="space",
    system=False,
)
# Earlier thinking goes, and earlier answers end with another token than the last.
GPT_OSS = ChatStyle(
    """
{{- '<|start|>system<|message|>Knowledge cutoff: 2024-06\\nCurrent date: ' + strftime_now('%Y-%m-%d') + '<|end|>' }}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {{- '<|start|>developer<|message|># Instructions\\n\\n' + message.content + '<|end|>' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|start|>assistant' }}
        GEN{%- if loop.last and message.thinking %}
            {{- '<|channel|>analysis<|message|>' + message.thinking + '<|end|><|start|>assistant' }}
        {%- endif %}
        {{- '<|channel|>final<|message|>' + message.content + ('<|return|>' if loop.last else '<|end|>') }}END
    {%- else %}
        {{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
""",
    {"eos_token": "<|return|>"},
)
STYLES = {
    "llama3": LLAMA3,
    "chatml": CHATML,
    "qwen2.5": QWEN25,
    "qwen3": QWEN3,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "gpt-oss": GPT_OSS,
}


@cache
def tokenizer_json(kind: str = "byte") -> str:
    """A byte-level BPE as Qwen's and Llama's, or one that marks spaces and falls back to bytes as Gemma's does."""
    bytes_as_tokens = [f"<0x{number:02X}>" for number in range(256)]
    if kind == "byte":
        made = Tokenizer(models.BPE())
        made.normalizer = normalizers.NFC()
        made.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(pattern=Regex(QWEN2_PATTERN), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        made.decoder = decoders.ByteLevel()
        made.post_processor = processors.ByteLevel(trim_offsets=False)
        specials, alphabet = SPECIAL, sorted(pre_tokenizers.ByteLevel.alphabet())
    else:
        made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        made.normalizer = normalizers.Replace(" ", "▁")
        made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        specials, alphabet = ["<unk>", *SPECIAL, *bytes_as_tokens], []
    trainer = trainers.BpeTrainer(
        vocab_size=1200, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(docstrings()[:400], trainer)
    body = json.loads(made.to_str())
    # Bytes are tokens that only the fallback makes: `<0x0A>` in a text is not one.
    body["added_tokens"] = [token for token in body["added_tokens"] if token["content"] not in bytes_as_tokens]
    return json.dumps(body)


def write_tokenizer(folder: Path, template: str | None = None, *, kind: str = "byte", **config: Any) -> Path:
    """Write a tokenizer folder with a chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer_json(kind))
    body = {"tokenizer_class": "PreTrainedTokenizerFast"} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(body))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def write_style(folder: Path, style: ChatStyle, *, marked: bool = False, **config: Any) -> Path:
    """Write the tokenizer of a style."""
    template = style.marked if marked else style.plain
    return write_tokenizer(folder, template, kind=style.kind, **style.tokens | config)


def conversations(*, system: bool = True) -> list[list[dict[str, Any]]]:
    """Conversations of one and of several turns, with odd text in them."""
    texts = docstrings()
    question, answer = "What's 2 < 3 & 'so'?\n", "Yes. ß 😀 cafe\u0301 日本"
    made: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": question}, {"role": "assistant", "content": answer}],
        [
            {"role": "user", "content": texts[3]},
            {"role": "assistant", "content": texts[4]},
            {"role": "user", "content": "And then?"},
            {"role": "assistant", "content": "a <|im_sta b\n\n    code()\n"},
            {"role": "user", "content": texts[5]},
            {"role": "assistant", "content": texts[6]},
        ],
        [
            {"role": "user", "content": "again"},
            {"role": "assistant", "content": "again"},
            {"role": "user", "content": "again"},
            {"role": "assistant", "content": "again"},
        ],
    ]
    if system:
        made += [[{"role": "system", "content": "Be brief."}, *messages] for messages in made]
    return made
