"""Small models of every supported family, and what happens to folders of models in the wild.

Each mutation changes the files of a folder in one way, and says whether transformers still loads
from them what was saved.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

_SIZES = {
    "vocab_size": 103,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WITH_HEAD_DIM = {**_SIZES, "head_dim": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {**_SIZES, "tie_word_embeddings": False},
    "Qwen2": {**_SIZES, "tie_word_embeddings": True},
    "Qwen3": {**_WITH_HEAD_DIM, "tie_word_embeddings": True},
    "Mistral": {**_WITH_HEAD_DIM, "tie_word_embeddings": False, "sliding_window": None},
    "Gemma": {**_WITH_HEAD_DIM},
    "Gemma2": {**_WITH_HEAD_DIM, "query_pre_attn_scalar": 16, "sliding_window": 8},
    "Gemma3Text": {**_WITH_HEAD_DIM, "query_pre_attn_scalar": 16, "sliding_window": 8},
    "Gemma4Text": {
        **_WITH_HEAD_DIM,
        "global_head_dim": 16,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
    },
    "Phi": {**_SIZES},
    "Phi3": {**_SIZES, "tie_word_embeddings": False},
    "Granite": {**_SIZES, "tie_word_embeddings": True},
    "Cohere": {**_SIZES},
    "Olmo2": {**_SIZES, "tie_word_embeddings": False},
    "Glm4": {**_WITH_HEAD_DIM, "tie_word_embeddings": False},
    "Qwen3Moe": {
        **_WITH_HEAD_DIM,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "tie_word_embeddings": False,
    },
    "Mixtral": {
        **_WITH_HEAD_DIM,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    },
}
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def save_model(
    family: str, folder: Path, *, in_shards: bool = False, seed: int = 0, **fields: Any
) -> Path:
    """Write a random model, in one file or in several; norms, biases and scales are random too.

    `fields`: those of its config that are others than in `FAMILIES`.
    """
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**{**FAMILIES[family], **fields})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    for name, buffer in model.named_buffers():
        if name in model.state_dict():
            torch.nn.init.normal_(buffer, std=0.5)
    model.save_pretrained(folder, max_shard_size="12KB" if in_shards else "1GB")
    return folder


class Folder:
    """The files of a model, to be changed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shards = {file.name: load_file(file) for file in path.glob("*.safetensors")}

    @property
    def names(self) -> list[str]:
        return sorted(name for tensors in self.shards.values() for name in tensors)

    def of(self, name: str) -> dict[str, torch.Tensor]:
        return next(tensors for tensors in self.shards.values() if name in tensors)

    def some(self, ending: str) -> str:
        """Return the last tensor whose name ends so; the last of all if there is none."""
        return ([name for name in self.names if name.endswith(ending)] or self.names)[-1]

    def change(self, name: str, value: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.of(name)[name] = value(self.of(name)[name]).contiguous()

    def rename(self, new: Callable[[str], str]) -> None:
        self.shards = {
            file: {new(name): value for name, value in tensors.items()}
            for file, tensors in self.shards.items()
        }

    def config(self, **fields: Any) -> None:
        path = self.path / "config.json"
        known = {**json.loads(path.read_text()), **fields}
        path.write_text(json.dumps({k: v for k, v in known.items() if v != "gone"}))

    def write(self, *, index: bool = True) -> None:
        """Write the tensors; with `index`, also what names them where there are several files."""
        for file, tensors in self.shards.items():
            save_file(tensors, self.path / file, metadata={"format": "pt"})
        if index and (self.path / INDEX).exists():
            names = {name: file for file, tensors in self.shards.items() for name in tensors}
            (self.path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))


@dataclass(frozen=True)
class Mutation:
    """One thing that is wrong with a folder, or different and harmless."""

    name: str
    apply: Callable[[Folder], None]
    is_harmless: bool = False
    """Whether the folder must load, as transformers loads it."""
    of_shards: bool | None = None
    """Whether it needs several files, or one; None = any."""
    in_weights: bool = False
    """Whether only the numbers show it, so that headers cannot."""


def _dropped(ending: str) -> Mutation:
    def apply(folder: Folder) -> None:
        name = folder.some(ending)
        del folder.of(name)[name]
        folder.write()

    return Mutation(f"without {ending}", apply)


def _changed(name: str, ending: str, value: Any, **named: Any) -> Mutation:
    def apply(folder: Folder) -> None:
        folder.change(folder.some(ending), value)
        folder.write()

    return Mutation(name, apply, **named)


def _renamed(name: str, new: Callable[[str], str], **named: Any) -> Mutation:
    def apply(folder: Folder) -> None:
        folder.rename(new)
        folder.write()

    return Mutation(name, apply, **named)


def _configured(name: str, **fields: Any) -> Mutation:
    return Mutation(name, lambda folder: folder.config(**fields))


def _added(name: str, tensor: str, like: str) -> Mutation:
    def apply(folder: Folder) -> None:
        found = folder.some(like)
        folder.of(found)[tensor] = folder.of(found)[found].clone()
        folder.write()

    return Mutation(name, apply)


