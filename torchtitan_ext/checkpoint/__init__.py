"""Resume, Hugging Face import and export."""
