"""Task folders of Harbor, written for the tests."""

from pathlib import Path

GRADE = """#!/bin/bash
if [ "$(tr -d ' \\n' < /app/count)" = "$RIGHT" ]; then r=1; else r=0; fi
mkdir -p /logs/verifier
echo $r > /logs/verifier/reward.txt
exit 7
"""
TABLE = """
version = "1.0"
[metadata]
author_name = "somebody"
[agent]
timeout_sec = 30.0
[verifier]
timeout_sec = 60.0
[verifier.env]
RIGHT = "3"
[environment]
memory = "256M"
"""
DOCKERFILE = """# Counts lines.
FROM python:3.12-slim
ENV MARK=yes \\
    WHERE=/app
WORKDIR ${WHERE}
COPY words notes/ ./
COPY --chmod=755 say.sh /workspace/
RUN mkdir -p out && wc -l < words > out/seen && echo "$MARK" >> out/seen
CMD ["bash"]
"""


def write_task(
    folder: Path,
    *,
    table: str = TABLE,
    tests: str = GRADE,
    solution: str = "wc -l < words > count\n",
    dockerfile: str = DOCKERFILE,
    more: dict[str, str] | None = None,
) -> Path:
    """Write a task folder and return it; a file without text is left out."""
    files = {
        "task.toml": table,
        "instruction.md": "Write how many lines `words` has to `count`.\n\n{task} stays.\n",
        "tests/test.sh": tests,
        "solution/solve.sh": solution,
        "environment/Dockerfile": dockerfile,
        "environment/words": "a\nb\nc\n",
        "environment/notes/one": "1\n",
        "environment/say.sh": "#!/bin/sh\necho said\n",
        **(more or {}),
    }
    for name, text in files.items():
        if text:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return folder
