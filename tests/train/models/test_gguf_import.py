"""Importing a GGUF file: the model that is written computes what the one in the file did."""

import json

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from telescope_cli.main import main
from telescope_core.errors import ConfigError
from telescope_train.models.gguf_import import import_gguf

pytestmark = pytest.mark.slow
HEADS, KV_HEADS, LAYERS, HIDDEN = 4, 2, 2, 64
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def vocabulary() -> list[str]:
    """Bytes as GPT-2 spells them, one merge of two spaces, and three special tokens."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    spelled = bytes_to_unicode()
    return ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *spelled.values(), spelled[32] * 2]


def llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(vocabulary()),
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * 0.2 if weight.ndim > 1 else weight * 1.5)
    return model.eval()


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """The order of rows in which llama.cpp keeps what is rotated: pairs side by side."""
    rows = weight.shape[0] // heads // 2
    return weight.reshape(heads, 2, rows, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path, model, *, split="smollm", template=TEMPLATE, quantized=False, without=""):
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(vocabulary()))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_token_list(vocabulary())
    writer.add_token_types([3, 3, 3] + [1] * (len(vocabulary()) - 3))
    writer.add_token_merges(["\u0120 \u0120"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    if template is not None:
        writer.add_chat_template(template)
    for name, value in tensors(model).items():
        if name == without:
            continue
        if quantized and value.ndim == 2:
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(name, quants.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors(model) -> dict[str, np.ndarray]:
    found = {}
    for name, weight in model.state_dict().items():
        value = weight.numpy()
        if name == "model.embed_tokens.weight":
            found["token_embd.weight"] = value
        elif name == "model.norm.weight":
            found["output_norm.weight"] = value
        elif name != "lm_head.weight":
            _, _, layer, *rest = name.split(".")
            part = ".".join(rest[:-1])
            if part == "self_attn.q_proj":
                value = interleaved(value, HEADS)
            if part == "self_attn.k_proj":
                value = interleaved(value, KV_HEADS)
            found[f"blk.{layer}.{NAMES[part]}.weight"] = value
    return found


@pytest.fixture(scope="module")
def model():
    return llama()


@pytest.fixture(scope="module")
def imported(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf")
    path = write_gguf(folder / "small.gguf", model)
    return import_gguf(path, folder / "model")


def logits(model, ids):
    with torch.inference_mode():
        return model(input_ids=ids).logits


def test_the_written_model_computes_what_the_file_holds(model, imported):
    written = AutoModelForCausalLM.from_pretrained(imported.path)
    ids = torch.arange(40)[None] * 5 % len(vocabulary())
    torch.testing.assert_close(logits(written, ids), logits(model, ids), rtol=0, atol=1e-4)
    assert imported.architecture == "llama"
    assert imported.num_parameters == model.num_parameters()
    assert written.generation_config.eos_token_id == 2
    config = json.loads((imported.path / "config.json").read_text())
    assert "quantization_config" not in config
    assert config["tie_word_embeddings"]


def test_its_tokenizer_has_the_template_and_keeps_digits_apart(imported):
    tokenizer = AutoTokenizer.from_pretrained(imported.path)
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.tokenize("a  12") == ["a", "\u0120\u0120", "1", "2"]
    assert tokenizer.tokenize("<|im_start|>a") == ["<|im_start|>", "a"]


def test_a_model_that_finds_english_unlikely_is_doubted(imported):
    assert imported.nats_per_token > 4
    (note,) = imported.notes
    assert "read wrongly" in note


def test_quantized_weights_are_unpacked(model, tmp_path):
    path = write_gguf(tmp_path / "small.gguf", model, quantized=True)
    done = import_gguf(path, tmp_path / "model", dtype="bfloat16")
    written = AutoModelForCausalLM.from_pretrained(done.path)
    assert written.dtype == torch.bfloat16
    weight, original = (
        written.model.layers[1].mlp.up_proj.weight,
        model.model.layers[1].mlp.up_proj.weight,
    )
    assert (weight.float() - original).abs().max() < 0.02
    assert (weight.float() - original).abs().max() > 0


def test_an_unknown_split_and_a_missing_template_are_told(model, tmp_path):
    path = write_gguf(tmp_path / "small.gguf", model, split="own-split", template=None)
    notes = " ".join(import_gguf(path, tmp_path / "model").notes)
    assert "'own-split'" in notes
    assert "no chat template" in notes


@pytest.mark.parametrize("kept", [100, 3000, -4000])
def test_a_file_that_is_cut_off_is_refused_and_writes_nothing(model, tmp_path, kept):
    path = write_gguf(tmp_path / "small.gguf", model)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ConfigError, match=r"small\.gguf.*cannot be read.*complete"):
        import_gguf(path, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_an_unknown_architecture_is_refused(tmp_path):
    writer = GGUFWriter(tmp_path / "odd.gguf", "frobnicator")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["a"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"odd\.gguf"):
        import_gguf(tmp_path / "odd.gguf", tmp_path / "model")
    assert not (tmp_path / "model").exists()


def telescope(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(["model", "import", *map(str, arguments)])
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


def test_the_command_says_what_it_wrote(model, tmp_path, capsys):
    path = write_gguf(tmp_path / "small.gguf", model)
    code, said, _ = telescope(capsys, path, tmp_path / "model", "--json")
    assert code == 0
    row = json.loads(said)
    assert (row["path"], row["architecture"]) == (str(tmp_path / "model"), "llama")


def test_mistakes_are_explained_and_leave_what_is_there(model, tmp_path, capsys):
    path = write_gguf(tmp_path / "small.gguf", model)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    for arguments, words in (
        ((tmp_path, tmp_path / "out"), "a folder that holds small.gguf"),
        ((tmp_path / "notes" / "a.txt", tmp_path / "out"), "is not a GGUF file"),
        ((path, tmp_path / "out", "--dtype", "int8"), "float32, bfloat16"),
        ((path, tmp_path / "notes"), "holds no model"),
    ):
        code, _, complaint = telescope(capsys, *arguments)
        assert code == 2, arguments
        assert words in complaint
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "notes" / "a.txt").read_text() == "mine"


@pytest.mark.parametrize("without", ["blk.1.ffn_down.weight", "output_norm.weight"])
def test_a_file_that_lacks_a_tensor_is_refused(model, tmp_path, without):
    path = write_gguf(tmp_path / "small.gguf", model, without=without)
    with pytest.raises(ConfigError, match=r"small\.gguf.*1 tensor"):
        import_gguf(path, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_file_with_numbers_that_are_not_finite_is_refused(tmp_path):
    broken = llama()
    with torch.no_grad():
        broken.model.norm.weight[0] = torch.nan
    path = write_gguf(tmp_path / "small.gguf", broken)
    with pytest.raises(ConfigError, match=r"small\.gguf.*model\.norm\.weight"):
        import_gguf(path, tmp_path / "model")
