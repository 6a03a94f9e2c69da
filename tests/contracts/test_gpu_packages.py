"""Our calls against the Python sources of the packages that need a GPU, in their pinned versions.

`gpu_packages.json` holds what the sources say; `make gpu-facts` writes it anew.
"""

import ast
import inspect
import json
import sys
from pathlib import Path

import pytest

from telescope_train.inference.server import ACTIVITIES

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import gpu_package_facts as script

FACTS = json.loads(script.TARGET.read_text(encoding="utf-8"))
NAMES = FACTS["names"]
MOUNTED = {"/metrics", "/v1"}
"""Not routes of vLLM's own: a mounted application, and the beginning of OpenAI's paths."""
BY_INSTANCE = {
    ("weights/nccl.py", "self._communicator"): (
        "vllm.distributed.device_communicators.pynccl:PyNcclCommunicator"
    ),
}
"""What is called through a variable: its class."""


def signature(parameters: list[str]) -> inspect.Signature:
    """Return the signature that the facts describe."""
    kinds, found = inspect.Parameter, list[inspect.Parameter]()
    kind = kinds.POSITIONAL_OR_KEYWORD
    for text in parameters:
        name = text.strip("*=")
        if text.startswith("**"):
            found.append(kinds(name, kinds.VAR_KEYWORD))
        elif text.startswith("*"):
            if name:
                found.append(kinds(name, kinds.VAR_POSITIONAL))
            kind = kinds.KEYWORD_ONLY
        else:
            default = None if text.endswith("=") else inspect.Parameter.empty
            found.append(kinds(name, kind, default=default))
    return inspect.Signature(found)


def problem(call: ast.Call, parameters: list[str], *, is_method: bool) -> str | None:
    """Return why `call` does not fit; None if it does or passes what only a run can tell."""
    if any(isinstance(one, ast.Starred) for one in call.args):
        return None
    given = {one.arg: 0 for one in call.keywords if one.arg is not None}
    bind = signature(parameters)
    unknown = len(given) != len(call.keywords)
    try:
        placed = [0] * (len(call.args) + is_method)
        (bind.bind_partial if unknown else bind.bind)(*placed, **given)
    except TypeError as error:
        return f"{ast.unparse(call)}: {error}; the source has {parameters}"
    return None


def problems(path: Path, own: dict[str, str], facts: dict) -> list[str]:
    """Return what of one file does not fit the facts."""
    inside = path.relative_to(script.SOURCES).as_posix() if path.is_absolute() else str(path)
    found = [
        f"{inside}: {name} is gone, or new here: run make gpu-facts"
        for name in own.values()
        if name not in facts
    ]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            found += overrides(node, own, facts)
        if not isinstance(node, ast.Call):
            continue
        is_method = isinstance(node.func, ast.Attribute)
        attribute = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        owner = ast.unparse(node.func.value) if is_method else ""
        target = own.get(owner) or BY_INSTANCE.get((inside, owner))
        if target in facts and "methods" in facts[target]:
            parameters = facts[target]["methods"].get(attribute)
            if parameters is None and (inside, owner) in BY_INSTANCE:
                found.append(f"{inside}: {target} has no {attribute}")
        else:
            target = own.get(attribute or getattr(node.func, "id", ""))
            known = facts.get(target, {})
            is_method = "methods" in known
            parameters = known.get("parameters") or known.get("methods", {}).get("__init__")
        if parameters is not None and (text := problem(node, parameters, is_method=is_method)):
            found.append(f"{inside}:{node.lineno}: {text}")
    return found


