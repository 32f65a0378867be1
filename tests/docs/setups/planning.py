# ruff: noqa: F401  The page uses these names.
from docs.samples import batches, engine_of
from integrations.tiny import gpt2, gpt2_config
from transformers import GPT2LMHeadModel

import patrickstar as ps

ids = batches()[0]["input_ids"]
engine = engine_of()
build, config, gpt2 = gpt2, ps.Config(device_memory="1GiB", host_memory="1GiB"), gpt2_config()
