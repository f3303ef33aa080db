"""What a bundle's rounding does to acceptance and to its target, measured against a reference."""
