"""The families of chat templates in use today: their tokens, and how their models write a reply.

Each fixture is written here from the documented format of the family; none is a model's own file.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from tests.train.chat.templates.tokenizers_made_here import FIXTURES, make_tokenizer

from telescope_train.chat.renderer import Renderer

Call = tuple[str, dict[str, object]]
Write = Callable[[str, str, tuple[Call, ...]], str]
"""(thinking, content, calls) -> what the model writes, its end-of-turn token included."""
as_json = partial(json.dumps, ensure_ascii=False)
"""As `tojson` writes it in templates."""
Encode = Callable[[str], list[int]]
BAR, GAP = "\uff5c", "\u2581"


def deepseek_mark(part: str) -> str:
    return f"<{BAR}{part.replace(' ', GAP)}{BAR}>"


END_OF_SENTENCE = deepseek_mark("end of sentence")
DEEPSEEK_MARKS = [
    deepseek_mark(part)
    for part in (
        *("User", "Assistant", "tool calls begin", "tool calls end", "tool call begin"),
        *("tool call end", "tool sep", "tool outputs begin", "tool outputs end"),
        *("tool output begin", "tool output end"),
    )
]


_TOKENIZERS: dict[str, object] = {}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A chat template and what to expect of it."""

    name: str
    template: str
    write: Write
    chains: Mapping[str, int]
    """Scenario -> training samples that one rollout of it becomes. 1 = the prefix is kept. A
    scenario that is not named is one the template cannot say."""
    kind: str = "bytes"
    special: list[str] = field(default_factory=list)
    plain: list[str] = field(default_factory=list)
    stops: tuple[str, ...]
    bos: str | None = None
    eos: str | None = None
    """None = the first of the stops."""
    pad: str = "<|pad|>"
    arguments: Mapping[str, object] = field(default_factory=dict)
    takes_space: bool = False
    takes_system: bool = True
    text: str = ""
    """A template in place of the fixture."""
    shows_ids: bool = False
    """The template writes the ids of calls, which no model samples."""

    def with_template(self, text: str, arguments: Mapping[str, object]) -> "Family":
        """Return this family with another template."""
        return replace(self, name=f"{self.name} {arguments}", text=text, arguments=arguments)

    def source(self) -> str:
        """Return the text of the template."""
        return self.text or (FIXTURES / f"{self.template}.jinja").read_text()

    def tokenizer(self):
        """Return the tokenizer, made once: nobody changes it."""
        if self.name not in _TOKENIZERS:
            _TOKENIZERS[self.name] = make_tokenizer(
                kind=self.kind,
                template=self.source(),
                special=[*self.special, *self.stops],
                plain=self.plain,
                bos=self.bos,
                eos=self.eos or self.stops[0],
                pad=self.pad,
                takes_space=self.takes_space,
            )
        return _TOKENIZERS[self.name]

    def continue_with(self, text: str, encode: Encode | None = None) -> list[int]:
        """Return the ids of `text` in the middle of a conversation."""
        tokenizer = self.tokenizer()
        ids = (encode or partial(tokenizer.encode, add_special_tokens=False))(self.pad + text)
        return ids[1:]

    def renderer(self, **changes: object) -> Renderer:
        tokenizer = self.tokenizer()
        stops = [tokenizer.convert_tokens_to_ids(stop) for stop in self.stops]
        return Renderer(tokenizer, stop_token_ids=stops, arguments=self.arguments, **changes)


def hermes(calls: tuple[Call, ...], content: str) -> str:
    blocks = [
        "<tool_call>\n" + as_json({"name": name, "arguments": arguments}) + "\n</tool_call>"
        for name, arguments in calls
    ]
    return "\n".join([*([content] if content else []), *blocks])


def chatml(thinking: str, content: str, calls: tuple[Call, ...]) -> str:
    return f"{hermes(calls, content)}<|im_end|>"


def qwen3(thinking: str, content: str, calls: tuple[Call, ...]) -> str:
    thought = f"<think>\n{thinking}\n</think>\n\n" if thinking else ""
    return thought + chatml("", content, calls)


def qwen3_begun(thinking: str, content: str, calls: tuple[Call, ...]) -> str:
    return f"{thinking}\n</think>\n\n" + chatml("", content, calls)


