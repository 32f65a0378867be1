from integrations.tiny import gpt2

gpt2().save_pretrained("folder")