def _every(folder: Folder, value: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for name in folder.names:
        folder.change(name, value)
    folder.write()


def _poisoned(value: torch.Tensor) -> torch.Tensor:
    value = value.clone()
    value.view(-1)[-1] = torch.nan
    return value


def _cut(folder: Folder) -> None:
    path = sorted(folder.path.glob("*.safetensors"))[-1]
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


def _index(folder: Folder, change: Callable[[dict[str, str]], Any]) -> None:
    path = folder.path / INDEX
    names = json.loads(path.read_text())["weight_map"]
    change(names)
    path.write_text(json.dumps({"metadata": {}, "weight_map": names}))


def _forget(names: dict[str, str]) -> None:
    """Leave out a tensor of a file that is named for another one."""
    files = list(names.values())
    names.pop(next(name for name, file in names.items() if files.count(file) > 1))


def _swap(names: dict[str, str]) -> None:
    first, last = sorted(names)[0], sorted(names)[-1]
    names[first], names[last] = names[last], names[first]


def _own_head(folder: Folder, *, is_equal: bool) -> None:
    """Give a tied model a head in its files, and say that an untied one is tied."""
    folder.config(tie_word_embeddings=True)
    head, embedding = "lm_head.weight", folder.some("embed_tokens.weight")
    value = folder.of(embedding)[embedding]
    own = value.clone() if is_equal else value + 1
    (folder.of(head) if head in folder.names else folder.of(embedding))[head] = own
    folder.write()


def _head_alone(folder: Folder) -> None:
    _own_head(folder, is_equal=True)
    embedding = folder.some("embed_tokens.weight")
    del folder.of(embedding)[embedding]
    folder.write()


def _twice(folder: Folder) -> None:
    files = sorted(folder.shards)
    name = next(iter(folder.shards[files[0]]))
    folder.shards[files[-1]][name] = folder.shards[files[0]][name] + 1
    folder.write(index=False)


def _both(folder: Folder) -> None:
    every = {
        name: value + 1 for tensors in folder.shards.values() for name, value in tensors.items()
    }
    save_file(every, folder.path / SINGLE, metadata={"format": "pt"})


def _adapter(folder: Folder) -> None:
    (folder.path / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": "some/base", "peft_type": "LORA"})
    )


def _files(folder: Folder, *, change: Callable[[Path], Any]) -> None:
    for path in folder.path.glob("*.safetensors"):
        change(path)


def _pickled(folder: Folder) -> None:
    every = {name: value for tensors in folder.shards.values() for name, value in tensors.items()}
    for path in [*folder.path.glob("*.safetensors"), *folder.path.glob(INDEX)]:
        path.unlink()
    torch.save(every, folder.path / "pytorch_model.bin")


MUTATIONS = (
    *map(
        _dropped,
        (
            "embed_tokens.weight",
            "layers.1.self_attn.q_proj.weight",
            "layers.0.self_attn.o_proj.weight",
            "layers.1.input_layernorm.weight",
            "down_proj.weight",
            "norm.weight",
            "w3.weight",
            "bias",
            "gate.weight",
        ),
    ),
    _changed(
        "a matrix is transposed", "down_proj.weight", lambda v: v.T if v.dim() == 2 else v[1:]
    ),
    _changed("a matrix has rows too few", "o_proj.weight", lambda v: v[:-1]),
    _changed("a norm has numbers too many", "norm.weight", lambda v: torch.cat([v, v[:1]])),
    _changed("a matrix is a vector", "down_proj.weight", lambda v: v.flatten()),
    _changed("more rows of the vocabulary", "embed_tokens.weight", lambda v: torch.cat([v, v[:5]])),
    _changed("fewer rows of the vocabulary", "embed_tokens.weight", lambda v: v[:-3]),
    _changed("a matrix of whole numbers", "down_proj.weight", lambda v: v.to(torch.int8)),
    _changed("a matrix of 8 bits", "down_proj.weight", lambda v: v.to(torch.float8_e4m3fn)),
    _changed("a matrix of 16 bits", "down_proj.weight", lambda v: v.bfloat16(), is_harmless=True),
    _changed("a matrix of 64 bits", "o_proj.weight", lambda v: v.double(), is_harmless=True),
    _changed("NaN in a matrix", "down_proj.weight", _poisoned, in_weights=True),
    _changed("NaN in a norm", "norm.weight", _poisoned, in_weights=True),
    _changed("NaN in the embedding", "embed_tokens.weight", _poisoned, in_weights=True),
    _changed("infinity in a matrix", "q_proj.weight", lambda v: v * torch.inf, in_weights=True),
    Mutation("everything in 16 bits", lambda f: _every(f, lambda v: v.half()), is_harmless=True),
    _renamed("a wrapper around it", lambda name: f"base_model.{name}"),
    _renamed("a wrapper of several processes", lambda name: f"module.{name}"),
    _renamed("an adapter that was not merged", lambda name: f"base_model.model.{name}"),
    _renamed("compiled", lambda name: f"_orig_mod.{name}"),
    _renamed(
        "one tensor by another name", lambda name: name.replace("layers.0.mlp", "layers.0.ffn")
    ),
    _renamed("layers by another name", lambda name: name.replace(".layers.", ".blocks.")),
    _renamed(
        "without the first part of names",
        lambda name: name.removeprefix("model."),
        is_harmless=True,
    ),
    _renamed("layers from 1", lambda name: name.replace("layers.1.", "layers.2.")),
    _renamed("experts from 1", lambda name: name.replace("experts.0.", "experts.4.")),
    _configured("one layer more in the config", num_hidden_layers=3),
    _configured("one layer less in the config", num_hidden_layers=1),
    _configured("a larger vocabulary in the config", vocab_size=120),
    _configured("a smaller vocabulary in the config", vocab_size=96),
    _configured("other heads in the config", num_key_value_heads=4),
    _configured("another width in the config", intermediate_size=64),
    _configured("another family in the config", model_type="llama"),
    _configured("an unknown family in the config", model_type="none-such"),
    _configured("biases in the config", attention_bias=True),
    _configured("sizes that are no numbers", hidden_size="32"),
    _configured("sizes of nothing", num_attention_heads=0, hidden_size=0),
    _configured("sizes below nothing", num_hidden_layers=-1),
    _configured("layers of nothing", layer_types=[], decoder_sparse_step=0, mlp_only_layers="all"),
    _configured("no family", model_type="gone"),
    _configured("sizes that do not divide", num_attention_heads=5),
    _configured("said to be quantized", quantization_config={"quant_method": "bitsandbytes"}),
    _configured("said to be packed", quantization_config={"quant_method": "gptq", "bits": 4}),
    _configured("tying is not said", tie_word_embeddings="gone"),
    _configured("said to be tied", tie_word_embeddings=True),
    _configured("said not to be tied", tie_word_embeddings=False),
    _added("a bias that the config denies", "model.layers.0.mlp.down_proj.bias", "norm.weight"),
    _added("a value head", "v_head.summary.weight", "norm.weight"),
    _added("a layer too many", "model.layers.7.mlp.down_proj.weight", "down_proj.weight"),
    _added("packed weights", "model.layers.0.mlp.down_proj.weight_scale", "norm.weight"),
    _added("an adapter's matrix", "model.layers.0.mlp.down_proj.lora_A.weight", "norm.weight"),
    _added("a norm twice", "norm.weight", "model.norm.weight"),
    Mutation("a head of its own though tied", lambda f: _own_head(f, is_equal=False)),
    Mutation("a copy as head", lambda f: _own_head(f, is_equal=True), is_harmless=True),
    Mutation("the head alone", _head_alone),
    Mutation("cut", _cut),
    Mutation("an adapter beside it", _adapter),
    Mutation("no weights", lambda f: _files(f, change=Path.unlink)),
    Mutation("empty files", lambda f: _files(f, change=lambda path: path.write_bytes(b""))),
    Mutation("files of a pointer", lambda f: _files(f, change=lambda p: p.write_text("version"))),
    Mutation("pickled", _pickled, is_harmless=True),
    Mutation("no config", lambda f: (f.path / "config.json").unlink()),
    Mutation("config is no JSON", lambda f: (f.path / "config.json").write_text("{")),
    Mutation("config is a list", lambda f: (f.path / "config.json").write_text("[]")),
    Mutation("in shards", lambda f: None, is_harmless=True, of_shards=True),
    Mutation(
        "a shard is gone",
        lambda f: sorted(f.path.glob("*.safetensors"))[0].unlink(),
        of_shards=True,
    ),
    Mutation("a tensor in two shards", _twice, of_shards=True),
    Mutation("in shards and whole", _both, of_shards=True),
    Mutation(
        "the index lacks a tensor that is there",
        lambda f: _index(f, _forget),
        is_harmless=True,
        of_shards=True,
    ),
    Mutation(
        "the index names one that is not there",
        lambda f: _index(f, lambda names: names.update(extra=next(iter(names.values())))),
        of_shards=True,
    ),
    Mutation("the index is mixed up", lambda f: _index(f, _swap), of_shards=True),
    Mutation("the index is empty", lambda f: _index(f, dict.clear), of_shards=True),
    Mutation("the index is no JSON", lambda f: (f.path / INDEX).write_text("{"), of_shards=True),
    Mutation("the index has no map", lambda f: (f.path / INDEX).write_text("{}"), of_shards=True),
)


def copies(source: Path, folder: Path, mutation: Mutation) -> Folder:
    """Return a copy of the model `source` in `folder`, with the mutation."""
    shutil.copytree(source, folder)
    copy = Folder(folder)
    mutation.apply(copy)
    return copy


def cases() -> Iterator[tuple[str, bool, Mutation]]:
    """Yield (family, whether in shards, mutation) for all that fit together, in a fixed order."""
    families = ("Llama", "Qwen2", "Gemma2", "Mixtral")
    for mutation in MUTATIONS:
        for number, family in enumerate(families):
            in_shards = number % 2 == 1 if mutation.of_shards is None else mutation.of_shards
            yield family, in_shards, mutation