def qwen3_coder(thinking: str, content: str, calls: tuple[Call, ...]) -> str:
    blocks = [
        f"<tool_call>\n<function={name}>\n"
        + "".join(
            f"<parameter={key}>\n{value if isinstance(value, str) else as_json(value)}\n"
            "</parameter>\n"
            for key, value in arguments.items()
        )
        + "</function>\n</tool_call>"
        for name, arguments in calls
    ]
    return "\n".join([*([content] if content else []), *blocks]) + "<|im_end|>"


def llama(thinking: str, content: str, calls: tuple[Call, ...]) -> str:
    for name, arguments in calls:
        return as_json({"name": name, "parameters": arguments}) + "<|eot_id|>"
    return f"{content}<|eot_id|>"


def mistral_v3(thinking: str, content: str, calls: tuple[Call, ...]) -> str:
    if calls:
        entries = [{"name": name, "arguments": arguments} for name, arguments in calls]
        return f"[TOOL_CALLS] {as_json(entries)}</s>"
    return f" {content}</s>"


def mistral_tekken(thinking: str, content: str, calls: tuple[Call, ...]) -> str:
    blocks = [f"[TOOL_CALLS]{name}[ARGS]{as_json(arguments)}" for name, arguments in calls]
    return f"{content}{''.join(blocks)}</s>"


def gemma(thinking: str, content: str, calls: tuple[Call, ...]) -> str:
    return f"{content}<end_of_turn>"


def deepseek_calls(calls: tuple[Call, ...], *, fenced: bool) -> str:
    begin, end = deepseek_mark("tool call begin"), deepseek_mark("tool call end")
    separator = deepseek_mark("tool sep")
    blocks = [
        f"{begin}function{separator}{name}\n```json\n{as_json(arguments)}\n```{end}"
        if fenced
        else f"{begin}{name}{separator}{as_json(arguments)}{end}"
        for name, arguments in calls
    ]
    inside = ("\n" if fenced else "").join(blocks)
    around = (deepseek_mark("tool calls begin"), deepseek_mark("tool calls end"))
    return f"{around[0]}{inside}{around[1]}" if calls else ""


def deepseek_r1(thinking: str, content: str, calls: tuple[Call, ...]) -> str:
    thought = f"{thinking}\n</think>\n\n" if thinking else ""
    return thought + content + deepseek_calls(calls, fenced=True) + END_OF_SENTENCE


def deepseek_v3_1(thinking: str, content: str, calls: tuple[Call, ...]) -> str:
    thought = f"{thinking}</think>" if thinking else ""
    return thought + content + deepseek_calls(calls, fenced=False) + END_OF_SENTENCE


def phi4_mini(thinking: str, content: str, calls: tuple[Call, ...]) -> str:
    entries = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return content + (f"<|tool_call|>{as_json(entries)}<|/tool_call|>" if calls else "") + "<|end|>"


def harmony(thinking: str, content: str, calls: tuple[Call, ...]) -> str:
    thought = (
        f"<|channel|>analysis<|message|>{thinking}<|end|><|start|>assistant" if thinking else ""
    )
    for name, arguments in calls:
        return (
            f"{thought} to=functions.{name}<|channel|>commentary json<|message|>"
            f"{as_json(arguments)}<|call|>"
        )
    return f"{thought}<|channel|>final<|message|>{content}<|return|>"


def command(thinking: str, content: str, calls: tuple[Call, ...]) -> str:
    thought = f"<|START_THINKING|>{thinking}<|END_THINKING|>" if thinking else ""
    entries = [
        f'\n    {{"tool_call_id": "{number}", "tool_name": "{name}", "parameters": '
        f"{as_json(arguments)}}}"
        for number, (name, arguments) in enumerate(calls)
    ]
    said = f"<|START_RESPONSE|>{content}<|END_RESPONSE|>"
    if calls:
        said = f"<|START_ACTION|>[{','.join(entries)}\n]<|END_ACTION|>"
    return f"{thought}{said}<|END_OF_TURN_TOKEN|>"


