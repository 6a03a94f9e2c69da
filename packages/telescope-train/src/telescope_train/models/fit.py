"""Check that a model's files match its config.json (names, shapes, types, tying), and its adapters.

The loader of transformers is run on tensors with the shapes from the files' headers and without
memory. It finds the same problems as with real weights, including renaming, stacking of experts and
tying. Only a tied model whose files have a separate head needs two tensors read.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from telescope_core.base.errors import ConfigError
from telescope_core.base.number_text import counted
from telescope_train.models.weight_files import WeightFiles

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_FLOATS = ("F64", "F32", "F16", "BF16")
"""Names in safetensors for the types of plain numbers."""
_SHOWN = 3
"""Most tensors of each kind that an error names."""
_QUANTIZED = re.compile(r"(qweight|qzeros|scales|weight_scale\w*|absmax|weight_packed|SCB)$")
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_ADAPTER = re.compile(r"\.lora_|\.base_layer\.|\.modules_to_save\.")
_ROWS = 4096
"""Rows of two tensors that are in memory for a comparison."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    """Differences between a model's files and its module, by names in the module if possible."""

    missing: Sequence[str] = ()
    """Parameters in no file, which would be random numbers."""
    unexpected: Sequence[str] = ()
    """Tensors without a place in the module that are not known to be harmless."""
    mismatched: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    """Parameter -> its shape in the files and in the module."""

    @property
    def is_empty(self) -> bool:
        """Whether files and module agree."""
        return not (self.missing or self.unexpected or self.mismatched)

    @classmethod
    def from_keys(
        cls,
        missing: Iterable[str],
        unexpected: Iterable[str],
        mismatched: Iterable[tuple[str, Sequence[int], Sequence[int]]],
    ) -> "Misfit":
        """Return the misfits that transformers found."""
        sizes = {
            name: (tuple(stored), tuple(wanted)) for name, stored, wanted in sorted(mismatched)
        }
        return cls(missing=sorted(missing), unexpected=sorted(unexpected), mismatched=sizes)


def empty_model(config: "PreTrainedConfig", dtype: str) -> "PreTrainedModel":
    """Return the model of `config` without memory for its weights, all of them on `meta`.

    Raises ConfigError for a model that sees and has no class for text alone.
    """
    import torch
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    if hasattr(config, "vision_config") and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(
            f"a model of type {config.model_type!r} reads pictures, and transformers has no class "
            "for its text alone; models that read pictures are not trained here: take a model of "
            "text, or evaluate this one behind --base-url"
        )
    # A generator of no device: drawing numbers that nobody keeps must not move that of the run.
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))


def require_fit(name: str, config: "PreTrainedConfig", files: WeightFiles, dtype: str) -> bool:
    """Raise ConfigError unless `files` give every parameter of the model exactly its tensor.

    Returns whether the output head is a separate matrix although `config` says that it is tied:
    transformers and vLLM then use the head of the files. Where tensors cannot be read, the two may
    be equal.
    """
    import torch
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    model = empty_model(config, dtype)
    transforms = get_model_conversion_mapping(model)
    sources = _sources(model, files, transforms)
    info, _ = convert_and_load_state_dict_in_model(
        model,
        {
            tensor: torch.empty(stored.shape, device="meta")
            for tensor, stored in files.tensors.items()
        },
        LoadStateDictConfig(
            device_map={"": torch.device("meta")},
            dtype=getattr(torch, dtype),
            weight_mapping=transforms,
        ),
    )
    given = set(model.state_dict()) - set(info.missing_keys)
    tied = dict(model.all_tied_weights_keys)
    for target, source in tied.items():
        if target in given and source not in given:
            raise ConfigError(
                f"model {name!r}: its files have {target} and no {source}, though config.json says "
                "that they are one (tie_word_embeddings); save it again with transformers"
            )
    model.tie_weights(missing_keys=info.missing_keys, recompute_mapping=False)
    model._adjust_missing_and_unexpected_keys(info)
    missing = {*info.missing_keys, *info.conversion_errors}
    found = Misfit.from_keys(missing, info.unexpected_keys, info.mismatched_keys)
    if not found.is_empty:
        raise ConfigError(misfit_text(name, found, config))
    _require_plain(name, files, sources, model)
    return any(
        target in given
        and (not files.is_here or _differ(files, sources[target], sources[source], dtype))
        for target, source in tied.items()
    )


