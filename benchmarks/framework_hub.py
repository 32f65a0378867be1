"""Local folders in place of the hub, named as in tests: what finds a relative folder asks no hub."""

import importlib.util
from pathlib import Path

import datasets
import torch
import transformers
import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, BertTokenizer, PreTrainedTokenizerFast

ORGANIZATION = "trl-internal-testing"
TEMPLATES = Path(trl.__file__).parent / "chat_templates"
SIZES = dict(
    hidden_size=8,
    intermediate_size=32,
    moe_intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_experts=4,
    num_local_experts=4,
    num_experts_per_tok=2,
    head_dim=8,
    max_position_embeddings=2048,
)
"""Sizes of the tiny models that TRL's scripts build; a configuration ignores those it doesn't have."""
MODELS = {
    "tiny-Qwen2ForCausalLM-2.5": ("qwen2", "qwen2_5"),
    "tiny-Qwen2ForSequenceClassification-2.5": ("qwen2", "qwen2_5"),
    "tiny-Qwen3ForCausalLM": ("qwen3", "qwen3"),
    "tiny-Qwen3ForSequenceClassification": ("qwen3", "qwen3"),
    "tiny-Qwen3MoeForCausalLM": ("qwen3_moe", "qwen3"),
    "tiny-LlamaForCausalLM-3.2": ("llama", "llama3_2"),
    "tiny-LlamaForSequenceClassification-3.2": ("llama", "llama3_2"),
    "tiny-MistralForCausalLM-0.2": ("mistral", "qwen2_5"),
    "tiny-GptOssForCausalLM": ("gpt_oss", "gptoss"),
    "tiny-GPTNeoXForCausalLM": ("gpt_neox", "qwen2_5"),
    "tiny-Gemma2ForCausalLM": ("gemma2", "gemma"),
    "tiny-CohereForCausalLM": ("cohere", "cohere"),
    "tiny-Cohere2ForCausalLM": ("cohere2", "cohere2"),
    "tiny-Glm4MoeForCausalLM": ("glm4_moe", "glm4moe"),
    "tiny-Olmo3ForCausalLM": ("olmo3", "qwen2_5"),
    "tiny-Lfm2ForCausalLM": ("lfm2", "lfm2"),
}
"""Type of configuration and chat template of each text model that TRL's tests load by name."""
END, START_OF_TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
WORDPIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def load_script(path: Path) -> object:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_trl_datasets(checkout: Path, hub: Path) -> list[str]:
    """Write what the scripts of TRL push to the hub; return all texts."""
    texts: list[str] = []

    def write(data: dict[str, datasets.Dataset], repository: str, config_name: str) -> None:
        folder = hub / repository
        for split, part in data.items():
            (folder / config_name).mkdir(parents=True, exist_ok=True)
            part.to_parquet(str(folder / config_name / f"{split}.parquet"))
            texts.extend(str(value) for row in part for value in row.values())
        configs = [
            f"- config_name: {each.name}\n  data_files:\n"
            + "".join(f"  - split: {file.stem}\n    path: {each.name}/{file.name}\n" for file in each.glob("*.parquet"))
            for each in sorted(folder.iterdir())
            if each.is_dir()
        ]
        (folder / "README.md").write_text(f"---\nconfigs:\n{''.join(configs)}---\n")

    datasets.DatasetDict.push_to_hub = write
    for name in ("zen", "toolcall", "harmony"):
        script = load_script(checkout / "scripts" / f"generate_{name}_dataset.py")
        script.main(0.1, True, f"{ORGANIZATION}/{name}")  # type: ignore[attr-defined]
    return texts


def byte_pairs(texts: list[str]) -> Tokenizer:
    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    tokens.post_processor = processors.ByteLevel(trim_offsets=False)
    special = [END, START_OF_TURN, END_OF_TURN]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1000, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokens.train_from_iterator(texts, trainer)
    return tokens


def write_trl_models(hub: Path, texts: list[str]) -> None:
    tokens = byte_pairs(texts)
    for name, (kind, template) in MODELS.items():
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=tokens, eos_token=END_OF_TURN, pad_token=END, model_max_length=2048
        )
        tokenizer.chat_template = (TEMPLATES / f"{template}.jinja").read_text()
        config = AutoConfig.for_model(
            kind,
            **SIZES,
            vocab_size=len(tokenizer),
            num_labels=1,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        torch.manual_seed(0)
        model = getattr(transformers, name.removeprefix("tiny-").split("-")[0])(config).to(torch.bfloat16)
        model.save_pretrained(hub / ORGANIZATION / name)
        tokenizer.save_pretrained(hub / ORGANIZATION / name)


def write_accelerate_models(checkout: Path, hub: Path) -> None:
    """Write a tiny BERT and a tiny Llama under the names of the models that accelerate's examples load."""
    texts = (checkout / "tests/test_samples/MRPC/train.csv").read_text().splitlines()
    words = sorted({word for text in texts for word in text.lower().split()})
    vocab = {token: number for number, token in enumerate([*WORDPIECES, *words])}
    bert = transformers.BertConfig(
        vocab_size=len(vocab), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
    )
    torch.manual_seed(0)
    transformers.BertForSequenceClassification(bert).save_pretrained(hub / "bert-base-cased")
    BertTokenizer(vocab=vocab, model_max_length=128).save_pretrained(hub / "bert-base-cased")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_pairs(texts), eos_token=END)
    llama = AutoConfig.for_model("llama", **SIZES, vocab_size=len(tokenizer))
    transformers.LlamaForCausalLM(llama).save_pretrained(hub / "HuggingFaceTB/SmolLM-360M")
    tokenizer.save_pretrained(hub / "HuggingFaceTB/SmolLM-360M")
