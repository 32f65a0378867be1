from docs.samples import batches
from integrations.tiny import llama

llama().save_pretrained("folder")
folder, batches = "folder", batches()
