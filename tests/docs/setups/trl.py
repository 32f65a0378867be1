from datasets import Dataset
from integrations.tiny import OF_WORDS, letters, llama

tokenizer = letters()
# A folder of the name that the page has: nothing is downloaded.
llama(**OF_WORDS).save_pretrained("Qwen/Qwen3-0.6B")
tokenizer.save_pretrained("Qwen/Qwen3-0.6B")
pairs = Dataset.from_list([{"prompt": "ab", "chosen": "cd", "rejected": "ef"}] * 2)
