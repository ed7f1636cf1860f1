"""Models: facts about an architecture, weights from a file, one decoder, a tokenizer.

Knows nothing of how a cache stores rows, of workloads or of measurement.
"""
