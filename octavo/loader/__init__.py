"""From files to a ModelConfig and named weight tensors: Hugging Face folders, GGUF files, random weights."""