def require_peft() -> None:
    """Raise ConfigError unless peft, which adds the adapters of `use_lora`, is installed."""
    if find_spec("peft") is None:
        raise ConfigError(
            "use_lora needs peft, which is not installed; install telescope-train[lora]"
        )


def require_targets(model: "PreTrainedModel", targets: Sequence[str]) -> None:
    """Raise ConfigError unless each of `targets` (LoRA) is a matrix in the decoder layers."""
    from torch.nn import Linear

    if not hasattr(model.base_model, "layers"):
        raise ConfigError(
            f"use_lora: adapters are not supported for {type(model).__name__} (model_type "
            f"{model.config.model_type!r}), which has no list of decoder layers called `layers`; "
            "they are for Llama, Qwen, Mistral, Gemma, Phi and models built like them: take one "
            "of these, or train without use_lora"
        )
    inside = {
        name.rpartition(".")[2]
        for layer in model.base_model.layers
        for name, module in layer.named_modules()
        if isinstance(module, Linear)
    }
    unknown = [target for target in targets if target not in inside]
    if unknown:
        raise ConfigError(
            f"lora_target_modules: no matrix in the decoder layers of {type(model).__name__} is "
            f"called {', '.join(unknown)}; choose among {', '.join(sorted(inside))}"
        )


def _sources(
    model: "PreTrainedModel", files: WeightFiles, transforms: Sequence[Any]
) -> dict[str, list[str]]:
    """Return parameter -> the tensors in files from which transformers would make it."""
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    known, prefix = model.state_dict(), model.base_model_prefix
    sources: defaultdict[str, list[str]] = defaultdict(list)
    for tensor in files.tensors:
        target, _ = rename_source_key(tensor, renamings, converters, prefix, known)
        if target not in known and tensor in known:
            target, _ = rename_source_key(tensor, [], [], prefix, known)
        sources[target].append(tensor)
    return sources


def _require_plain(
    name: str, files: WeightFiles, sources: Mapping[str, Sequence[str]], model: "PreTrainedModel"
) -> None:
    """Raise ConfigError where transformers would guess: a server may guess differently."""
    packed = [
        tensor
        for parameter, _ in model.named_parameters()
        for tensor in sources.get(parameter, ())
        if files.tensors[tensor].dtype not in _FLOATS
    ]
    if packed:
        raise ConfigError(
            f"model {name!r}: {_some(packed)} is of type {files.tensors[packed[0]].dtype}, and "
            "config.json has no quantization_config; training needs weights that are plain "
            "floating point numbers: take the model that was not quantized"
        )
    for parameter, tensors in sources.items():
        experts = [_EXPERT.search(tensor) for tensor in tensors]
        numbers = {int(found[1]) for found in experts if found is not None}
        if numbers != set(range(len(numbers))):
            raise ConfigError(
                f"model {name!r}: of {parameter} the files have the experts "
                f"{', '.join(map(str, sorted(numbers)))}, expected 0 to {len(numbers) - 1}; "
                "save it again with transformers"
            )
        if len(tensors) > 1 and None in experts:
            raise ConfigError(
                f"model {name!r}: {' and '.join(sorted(tensors)[:_SHOWN])} would both be "
                f"{parameter}; save it again with transformers"
            )


def _differ(files: WeightFiles, ones: Sequence[str], others: Sequence[str], dtype: str) -> bool:
    """Return whether two parameters differ in values that `dtype` can hold."""
    import torch

    if len(ones) != 1 or len(others) != 1:
        return True
    held = getattr(torch, dtype)
    shape = files.tensors[ones[0]].shape
    return any(
        not torch.equal(
            files.rows(ones[0], start, start + _ROWS, shape).to(held),
            files.rows(others[0], start, start + _ROWS, shape).to(held),
        )
        for start in range(0, shape[0], _ROWS)
    )


