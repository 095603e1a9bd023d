"""Steps that T5X reads and writes."""
