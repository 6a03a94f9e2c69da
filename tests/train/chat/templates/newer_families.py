"""More families of chat templates, whose calls and thinking are written in forms of their own."""

from collections.abc import Callable
from dataclasses import replace

from tests.train.chat.templates.families import (
    FAMILIES,
    LLAMA_MARKS,
    MISTRAL_MARKS,
    PLAIN_AND_TOOLS,
    PLAIN_ONLY,
    Call,
    Family,
    as_json,
    qwen3_coder,
)


def gemma4_value(value: object) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{gemma4_value(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return f"[{','.join(map(gemma4_value, value))}]"
    return as_json(value)


def gemma4(thinking: str, content: str, calls: tuple[Call, ...]) -> str:
    thought = f"<|channel>thought\n{thinking}<channel|>" if thinking else ""
    blocks = [
        f"<|tool_call>call:{name}{gemma4_value(arguments)}<tool_call|>" for name, arguments in calls
    ]
    return f"{thought}{''.join(blocks)}{content}<turn|>"


def seed_oss(thinking: str, content: str, calls: tuple[Call, ...]) -> str:
    thought = f"<seed:think>{thinking}</seed:think>\n" if thinking else ""
    said = qwen3_coder("", content, calls).removesuffix("<|im_end|>")
    if calls:
        said = said.replace("tool_call>", "seed:tool_call>").replace("</seed:", "</seed:")
    for _, arguments in calls:
        for key, value in arguments.items():
            text = value if isinstance(value, str) else as_json(value)
            said = said.replace(f"={key}>\n{text}\n</", f"={key}>{text}</")
    return f"{thought}{said}<seed:eos>"


def minimax_m2(thinking: str, content: str, calls: tuple[Call, ...]) -> str:
    blocks = [
        f'<invoke name="{name}">\n'
        + "".join(
            f'<parameter name="{key}">{value if isinstance(value, str) else as_json(value)}'
            "</parameter>\n"
            for key, value in arguments.items()
        )
        + "</invoke>\n"
        for name, arguments in calls
    ]
    said = f"\n<minimax:tool_call>\n{''.join(blocks)}</minimax:tool_call>" if calls else ""
    return f"{thinking}\n</think>\n\n{content}{said}[e~["


def kimi_k2(thinking: str, content: str, calls: tuple[Call, ...]) -> str:
    blocks = [
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>"
        f"{as_json(arguments)}<|tool_call_end|>"
        for number, (name, arguments) in enumerate(calls)
    ]
    said = f"<|tool_calls_section_begin|>{''.join(blocks)}<|tool_calls_section_end|>"
    return f"{content}{said if calls else ''}<|im_end|>"


def kimi_k3_part(name: str, body: str, about: str = "") -> str:
    return f"<|open|>{name}{about}<|sep|>{body}<|close|>{name}<|sep|>"


def kimi_k3(thinking: str, content: str, calls: tuple[Call, ...]) -> str:
    thought = f"{thinking}<|close|>think<|sep|>"
    blocks = [
        kimi_k3_part(
            "call",
            "".join(
                kimi_k3_part("argument", value, f' key="{key}" type="string"')
                if isinstance(value, str)
                else kimi_k3_part("argument", as_json(value), f' key="{key}" type="json"')
                for key, value in arguments.items()
            ),
            f' tool="{name}" index="{number}"',
        )
        for number, (name, arguments) in enumerate(calls, 1)
    ]
    tools = kimi_k3_part("tools", "".join(blocks)) if calls else ""
    said = f"{thought}{kimi_k3_part('response', content)}{tools}"
    return f"{said}<|close|>message<|sep|><|end_of_msg|>"


def functionary(thinking: str, content: str, calls: tuple[Call, ...]) -> str:
    blocks = [f"<function={name}>{as_json(arguments)}</function>" for name, arguments in calls]
    return f"{content}{''.join(blocks)}{'<|eom_id|>' if calls else '<|eot_id|>'}"


def apriel(thinking: str, content: str, calls: tuple[Call, ...]) -> str:
    entries = [{"name": name, "arguments": arguments} for name, arguments in calls]
    said = f"\n<tool_calls>{as_json(entries)}</tool_calls>" if calls else ""
    return f"{thinking}\n[BEGIN FINAL RESPONSE]\n{content}{said}\n<|end|>"


def mistral_small(thinking: str, content: str, calls: tuple[Call, ...]) -> str:
    blocks = [
        f"[TOOL_CALLS]{name}[CALL_ID]Own{number:06}[ARGS]{as_json(arguments)}"
        for number, (name, arguments) in enumerate(calls)
    ]
    return f"{content}{''.join(blocks)}</s>"


def reka(thinking: str, content: str, calls: tuple[Call, ...]) -> str:
    blocks = [
        f"<tool_call>\n{as_json({'name': name, 'arguments': arguments})}\n</tool_call>"
        for name, arguments in calls
    ]
    return f" {content}{''.join(blocks)}\n\n<sep>"


def text_parts(thinking: str, content: str, calls: tuple[Call, ...]) -> str:
    return f" {content}<end_of_utterance>"


def granite(thinking: str, content: str, calls: tuple[Call, ...]) -> str:
    return f"{content}<|end_of_text|>"


def in_python(calls: tuple[Call, ...], quote: Callable[[object], str]) -> str:
    blocks = [
        f"{name}({', '.join(f'{key}={quote(value)}' for key, value in arguments.items())})"
        for name, arguments in calls
    ]
    return f"[{', '.join(blocks)}]"


def lfm2(thinking: str, content: str, calls: tuple[Call, ...]) -> str:
    said = f"<|tool_call_start|>{in_python(calls, repr)}<|tool_call_end|>" if calls else ""
    return f"{content}{said}<|im_end|>"


def llama4(thinking: str, content: str, calls: tuple[Call, ...]) -> str:
    said = in_python(calls, lambda value: f'"{value}"') if calls else ""
    return f"{content}{said}<|eot|>"


GEMMA4 = Family(
    name="Gemma 4, enable_thinking = true", template="gemma4", write=gemma4,
    chains={**PLAIN_AND_TOOLS, "thinking": 3, "thinking tools": 2},
    special=["<|turn>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|think|>",
             "<|channel>", "<channel|>"],
    stops=("<turn|>",), bos="<bos>", arguments={"enable_thinking": True},
)  # fmt: skip
NEWER = [
    GEMMA4,
    replace(
        GEMMA4, name="Gemma 4", arguments={}, chains={"multi": 3, "cut": 2, "tools": 3}
    ),
    Family(
        name="LFM2.5", template="lfm2", write=lfm2, chains=PLAIN_AND_TOOLS,
        special=["<|im_start|>", "<|tool_call_start|>", "<|tool_call_end|>", "<|tool_list_start|>",
                 "<|tool_list_end|>", "<|tool_response_start|>", "<|tool_response_end|>"],
        stops=("<|im_end|>",), bos="<|startoftext|>",
    ),
    Family(
        name="Llama 4, pythonic", template="llama4", write=llama4, chains=PLAIN_AND_TOOLS,
        special=["<|header_start|>", "<|header_end|>", "<|python_start|>", "<|python_end|>"],
        stops=("<|eot|>",), bos="<|begin_of_text|>",
    ),
    Family(
        name="Seed-OSS", template="seed_oss", write=seed_oss,
        chains={**PLAIN_AND_TOOLS, "thinking": 1, "thinking tools": 1},
        special=["<seed:bos>", "<seed:think>", "</seed:think>", "<seed:tool_call>",
                 "</seed:tool_call>"],
        stops=("<seed:eos>",),
    ),
    Family(
        name="MiniMax-M2", template="minimax_m2", write=minimax_m2,
        chains={"thinking": 3, "thinking tools": 2}, special=["]~!b[", "]~b]"],
        plain=["<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"],
        stops=("[e~[",),
    ),
    Family(
        name="Kimi-K2", template="kimi_k2", write=kimi_k2, chains=PLAIN_AND_TOOLS,
        special=["<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>",
                 "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
                 "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"],
        stops=("<|im_end|>",), shows_ids=True,
    ),
    Family(
        name="Kimi-K3", template="kimi_k3", write=kimi_k3,
        chains={**PLAIN_AND_TOOLS, "thinking": 1, "thinking tools": 1},
        special=["<|open|>", "<|close|>", "<|sep|>"], stops=("<|end_of_msg|>",),
    ),
    Family(
        name="Functionary 3.1", template="functionary_v3_1", write=functionary,
        chains=PLAIN_AND_TOOLS, special=LLAMA_MARKS, plain=["<function="],
        stops=("<|eot_id|>", "<|eom_id|>"),
        bos="<|begin_of_text|>",
    ),
    Family(
        name="Apriel 1.6", template="apriel_1_6", write=apriel,
        chains={"thinking": 3, "thinking tools": 3},
        special=["<|begin_system|>", "<|begin_user|>", "<|begin_assistant|>",
                 "<|begin_tool_result|>"],
        stops=("<|end|>",),
    ),
    Family(
        name="Mistral Small 3.2", template="mistral_small_3_2", write=mistral_small,
        chains={"multi": 1, "cut": 1, "tools": 2}, special=[*MISTRAL_MARKS, "[CALL_ID]",
                                                            "[TOOL_CONTENT]"],
        stops=("</s>",), bos="<s>", shows_ids=True,
    ),
    Family(
        name="Reka-Edge", template="reka_edge", write=reka, chains=PLAIN_AND_TOOLS,
        plain=["<tool_call>", "</tool_call>"], stops=("<sep>",),
    ),
    Family(
        name="SmolVLM, LLaVA-Next (text parts)", template="text_parts", write=text_parts,
        chains=PLAIN_ONLY, stops=("<end_of_utterance>",), bos="<|im_start|>",
    ),
    Family(
        name="Granite 3.3", template="granite3", write=granite, chains=PLAIN_ONLY,
        special=["<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"],
        stops=("<|end_of_text|>",),
    ),
]  # fmt: skip
ALL_FAMILIES = [*FAMILIES, *NEWER]
ALL_BY_NAME = {family.name: family for family in ALL_FAMILIES}
