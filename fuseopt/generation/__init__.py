"""What runs behind `generate()`. The modules here import transformers; importing this package does not."""