def glm(thinking: str, content: str, calls: tuple[Call, ...]) -> str:
    blocks = [
        f"\n<tool_call>{name}"
        + "".join(
            f"\n<arg_key>{key}</arg_key>\n<arg_value>"
            f"{value if isinstance(value, str) else as_json(value)}</arg_value>"
            for key, value in arguments.items()
        )
        + "\n</tool_call>"
        for name, arguments in calls
    ]
    said = f"\n{content}" if content else ""
    return f"\n<think>{thinking}</think>{said}{''.join(blocks)}" + (
        "<|observation|>" if calls else "<|user|>"
    )


CHATML_MARKS = ["<|im_start|>"]
QWEN_PLAIN = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
LLAMA_MARKS = ["<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>", "<|end_of_text|>"]
MISTRAL_MARKS = [
    *("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[ARGS]"),
]
COMMAND_MARKS = [
    *("<|START_OF_TURN_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"),
    *("<|START_THINKING|>", "<|END_THINKING|>", "<|START_ACTION|>", "<|END_ACTION|>"),
    *("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TOOL_RESULT|>", "<|END_TOOL_RESULT|>"),
]
PLAIN_ONLY = {"multi": 1, "cut": 1}
PLAIN_AND_TOOLS = {**PLAIN_ONLY, "tools": 1}
QWEN3_CHAINS = {"multi": 1, "cut": 1, "tools": 1, "thinking": 3, "thinking tools": 2}

