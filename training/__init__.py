"""Training of the demo model: corpus, tokenizer, training, export. docs/model.md lists the steps.

Serving does not import this package.
"""
