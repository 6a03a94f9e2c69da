"""Everything that backend megatron calls is in both versions of megatron-core that are pinned.

Held against their Python sources, which need neither a GPU nor Python 3.12: the one that is
installed, and the one of newer Pythons, which set-up keeps beside it. What the backend imports and
calls is read from its own sources; methods of what the library returns are listed here.
"""

import ast
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import telescope_train.backends.megatron as backend

sys.path.insert(0, str(Path(__file__).parent))
from library_sources import Found, Sources

pytestmark = pytest.mark.slow
OWN = Path(backend.__file__).parent
INSTALLED = Path(next(iter(importlib.util.find_spec("megatron").submodule_search_locations))).parent
NEWER = Path(sys.prefix) / "newer-megatron"
VERSIONS = {"of Python 3.11": INSTALLED, "of newer Pythons": NEWER}
MODEL = "megatron.core.models.gpt.gpt_model", "GPTModel"
WRAPPER = "megatron.core.distributed", "DistributedDataParallel"
BUCKETS = "megatron.core.distributed.param_and_grad_buffer", "_ParamAndGradBucketGroup"
OPTIMIZER = "megatron.core.optimizer.optimizer", "MegatronOptimizer"
MIXED = "megatron.core.optimizer.optimizer", "MixedPrecisionOptimizer"
SHARED = "megatron.core.optimizer.distrib_optimizer", "DistributedOptimizer"
CHAIN = "megatron.core.optimizer.optimizer", "ChainedOptimizer"
OFFLOADING = "megatron.core.optimizer.cpu_offloading.hybrid_optimizer", "HybridDeviceOptimizer"
STRATEGY = "megatron.core.dist_checkpointing.strategies.torch", "TorchDistSaveShardedStrategy"
MEMBERS = {
    MODEL: {
        "_postprocess": ("hidden_states", "labels"),
        "shared_embedding_or_output_weight": (),
        "rotary_pos_emb": None,
        "embedding": None,
        "output_layer": None,
        "forward": (
            *("input_ids", "position_ids", "attention_mask", "labels"),
            "packed_seq_params",
        ),
        "sharded_state_dict": ("prefix", "metadata"),
    },
    WRAPPER: {
        **dict.fromkeys(("zero_grad_buffer", "no_sync"), ()),
        **dict.fromkeys(("offload_grad_buffers", "restore_grad_buffers"), ()),
        **dict.fromkeys(("buffers", "expert_parallel_buffers", "bucket_groups"), None),
        **dict.fromkeys(("expert_parallel_bucket_groups", "ddp_config", "module"), None),
    },
    BUCKETS: {"buckets": None, "intra_distributed_optimizer_instance_group": None},
    OPTIMIZER: {
        **dict.fromkeys(("zero_grad", "prepare_grads", "step_with_ready_grads"), ()),
        **dict.fromkeys(("get_grad_norm", "load_state_dict"), ()),
        "sharded_state_dict": ("model_sharded_state_dict", "is_loading", "metadata"),
    },
    MIXED: {"optimizer": None, "config": None},
    SHARED: {
        "_set_main_param_and_optimizer_states": ("model_param", "tensors"),
        "model_param_group_index_map": None,
    },
    CHAIN: {"chained_optimizers": None, "param_groups": None},
    OFFLOADING: {"sub_optimizers": None, "_move_new_state_to_right_device": ()},
    STRATEGY: {"save": ("sharded_state_dict", "checkpoint_dir")},
    ("megatron.core.dist_checkpointing", "ShardedTensor"): {
        "from_rank_offsets": ("key", "data", "replica_id", "prepend_axis_num")
    },
    ("megatron.core.transformer.moe.experts", "SequentialMLP"): {
        "forward": ("permuted_local_hidden_states", "tokens_per_expert", "permuted_probs")
    },
}
"""Class -> its members that are used, and the names of what is given; None = an attribute."""
MENDED = {
    "megatron.core.transformer.moe.token_dispatcher": "maybe_move_tensor_to_cpu",
    "megatron.core.tensor_parallel.random": "_set_cuda_rng_state",
    "megatron.core.transformer.moe.moe_utils": "te_general_gemm",
    "megatron.core.optimizer.optimizer_config": "is_te_min_version",
    "megatron.core.optimizer.cpu_offloading.hybrid_optimizer": "_move_new_state_to_right_device",
    "megatron.core.optimizer": "CPUAdam",
}
"""Module -> what `library.py` puts another function in the place of."""
GIVEN_AS_ONE = {
    ("model.py", "transformer_config"): (
        "megatron.core.transformer.transformer_config",
        "TransformerConfig",
    ),
    ("model.py", "_expert_values"): (
        "megatron.core.transformer.transformer_config",
        "TransformerConfig",
    ),
    ("optimizer.py", "optimizer_config"): ("megatron.core.optimizer", "OptimizerConfig"),
    ("optimizer.py", "precision_values"): ("megatron.core.optimizer", "OptimizerConfig"),
}
"""Functions that fill a dictionary of settings -> the class that gets it."""