FAMILIES = [
    Family(
        name="SmolLM (ChatML)", template="chatml", write=chatml, chains=PLAIN_ONLY,
        special=CHATML_MARKS, stops=("<|im_end|>",), pad="<|im_end|>",
    ),
    Family(
        name="Qwen2.5", template="qwen2_5", write=chatml, chains=PLAIN_AND_TOOLS,
        special=CHATML_MARKS, plain=QWEN_PLAIN[:2], stops=("<|im_end|>", "<|endoftext|>"),
        pad="<|endoftext|>",
    ),
    Family(
        name="Qwen3, thinking", template="qwen3", write=qwen3, chains=QWEN3_CHAINS,
        special=CHATML_MARKS, plain=QWEN_PLAIN, stops=("<|im_end|>", "<|endoftext|>"),
    ),
    Family(
        name="Qwen3, enable_thinking = false", template="qwen3", write=qwen3,
        chains={"multi": 3, "cut": 2, "tools": 3}, special=CHATML_MARKS, plain=QWEN_PLAIN,
        stops=("<|im_end|>",), arguments={"enable_thinking": False},
    ),
    Family(
        name="Qwen3-Thinking-2507", template="qwen3_thinking_2507", write=qwen3_begun,
        chains={"thinking": 3, "thinking tools": 2}, special=CHATML_MARKS, plain=QWEN_PLAIN,
        stops=("<|im_end|>",),
    ),
    Family(
        name="Qwen3-Instruct-2507", template="qwen3_instruct_2507", write=chatml,
        chains=PLAIN_AND_TOOLS, special=CHATML_MARKS, plain=QWEN_PLAIN, stops=("<|im_end|>",),
    ),
    Family(
        name="Qwen3-Coder", template="qwen3_coder", write=qwen3_coder, chains=PLAIN_AND_TOOLS,
        special=CHATML_MARKS, plain=QWEN_PLAIN, stops=("<|im_end|>",),
    ),
    Family(
        name="Llama 3.1", template="llama3_1", write=llama, chains=PLAIN_AND_TOOLS,
        special=LLAMA_MARKS, stops=("<|eot_id|>", "<|eom_id|>"), bos="<|begin_of_text|>",
        pad="<|eot_id|>",
    ),
    Family(
        name="Llama 3.2", template="llama3_2", write=llama, chains=PLAIN_AND_TOOLS,
        special=LLAMA_MARKS, stops=("<|eot_id|>", "<|eom_id|>"), bos="<|begin_of_text|>",
    ),
    Family(
        name="Mistral v3", template="mistral_v3", write=mistral_v3,
        chains={"multi": 1, "cut": 1, "tools": 2}, kind="sentencepiece", special=MISTRAL_MARKS,
        stops=("</s>",), bos="<s>", pad="</s>", takes_system=False, shows_ids=True,
    ),
    Family(
        name="Mistral v3, system message", template="mistral_v3", write=mistral_v3,
        chains={"multi": 3, "cut": 2}, kind="sentencepiece", special=MISTRAL_MARKS,
        stops=("</s>",), bos="<s>", pad="</s>", shows_ids=True,
    ),
    Family(
        name="Mistral v7 and later (Tekken)", template="mistral_tekken", write=mistral_tekken,
        chains=PLAIN_AND_TOOLS, special=MISTRAL_MARKS, stops=("</s>",), bos="<s>",
    ),
    Family(
        name="Gemma 2", template="gemma2", write=gemma, chains=PLAIN_ONLY, kind="sentencepiece",
        special=["<start_of_turn>"], stops=("<end_of_turn>", "<eos>"), bos="<bos>",
        takes_system=False,
    ),
    Family(
        name="Gemma 3", template="gemma3", write=gemma, chains=PLAIN_ONLY, kind="sentencepiece",
        special=["<start_of_turn>"], stops=("<end_of_turn>", "<eos>"), bos="<bos>",
    ),
    Family(
        name="DeepSeek-R1", template="deepseek_r1", write=deepseek_r1,
        chains={"thinking": 3, "thinking tools": 3}, special=DEEPSEEK_MARKS,
        plain=["<think>", "</think>"], stops=(END_OF_SENTENCE,),
        bos=deepseek_mark("begin of sentence"), pad=END_OF_SENTENCE,
    ),
    Family(
        name="DeepSeek-V3.1, thinking = false", template="deepseek_v3_1", write=deepseek_v3_1,
        chains=PLAIN_AND_TOOLS, special=DEEPSEEK_MARKS, plain=["<think>", "</think>"],
        stops=(END_OF_SENTENCE,), bos=deepseek_mark("begin of sentence"),
    ),
    Family(
        name="DeepSeek-V3.1, thinking = true", template="deepseek_v3_1", write=deepseek_v3_1,
        chains={"thinking": 3, "thinking tools": 3}, special=DEEPSEEK_MARKS,
        plain=["<think>", "</think>"], stops=(END_OF_SENTENCE,),
        bos=deepseek_mark("begin of sentence"), arguments={"thinking": True},
    ),
    Family(
        name="Phi-4", template="phi4", write=chatml, chains=PLAIN_ONLY,
        special=["<|im_start|>", "<|im_sep|>"], stops=("<|im_end|>", "<|endoftext|>"),
    ),
    Family(
        name="Phi-4-mini", template="phi4_mini", write=phi4_mini, chains=PLAIN_AND_TOOLS,
        special=["<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|/tool|>",
                 "<|tool_call|>", "<|/tool_call|>"],
        stops=("<|end|>", "<|endoftext|>"), eos="<|endoftext|>", pad="<|endoftext|>",
    ),
    Family(
        name="Phi-3", template="phi3", write=phi4_mini, chains=PLAIN_ONLY, kind="sentencepiece",
        special=["<|system|>", "<|user|>", "<|assistant|>"], stops=("<|end|>", "<|endoftext|>"),
        takes_space=True,
    ),
    Family(
        name="Zephyr", template="phi3", write=phi4_mini, chains=PLAIN_ONLY, kind="sentencepiece",
        special=["<|system|>", "<|user|>", "<|assistant|>"], stops=("<|end|>",),
    ),
    Family(
        name="gpt-oss", template="gpt_oss", write=harmony,
        chains={"multi": 3, "cut": 1, "tools": 2, "thinking": 3, "thinking tools": 2},
        special=["<|start|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|end|>"],
        stops=("<|return|>", "<|call|>"),
    ),
    Family(
        name="Command R7B", template="command_r7b", write=command,
        chains={**PLAIN_AND_TOOLS, "thinking": 1, "thinking tools": 1}, special=COMMAND_MARKS,
        stops=("<|END_OF_TURN_TOKEN|>",), bos="<BOS_TOKEN>",
    ),
    Family(
        name="GLM-4.5", template="glm4_5", write=glm,
        chains={"multi": 1, "cut": 1, "tools": 1, "thinking": 3, "thinking tools": 2},
        special=["[gMASK]", "<sop>", "<|system|>", "<|assistant|>"],
        plain=[*QWEN_PLAIN, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
        stops=("<|user|>", "<|observation|>", "<|endoftext|>"),
    ),
]  # fmt: skip
BY_NAME = {family.name: family for family in FAMILIES}
