"""Models with an arithmetic of their own between hidden states and logits, trained over vLLM.

The engine applies it by itself. That both sides agree is measured before training, and again by
each sampled token of the steps, on logits large enough that a soft cap of 30 shows.
"""

import sys
from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from telescope_core.records import RunFolder
from telescope_train.models.head import head_rule
from telescope_train.models.tiny import MAX_TOKENS, character_tokenizer

sys.path.insert(0, str(Path(__file__).parent))
from cli_runs import finish, train_command

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

FAMILIES = {
    "gemma2": {"head_dim": 32, "sliding_window": 16, "query_pre_attn_scalar": 32},
    "granite": {
        "logits_scaling": 8.0,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.2,
    },
    "cohere": {"logit_scale": 0.25},
    "phi": {},
}
RUN = """
[run]
name = "special"
number_of_steps = 3
[rollout]
discard_group_zero_advantage = false
"""


def family_model(folder: Path, family: str) -> Path:
    tokenizer = character_tokenizer()
    ends = {
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }
    config = CONFIG_MAPPING[family](
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_TOKENS,
        dtype="float32",
        tie_word_embeddings=family != "phi",
        **ends,
        **FAMILIES[family],
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        lm = AutoModelForCausalLM.from_config(config)
        for parameter in lm.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        head = lm.get_output_embeddings()
        # The layers end with a norm, so that logits get about this size. A head that is the
        # embedding and has no cap would only repeat the last token, whatever it gets wrong.
        rule = head_rule(config.to_dict())
        is_certain = config.tie_word_embeddings and rule.cap is None
        head.weight.mul_((0.6 if is_certain else 8.0) / rule.scale)
        if head.bias is not None:
            head.bias.normal_(std=3.0)
    lm.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_engine_and_trainer_agree_on_large_logits(tmp_path: Path, family: str) -> None:
    model = family_model(tmp_path / "model", family)
    finish(train_command(tmp_path, model, RUN), tmp_path)
    folder = RunFolder.open(tmp_path / "runs" / "special")
    tests = {test["name"]: test for test in folder.self_tests()}
    assert tests["output head is that of transformers"]["value"] < 3e-4
    assert tests["engine and trainer agree"]["value"] < 1e-4
    rows = folder.metrics()
    assert len(rows) == 3
    assert max(row["mismatch/max"] for row in rows if "mismatch/max" in row) < 1e-3