class Use(NamedTuple):
    """One thing of the library that the backend names, and how it is called."""

    where: str
    module: str
    path: tuple[str, ...]
    num_positional: int | None
    """None = it is not called here."""
    keywords: tuple[str, ...]


def uses(path: Path) -> Iterator[Use]:
    """Yield every use of what `path` imports from the library."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    imported = {
        alias.asname or alias.name: (node.module or "", alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron.")
        for alias in node.names
    }
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        names = _dotted(node)
        if names is None or names[0] not in imported:
            continue
        module, first = imported[names[0]]
        call = called.get(id(node))
        given = [] if call is None else [one.arg for one in call.keywords if one.arg]
        number = None if call is None else len(call.args)
        where = f"{path.name}:{node.lineno}"
        yield Use(where, module, (first, *names[1:]), number, tuple(given))


def _dotted(node: ast.AST) -> list[str] | None:
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value)
        return None if before is None else [*before, node.attr]
    return None


def problem(use: Use, sources: Sources) -> str | None:
    """Return what of `use` the library does not have."""
    name = ".".join((use.module, *use.path))
    found: Found | None = sources.find(use.module, use.path[0])
    is_method = False
    for part in use.path[1:]:
        if found is None:
            break
        if isinstance(found.node, ast.Module):
            found = sources.find(found.module, part)
        elif isinstance(found.node, ast.ClassDef):
            found, is_method = sources.member(found, part), True
        else:
            return None  # a member of what it returns: see MEMBERS
    if found is None:
        return f"{use.where}: there is no {name}"
    takes = sources.parameters(found, is_method=is_method)
    if use.num_positional is None or takes is None:
        return None
    unknown = [] if takes.takes_any else sorted({*use.keywords} - takes.names)
    if unknown:
        return f"{use.where}: {name} takes no {', '.join(unknown)}"
    return None


@pytest.fixture(params=VERSIONS)
def sources(request: pytest.FixtureRequest) -> Sources:
    root = VERSIONS[request.param]
    assert (root / "megatron" / "core").is_dir(), (
        f"megatron-core {request.param} is not in {root}; run `make setup`"
    )
    return Sources(root)


def test_what_is_imported_is_there_and_takes_what_it_is_given(sources):
    everything = [use for path in sorted(OWN.glob("*.py")) for use in uses(path)]
    assert len(everything) > 40
    assert [said for use in everything if (said := problem(use, sources))] == []


@pytest.mark.parametrize("owner", MEMBERS, ids=lambda owner: owner[1])
def test_members_are_there_and_take_what_they_are_given(sources, owner):
    found = sources.find(*owner)
    assert found is not None, owner
    for name, given in MEMBERS[owner].items():
        member = sources.member(found, name)
        assert member is not None, f"{owner[1]} has no {name}"
        if given is not None:
            takes = sources.parameters(member, is_method=True)
            assert takes is not None, f"{owner[1]}.{name} is no method"
            assert takes.takes_any or {*given} <= takes.names, (name, takes)


@pytest.mark.parametrize(("file", "function"), GIVEN_AS_ONE)
def test_every_setting_of_a_dictionary_is_one_of_the_library(sources, file, function):
    found = sources.find(*GIVEN_AS_ONE[file, function])
    assert found is not None
    takes = sources.parameters(found)
    assert takes is not None
    tree = ast.parse((OWN / file).read_text(encoding="utf-8"))
    (body,) = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == function
    ]
    given = {
        key.value
        for node in ast.walk(body)
        if isinstance(node, ast.Dict)
        for key in node.keys
        if isinstance(key, ast.Constant)
    }
    assert len(given) > 4
    assert given <= takes.names, sorted(given - takes.names)


def test_what_is_mended_is_still_called_so(sources):
    for module, name in MENDED.items():
        tree = sources.tree(module)
        assert tree is not None, module
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert name in names | defined, f"{module} has no {name}"


def test_drift_is_seen(tmp_path):
    (tmp_path / "ours.py").write_text(
        "from megatron.core import parallel_state\n"
        "from megatron.core.optimizer import OptimizerConfig\n"
        "parallel_state.get_no_such_group()\n"
        "OptimizerConfig(no_such_rate=1.0)\n"
        "parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)\n"
    )
    said = {use: problem(use, Sources(NEWER)) for use in uses(tmp_path / "ours.py")}
    drifted = sorted((use.where, use.path[-1]) for use, found in said.items() if found)
    assert drifted == [("ours.py:3", "get_no_such_group"), ("ours.py:4", "OptimizerConfig")]
    assert len(said) > len(drifted), "what is there is no drift"


def test_ranks_do_not_import_wandb_whose_folders_they_would_leave(tmp_path):
    code = (
        "import os, sys, torch\n"
        "from telescope_train.backends.megatron.library import using\n"
        "with using(torch.device('cpu')):\n"
        "    assert 'megatron.core.timers' in sys.modules\n"
        "    assert 'wandb' not in sys.modules\n"
        "os.kill(os.getpid(), 9)\n"
    )
    place = {**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=place, timeout=300, check=False)
    assert done.returncode == -signal.SIGKILL
    assert not list(tmp_path.glob("*wandb*"))
