"""A tiny model that has learnt by heart to call the calculator and to guess a word."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen3ForCausalLM

from telescope_core import Message, Split
from telescope_env_telescope_tool_calculator import ToolCalculator
from telescope_env_telescope_wordle import Wordle

CALL = {"name": "calculate", "arguments": {"left": 3, "operation": "+", "right": 4}}
CALLS = f"<tool_call>{json.dumps(CALL)}</tool_call>"
GUESS = "<guess>crane</guess>"
NUM_STEPS = 11
NUM_SUMS = 10
"""Their prompts differ in length: what is learnt must not hang on the place."""


def teach(source: Path, target: Path) -> Path:
    """Write a copy of the tiny model at `source` that calls and guesses to `target`."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = Qwen3ForCausalLM.from_pretrained(source, dtype=torch.float32)
    rows = [encode(tokenizer, messages) for messages in conversations()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(NUM_STEPS):
        for ids, labels in rows:
            loss = model(input_ids=ids, labels=labels).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target


def conversations() -> list[list[Message]]:
    calculator, wordle = ToolCalculator(ToolCalculator.Config(num_steps=1)), Wordle()
    response = Message(role="user", content="<tool_response>\n7\n</tool_response>")
    said: list[list[Message]] = []
    for index in range(NUM_SUMS):
        sums = calculator.initial_messages(calculator.examples(Split.TRAIN).example(index))
        said.append([*sums, says(CALLS), response, says("7")])
    words = wordle.initial_messages(wordle.examples(Split.TRAIN).example(0))
    return [*said, [*words, says(GUESS)]]


def says(text: str) -> Message:
    return Message(role="assistant", content=text)


def encode(tokenizer, messages: Sequence[Message]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and labels `[1, T]`; only what the assistant says, with its end, is a label."""
    ids: list[int] = []
    labels: list[int] = []
    for message in messages:
        text = f"<|{message.role}|>{message.content}<|end|>"
        turn = tokenizer.encode(text, add_special_tokens=False)
        ids += turn
        is_said = message.role == "assistant"
        labels += [-100, *turn[1:]] if is_said else [-100] * len(turn)
    return torch.tensor([ids]), torch.tensor([labels])
