"""Trains the small MoE model that the project ships: corpus, tokenizer, training, export.

Nothing here is imported by serving. The steps are described in docs/model.md.
"""
