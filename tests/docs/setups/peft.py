from docs.samples import batches, llama

llama().save_pretrained("folder")
folder, batches = "folder", batches()
