"""Transport to the Hugging Face hub and ModelScope: staging, model cards, publishing, pulling, finding by name."""
