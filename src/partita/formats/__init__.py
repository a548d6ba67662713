"""Foreign file formats, one module each: text to core types and back."""
