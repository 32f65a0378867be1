# ruff: noqa: F401  The page uses these names.
from docs.samples import sequences
from integrations.tiny import llama
from peft import LoraConfig, get_peft_model
from transformers import TrainingArguments

model, data = llama(), sequences()
args = TrainingArguments("runs", use_cpu=True, max_steps=2, report_to=[], save_strategy="no", disable_tqdm=True)