def overrides(node: ast.ClassDef, own: dict[str, str], facts: dict) -> list[str]:
    """Return which methods of our subclass could not be called as vLLM calls its own."""
    found = []
    for base in node.bases:
        plain = base.value if isinstance(base, ast.Subscript) else base
        methods = facts.get(own.get(ast.unparse(plain), ""), {}).get("methods", {})
        for one in node.body:
            if not isinstance(one, ast.FunctionDef) or one.name not in methods:
                continue
            if one.name == "__init__":
                continue
            ours, theirs = script.parameters(one), methods[one.name]
            num_theirs = sum(not text.startswith("*") for text in theirs)
            required = sum(not text.startswith("*") and not text.endswith("=") for text in ours)
            room = sum(not text.startswith("*") for text in ours)
            takes_any = any(text.startswith("*") for text in ours)
            least = sum(not text.startswith("*") and not text.endswith("=") for text in theirs)
            if required > num_theirs or (room < least and not takes_any):
                found.append(f"{node.name}.{one.name}: ours {ours}, theirs {theirs}")
    return found


@pytest.fixture(scope="module")
def imports() -> dict[Path, dict[str, str]]:
    """What each of our files imports of these packages."""
    return script.our_names()[0]


@pytest.mark.slow
def test_every_import_call_and_override_fits_the_pinned_sources(imports):
    found = [text for path, own in imports.items() for text in problems(path, own, NAMES)]
    assert not found, "\n".join(found)
    files = {path.relative_to(script.SOURCES).as_posix() for path in imports}
    assert {file for file, _ in BY_INSTANCE} <= files


def test_options_routes_and_variables_of_the_server_are_there():
    for kind, ours in script.server_uses().items():
        missing = ours - set(FACTS["server"][kind]) - MOUNTED
        assert not missing, f"{kind} that vLLM {FACTS['versions']['vllm']} lacks: {sorted(missing)}"
    assert {"/sleep", "/wake_up", "/update_weights"} <= set(FACTS["server"]["routes"])


def test_vllm_prints_what_tells_how_far_a_server_has_started():
    assert FACTS["server"]["printed"] == [text for text, _ in ACTIVITIES]


def test_the_facts_are_of_the_pinned_versions():
    assert FACTS["versions"] == script.pinned(), "run make gpu-facts"


@pytest.mark.parametrize("name", script.MORE_NAMES)
def test_flash_attention_takes_what_transformers_passes(name):
    takes = {text.strip("=") for text in NAMES[name]["parameters"]}
    assert {"cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"} <= takes
    assert {"softmax_scale", "causal", "window_size", "softcap", "deterministic"} <= takes


@pytest.mark.parametrize(
    ("name", "method", "changed", "said"),
    [
        ("PyNcclCommunicator", "broadcast", ["self", "tensor", "root"], "src"),
        ("PyNcclCommunicator", "destroy", None, "has no destroy"),
        ("StatelessProcessGroup", "create", ["self", "host", "port"], "rank"),
    ],
)
def test_drift_is_seen(imports, name, method, changed, said):
    facts = json.loads(json.dumps(NAMES))
    (full,) = [one for one in facts if one.endswith(f":{name}")]
    if changed is None:
        del facts[full]["methods"][method]
    else:
        facts[full]["methods"][method] = changed
    path = script.SOURCES / "weights" / "nccl.py"
    assert any(said in text for text in problems(path, imports[path], facts))


def test_an_engine_whose_methods_take_more_is_refused(imports):
    facts = json.loads(json.dumps(NAMES))
    (full,) = [one for one in facts if one.endswith(":WeightTransferEngine")]
    facts[full]["methods"]["receive_weights"] = ["self", "update_info", "load_weights"]
    path = script.SOURCES / "weights" / "vllm_extension.py"
    found = problems(path, imports[path], facts)
    assert any("receive_weights" in text for text in found), found


def test_parameters_are_read_from_every_form():
    text = "def f(a, /, b, c=1, *, d, e=2, **more): pass"
    node = ast.parse(text).body[0]
    assert isinstance(node, ast.FunctionDef)
    assert script.parameters(node) == ["a", "b", "c=", "*", "d", "e=", "**more"]
    assert str(signature(script.parameters(node))) == "(a, b, c=None, *, d, e=None, **more)"
