"""Plays all chat templates that the source distribution of llama-cpp-python carries.

Run with `make test-templates`. The templates are downloaded into a cache outside the tree and are
never part of it. Exits with 1 if a play is neither exact, nor branched, nor refused by name.
"""

import os
import re
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

from tests.train.chat.templates.counterparts import COUNTERPARTS, UNCOMPARED
from tests.train.chat.templates.newer_families import ALL_BY_NAME
from tests.train.chat.templates.published_play import PLAYS, TOOLS, Outcome, play
from tests.train.chat.templates.tokenizers_made_here import make_tokenizer

from telescope_core.errors import ConfigError
from telescope_train.chat.message_form import REFUSALS
from telescope_train.chat.renderer import Renderer

PACKAGE = "llama-cpp-python"
INSIDE = "vendor/llama.cpp/models/templates/"
BOS, EOS, PAD = "<|bos-of-test|>", "<|eos-of-test|>", "<|pad-of-test|>"
SPECIAL = re.compile(
    "<\\|[^|<>\\s'\"]+\\|>|<[|\uff5c][^|\uff5c<>\\s'\"]+>|<[^|\uff5c<>/\\s'\"]+[|\uff5c]>"
    "|<\uff5c[^\uff5c<>'\"]+\uff5c>|\\[/?[A-Z][A-Z_]+\\]|<SPECIAL_\\d+>|<[a-z]+:[be]os>"
    "|</?(?:sep|start_of_turn|end_of_turn|beginning_of_sentence|end_of_sentence|end_of_utterance)>"
    '|\\]~!b\\[|\\]~b\\]|\\[e~\\[|<\\|"\\|>'
)
PLAIN = re.compile(r"</?(?:think|tool_call|tool_response|arg_key|arg_value)>")
ENDS = ("<|eom_id|>", "<|call|>", "<|return|>", "<|calls|>", "<|observation|>")
"""Ends of turns other than that of an answer, in the families that have them."""
CLOSERS = ("<|close|>", "<|sep|>", "<|END_RESPONSE|>", "<|END_TEXT|>")
"""Marks behind an answer that end a part of a turn, not the turn."""
THINKING = {"enable_thinking": True, "thinking": True}
"""What families call the variable that turns thinking on."""


def cache_folder() -> Path:
    """Where the templates are kept between runs."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "telescope" / "published-templates"


def published_templates() -> dict[str, str]:
    """Return the templates by name; downloads them with pip unless they are in the cache."""
    folder = cache_folder()
    if not any(folder.glob("*.jinja")):
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
        command += ["--no-binary", PACKAGE, "--dest", str(folder), PACKAGE]
        subprocess.run(command, check=True)
        for archive in folder.glob("*.tar.gz"):
            with tarfile.open(archive) as files:
                for member in files.getmembers():
                    content = files.extractfile(member) if INSIDE in member.name else None
                    if content is not None and member.name.endswith(".jinja"):
                        (folder / Path(member.name).name).write_bytes(content.read())
            archive.unlink()
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.jinja"))}


def renderer_for(template: str, arguments: Mapping[str, Any]) -> Renderer:
    """Return a renderer over a small tokenizer that has the template's own special tokens."""
    ends = [*_end_of_answer(template, arguments), *(end for end in ENDS if end in template), EOS]
    # The models of GLM end a turn with the mark of the role that speaks next.
    ends += ["<|user|>"] if "<|observation|>" in template else []
    special = sorted({*SPECIAL.findall(template), *ends})
    tokenizer = make_tokenizer(
        kind="bytes",
        template=template,
        special=special,
        plain=[mark for mark in sorted(set(PLAIN.findall(template))) if mark not in special],
        bos=BOS,
        eos=EOS,
        pad=PAD,
        takes_space=False,
    )
    stops = [tokenizer.convert_tokens_to_ids(end) for end in dict.fromkeys(ends)]
    return Renderer(tokenizer, stop_token_ids=stops, arguments=arguments)


def _end_of_answer(template: str, arguments: Mapping[str, Any]) -> list[str]:
    """Return the token behind an answer in history, which is where the model ends it."""
    tokenizer = make_tokenizer(
        kind="bytes", template=template, special=[], plain=[], bos=BOS, eos=EOS, pad=PAD,
        takes_space=False,
    )  # fmt: skip
    asked = {"role": "user", "content": "u"}
    in_parts = {"role": "user", "content": [{"type": "text", "text": "u"}]}
    for user, content in (
        (asked, "AN-ANSWER"),
        (in_parts, [{"type": "text", "text": "AN-ANSWER"}]),
    ):
        answer = {"role": "assistant", "content": content}
        told = [[user, answer], [user, answer, user]]
        for messages, tools in product(told, (None, TOOLS)):
            with suppress(*REFUSALS):
                text = tokenizer.apply_chat_template(
                    messages, tools=tools, tokenize=False, **arguments
                )
                behind = text.partition("AN-ANSWER")[2]
                ends = re.findall(rf"{SPECIAL.pattern}|</[a-z]+>", behind)
                found = [end for end in ends if end not in CLOSERS]
                if found:
                    return found[:1]
    return []


def outcomes(template: str, own: Mapping[str, Any] | None = None) -> dict[str, Outcome]:
    """Return how each play of `template` ends; `own` are variables of the template."""
    found: dict[str, Outcome] = {}
    for name, script in PLAYS.items():
        arguments = own if own is not None else THINKING if "thinking" in name else {}
        try:
            found[name] = play(renderer_for(template, arguments), script)
        except ConfigError as error:
            found[name] = Outcome(kind="refused", why=str(error))
    return found


def wrong_counterparts(templates: Mapping[str, str]) -> list[str]:
    """Return where the recorded differences between fixtures and published templates are wrong."""
    wrong: list[str] = []
    for family, counterpart in COUNTERPARTS.items():
        fixture = ALL_BY_NAME[family]
        ours = outcomes(fixture.source(), fixture.arguments)
        theirs = outcomes(templates.get(counterpart.name, ""), fixture.arguments)
        differs = tuple(play for play in PLAYS if ours[play].kind != theirs[play].kind)
        if differs != counterpart.differs:
            wrong.append(f"{family}: recorded as {counterpart.text}, but it differs in {differs}")
    for family, uncompared in UNCOMPARED.items():
        for name in templates:
            if any(word.lower() in name.lower() for word in uncompared.words):
                wrong.append(f"{family}: recorded as {uncompared.text}, but there is {name}")
    return wrong


def main() -> int:
    """Print a table of all plays and what was refused; return the exit status."""
    templates = published_templates()
    found = {name: outcomes(template) for name, template in templates.items()}
    wrong = wrong_counterparts(templates)
    print("| template | " + " | ".join(PLAYS) + " |\n|" + "---|" * (len(PLAYS) + 1))
    for name, kinds in found.items():
        print(f"| {name} | " + " | ".join(one.kind for one in kinds.values()) + " |")
    print()
    for name, kinds in found.items():
        for why in dict.fromkeys(f"{one.kind}: {one.why}" for one in kinds.values() if one.why):
            plays = [play for play, one in kinds.items() if f"{one.kind}: {one.why}" == why]
            print(f"{name} ({', '.join(plays)}): {why}")
    counts = Counter(one.kind for kinds in found.values() for one in kinds.values())
    print(f"\n{len(templates)} templates, plays: {dict(counts)}")
    for line in wrong:
        print(f"counterparts.py: {line}")
    return 1 if counts["FAULT"] or wrong or not templates else 0


if __name__ == "__main__":
    sys.exit(main())