def misfit_text(name: str, found: Misfit, config: "PreTrainedConfig") -> str:
    """Return a text with the first few tensors of each misfit, the reason and the remedy."""
    parts = []
    if found.missing:
        parts.append(f"{_counted(found.missing)} of the model that no file has")
    if found.unexpected:
        parts.append(f"{_counted(found.unexpected)} of the files that the model has no place for")
    parts += [
        f"{parameter} is {list(stored)} in the files and {list(wanted)} in the model"
        for parameter, (stored, wanted) in list(found.mismatched.items())[:_SHOWN]
    ]
    if len(found.mismatched) > _SHOWN:
        parts.append(f"{len(found.mismatched) - _SHOWN} more are of other sizes")
    return (
        f"the files of model {name!r} are not what its config.json describes: "
        f"{'; '.join(parts)}. {_reason(found, config)}"
    )


def _counted(names: Sequence[str]) -> str:
    return f"{counted(len(names), 'tensor')} ({_some(names)})"


def _some(names: Sequence[str]) -> str:
    return f"{', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else ''}"


def _reason(found: Misfit, config: "PreTrainedConfig") -> str:
    """Return the most likely cause of the differences, and what to do."""
    reason = _reason_in_names(found) or _reason_in_config(found, config.get_text_config())
    if reason is not None:
        return reason
    if found.missing and not found.unexpected:
        return "They would be random numbers; the download or the save was incomplete: do it again"
    return "Take the config.json that belongs to the files, or save the model with transformers"


def _reason_in_names(found: Misfit) -> str | None:
    if any(_ADAPTER.search(name) for name in found.unexpected):
        return (
            "They are those of an adapter that was not merged; merge it with peft's "
            "merge_and_unload, and save that"
        )
    if any(_QUANTIZED.search(name) for name in found.unexpected):
        return "The weights are quantized; take the model that was not quantized"
    prefix = _prefix(found)
    if prefix:
        return (
            f"Every name begins with {prefix!r}, so a wrapper was saved in place of the model; "
            "save the model inside it, or rename the tensors"
        )
    return None


def _reason_in_config(found: Misfit, config: "PreTrainedConfig") -> str | None:
    others = [*found.missing, *found.unexpected]
    if others == ["lm_head.weight"] and found.missing:
        return (
            "If the output head is the embedding, set tie_word_embeddings = true in config.json; "
            "else its file is not here"
        )
    if found.unexpected and all(name.endswith(".bias") for name in others):
        return (
            "config.json denies biases that the files have; set attention_bias or mlp_bias, or "
            "take the config.json that belongs to the files"
        )
    layers = [int(one[1]) for name in others if (one := _LAYER.search(name)) is not None]
    has_layers = getattr(config, "num_hidden_layers", 0)
    if found.unexpected and len(layers) == len(others) and min(layers) >= has_layers:
        return (
            f"The files have {max(layers) + 1} layers, and num_hidden_layers in config.json is "
            f"{has_layers}; make them equal"
        )
    rows = [stored[0] for name, (stored, _) in found.mismatched.items() if "embed" in name]
    if rows and not others:
        return (
            f"vocab_size in config.json is {config.vocab_size}, and the embedding has {rows[0]} "
            "rows: set it to that"
        )
    return None


def _prefix(found: Misfit) -> str:
    """Return a prefix of all unexpected names that missing ones lack; "" if there is none."""
    wanted = set(found.missing)
    for parameter in found.missing:
        first = next((one for one in found.unexpected if one.endswith(f".{parameter}")), None)
        if first is not None:
            prefix = first.removesuffix(parameter)
            known = [one.removeprefix(prefix) in wanted for one in found.unexpected]
            return prefix if all(known) else ""
    return ""
