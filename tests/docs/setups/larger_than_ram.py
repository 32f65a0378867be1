# ruff: noqa: F401  The page uses these names.
from docs.samples import batches
from integrations.tiny import gpt2, gpt2_config
from transformers import GPT2LMHeadModel

gpt2().save_pretrained("folder")
gpt2 = gpt2_config()
ids = batches()[0]["input_ids"]
