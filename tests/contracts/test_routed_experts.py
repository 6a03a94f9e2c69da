"""What routing replay takes from vLLM, held against its Python sources: they are in every build."""

import ast
import importlib.util
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import gpu_package_facts as script


@pytest.fixture(scope="module")
def vllm() -> Path:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None, "vLLM is installed with the stack: run make setup"
    return Path(spec.submodule_search_locations[0])


def fields(path: Path, name: str) -> set[str]:
    """Return the annotated names of a class."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    (found,) = [one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == name]
    return {ast.unparse(one.target) for one in found.body if isinstance(one, ast.AnnAssign)}


def test_the_option_and_the_field_are_there(vllm):
    facts = json.loads(script.TARGET.read_text(encoding="utf-8"))
    assert "enable_return_routed_experts" in facts["server"]["flags"]
    assert "VLLM_USE_V2_MODEL_RUNNER" in facts["server"]["variables"]
    assert "enable_return_routed_experts" in fields(vllm / "engine/arg_utils.py", "EngineArgs")
    assert "routed_experts" in fields(vllm / "outputs.py", "CompletionOutput")


def test_routes_are_tokens_by_layers_by_experts(vllm):
    (line,) = [
        one for one in (vllm / "outputs.py").read_text().splitlines() if "routed_experts: np" in one
    ]
    assert line.partition("#")[2].strip(" []").split(",") == ["seq_len", "layer_num", "topk"]
    # Numbers that two bytes with a sign hold: larger models would need more.
    capturer = (vllm / "model_executor/layers/fused_moe/routed_experts_capturer.py").read_text()
    assert '"uint8" if num_experts <= 256 else "uint16"' in capturer
    # One row for each of all layers of the model, those without experts too.
    assert "num_layers = model_config.get_total_num_hidden_layers()" in capturer


def test_one_model_runner_alone_returns_them(vllm):
    """A CPU has another one, so the setting is refused there; if that changes, allow it."""
    runners = {
        path.parent.name
        for path in (vllm / "v1/worker").rglob("*model_runner*.py")
        if "aux_output_connector" in path.read_text(encoding="utf-8")
    }
    assert runners == {"gpu"}
    needs = (vllm / "config/vllm.py").read_text(encoding="utf-8")
    assert "AuxOutput Connector requires Model Runner V2" in needs
