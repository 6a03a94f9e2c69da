"""Math reasoning on datasets: the real `datasets` library, a Hub on loopback, a local folder."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlparse

import pytest

pytestmark = pytest.mark.engine
REPO = "acme/sums"
REVISION = "0123456789abcdef0123456789abcdef01234567"


def jsonl(rows: list[dict]) -> bytes:
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


FILES = {
    "README.md": b"---\nlicense: mit\n---\nSums.\n",
    "data/train.jsonl": jsonl(
        [
            {"question": "What is 1+1?", "answer": "One and one.\n#### 2"},
            {"question": "What is 2+2?", "answer": "Two and two.\n#### 4"},
            {"question": "What is 500+700?", "answer": "A lot.\n#### 1,200"},
        ]
    ),
    "data/test.jsonl": jsonl([{"question": "What is 2+2?", "answer": "Two and two.\n#### 4"}]),
}
PROGRAM = """
import json, sys
from telescope_core import Split
from telescope_core.locate import load_environment_class
load = load_environment_class("telescope_env_telescope_math_reasoning:MathReasoning")
environment = load.from_settings(json.loads(sys.argv[1]))
rows = {}
for split in Split:
    source = environment.examples(split)
    examples = [source.example(index) for index in range(source.num_examples)]
    rows[split] = [[e.id, e.prompt, e.answer, environment.gold_answer(e)] for e in examples]
print(json.dumps([rows, environment.dataset_revisions(), environment.network]))
"""


class Hub(BaseHTTPRequestHandler):
    """The few routes of the Hugging Face Hub that loading a dataset uses."""

    requested: list[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlparse(self.path).path)
        self.requested.append(path)
        tree, files = (
            f"/api/datasets/{REPO}/tree/{REVISION}",
            f"/datasets/{REPO}/resolve/{REVISION}",
        )
        if path == f"/api/datasets/{REPO}/revision/{REVISION}":
            siblings = [{"rfilename": name} for name in FILES]
            self.answer(json.dumps({"id": REPO, "sha": REVISION, "siblings": siblings}).encode())
        elif path.startswith(tree):
            folder = path.removeprefix(tree).strip("/")
            self.answer(json.dumps(listing(folder)).encode())
        elif path.removeprefix(f"{files}/") in FILES:
            self.answer(FILES[path.removeprefix(f"{files}/")])
        else:
            self.answer(b"{}", status=404)

    def answer(self, body: bytes, *, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("ETag", f'"{hashlib.sha1(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", REVISION)
        if status == 404:
            self.send_header("X-Error-Code", "EntryNotFound")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


def listing(folder: str) -> list[dict]:
    if not folder:
        top = {"type": "directory", "path": "data", "size": 0, "oid": "d" * 40}
        return [top, entry("README.md")]
    return [entry(name) for name in FILES if name.startswith(f"{folder}/")]


def entry(name: str) -> dict:
    oid = hashlib.sha1(FILES[name]).hexdigest()
    return {"type": "file", "path": name, "size": len(FILES[name]), "oid": oid}


@pytest.fixture
def hub():
    handler = type("RecordingHub", (Hub,), {"requested": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", handler.requested
    server.shutdown()
    server.server_close()
    thread.join(timeout=5)


def load(settings: dict, home: object, **variables: str):
    environ = {**os.environ, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", **variables}
    finished = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(settings)],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout.splitlines()[-1])


def test_a_dataset_of_the_hub_is_loaded_at_its_revision(hub, tmp_path):
    endpoint, requested = hub
    settings = {"dataset": REPO, "dataset_revision": REVISION, "data_folder": str(tmp_path / "d")}
    rows, revisions, network = load(settings, tmp_path / "home", HF_ENDPOINT=endpoint)
    assert [row[1:3] for row in rows["train"]] == [
        ["What is 1+1?", "2"],
        ["What is 500+700?", "1200"],
    ], "the question that is also held out must not be trained on"
    assert [row[1:] for row in rows["eval"]] == [["What is 2+2?", "4", "\\boxed{4}"]]
    assert revisions == {REPO: REVISION}
    assert network == "load"
    assert any(REVISION in path for path in requested)
    assert any((tmp_path / "d").rglob("*.arrow"))


def test_a_local_folder_is_read_by_the_same_library_and_divided(tmp_path):
    folder = tmp_path / "own"
    folder.mkdir()
    rows = [
        {"problem": f"Simplify {n}x.", "solution": f"So \\boxed{{{n}x}}."} for n in range(2, 80)
    ]
    (folder / "train.jsonl").write_bytes(jsonl([*rows, rows[0]]))
    settings = {"dataset": str(folder), "train_split": "train", "eval_split": "train"}
    loaded, revisions, _ = load(settings, tmp_path / "home")
    prompts = {split: [row[1] for row in loaded[split]] for split in loaded}
    assert sorted(prompts["train"] + prompts["eval"]) == sorted(row["problem"] for row in rows)
    assert prompts["eval"]
    assert loaded["eval"][0][2].endswith("x")
    assert revisions == {}
