import string

from datasets import Dataset
from docs.samples import llama
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

words = ["<pad>", "<eos>", "<unk>", *string.ascii_lowercase]
tokens = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
tokens.pre_tokenizer = pre_tokenizers.Split("", "isolated")
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=tokens, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
)
# A folder of the name that the page has: nothing is downloaded.
llama(vocab_size=len(words), pad_token_id=0, eos_token_id=1).save_pretrained("Qwen/Qwen3-0.6B")
tokenizer.save_pretrained("Qwen/Qwen3-0.6B")
pairs = Dataset.from_list([{"prompt": "ab", "chosen": "cd", "rejected": "ef"}] * 2)
